"""If these failed, a model would be cut where it must not be, or a hostile graph reach OpenVINO's reader."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import NAMES, ZOO, adopted, empty, weights_of, xml_of
from openvino import opset13

from meshinfer.errors import ModelError
from meshinfer.limits import GRAPH_BYTES
from meshinfer.model import cuts, graph_check, skeleton
from meshinfer.model.cuts import Tensor, Topology
from meshinfer.model.graph import PagedGraph
from meshinfer.model.mapping import release, weights_tensor
from meshinfer.model.reading import read_stateful
from meshinfer.model.trial import PagedModel
from meshinfer.values import KvShape, Span


@functools.cache
def paged(name: str) -> PagedGraph:
    return PagedGraph(xml_of(name).read_bytes(), weights_tensor(weights_of(name)))


def input_names(model: ov.Model) -> set[str]:
    return {name for port in model.inputs for name in port.get_names()}


# ── real models ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_found_to_be_what_its_configuration_says(name: str) -> None:
    config = json.loads((ZOO / name / "config.json").read_text(encoding="utf-8"))
    graph = paged(name)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or config["n_head"]
    assert graph.layers == config.get("num_hidden_layers", config.get("n_layer")) == 6
    assert graph.hidden == config.get("hidden_size", config.get("n_embd"))
    assert graph.vocabulary == config["vocab_size"]
    assert graph.kv == (KvShape(heads, 16, 16),) * 6
    assert graph.sliding_window == (config.get("sliding_window") or 0)


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_and_others_caches_never_travel(name: str) -> None:
    graph = paged(name)
    for first in range(6):
        for last in range(first + 1, 7):
            model = graph.span(Span(first, last))
            names = input_names(model)
            caches = {f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in range(first, last)}
            assert {each for each in names if "cache" in each} == caches
            assert "hidden" in names
            assert "input_ids" not in names
            assert [port.get_names() for port in model.outputs] == [{"hidden"}]
    assert input_names(graph.head()) == {"hidden"}
    assert input_names(graph.embedding()) <= {"input_ids", "position_ids"}


@pytest.mark.parametrize("name", NAMES)
def test_the_final_norm_belongs_to_the_head(name: str) -> None:
    """Else the last owner would do the asker's work, and each layer's end would not be alike."""
    graph = paged(name)
    kinds = [graph.topology.kinds[node] for node, _ in graph.cuts]
    assert len(set(kinds[1:])) == 1
    assert len(graph.head().get_ops()) > 5


@pytest.mark.parametrize("name", NAMES)
def test_a_span_runs_from_its_own_bytes_alone(name: str, tmp_path: Path) -> None:
    """A peer has only the ranges that its segments need; all else in its file is zeros."""
    whole, part = adopted(name, tmp_path / "whole"), empty(name, tmp_path / "part")
    span = Span(3, 5)
    for entry in part.missing_files():
        part.write_file(entry.name, whole.read_blob(entry.digest, 0, entry.size))
    for piece in part.missing(span, asker=True):
        part.write_piece(piece, whole.read_blob(piece.digest, 0, piece.length))
    zeros = part.weights_path.read_bytes().count(0)
    assert zeros > part.manifest.bytes_of([0, 1, 2, 5])
    one, other = PagedGraph.open(whole), PagedGraph.open(part)
    ids = np.random.default_rng(1).integers(0, one.vocabulary, 9)
    rows = PagedModel(one.embedding(), 16).run([ids])
    assert np.array_equal(rows, PagedModel(other.embedding(), 16).run([ids]))
    passed = PagedModel(one.span(span), 16).run([rows[0][:8], rows[0][8:]])
    for expected, got in zip(
        passed, PagedModel(other.span(span), 16).run([rows[0][:8], rows[0][8:]]), strict=True
    ):
        assert np.abs(expected).max() > 0
        assert np.array_equal(expected, got)
    logits = PagedModel(one.head(), 16).run(passed)
    for expected, got in zip(logits, PagedModel(other.head(), 16).run(passed), strict=True):
        assert np.array_equal(expected, got)


def test_a_span_beyond_the_model_is_refused() -> None:
    with pytest.raises(ModelError, match="6 layers"):
        paged("llama").span(Span(5, 7))


# ── cuts, on graphs made up ───────────────────────────────────────────────────────────────────────────────


class Sketch:
    """A graph drawn node by node, then numbered in a random topological order."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.inputs: list[list[Tensor]] = []

    def add(self, kind: str, *sources: int) -> int:
        self.kinds.append(kind)
        self.inputs.append([(source, 0) for source in sources])
        return len(self.kinds) - 1

    def shuffled(self, seed: int) -> tuple[Topology, dict[int, int]]:
        chance = random.Random(seed)
        number: dict[int, int] = {}
        ready = [node for node, sources in enumerate(self.inputs) if not sources]
        while ready:
            node = ready.pop(chance.randrange(len(ready)))
            number[node] = len(number)
            ready += [
                other
                for other, sources in enumerate(self.inputs)
                if other not in number
                and other not in ready
                and sources
                and all(n in number for n, _ in sources)
            ]
        order = sorted(number, key=number.__getitem__)
        inputs = [[(number[source], port) for source, port in self.inputs[node]] for node in order]
        return Topology([self.kinds[node] for node in order], inputs), number


@st.composite
def decoders(draw: st.DrawFn) -> tuple[Sketch, int, int, list[int], list[int]]:
    """A decoder of random shape: sketch, tokens, result, cuts, and the shapes that later layers read."""
    sketch = Sketch()
    tokens = sketch.add("Parameter")
    positions = sketch.add("Parameter")
    state = sketch.add("Gather", sketch.add("Constant"), tokens)
    found, shapes = [state], []
    branches = draw(st.integers(1, 4))
    for _ in range(draw(st.integers(2, 5))):
        measured = draw(st.sampled_from([tokens, *found]))
        queries = [sketch.add("MatMul", state, sketch.add("Constant")) for _ in range(3)]
        if draw(st.booleans()):
            shape = sketch.add("ShapeOf", measured)
            queries[0] = sketch.add("Reshape", queries[0], shape)
            if measured != state:
                shapes.append(shape)
        turned = sketch.add("Multiply", queries[1], sketch.add("Cos", positions))
        attention = sketch.add(cuts.ATTENTION, queries[0], turned, queries[2], sketch.add("Parameter"))
        middle = sketch.add("Add", state, attention)
        inner = [sketch.add("MatMul", middle) for _ in range(branches)]
        state = sketch.add("Add", middle, *inner)
        found.append(state)
    norm = sketch.add("Multiply", state, sketch.add("Sqrt", state))
    result = sketch.add("Result", sketch.add("MatMul", norm))
    return sketch, tokens, result, found, shapes


@given(decoders(), st.integers(0, 2**32))
def test_cuts_are_found_whatever_the_order_of_nodes(
    decoder: tuple[Sketch, int, int, list[int], list[int]], seed: int
) -> None:
    sketch, tokens, result, expected, _ = decoder
    graph, number = sketch.shuffled(seed)
    found = cuts.find_cuts(graph, number[tokens], number[result], lambda tensor: tensor[0] != number[tokens])
    assert found == [(number[node], 0) for node in expected]


@given(decoders(), st.integers(0, 2**32))
def test_without_the_shapes_of_earlier_layers_a_layer_needs_nothing_of_them(
    decoder: tuple[Sketch, int, int, list[int], list[int]], seed: int
) -> None:
    sketch, tokens, _, expected, shapes = decoder
    graph, number = sketch.shuffled(seed)
    for begin, end in itertools.pairwise(expected):
        start = (number[begin], 0)
        leaking = cuts.leaking_shapes(graph, start, number[end], number[tokens])
        assert {number[shape] for shape in shapes} >= set(leaking)
        nodes = cuts.segment_nodes(graph, start, number[end], leaking)
        assert number[tokens] not in nodes
        assert sum(graph.kinds[node] == cuts.ATTENTION for node in nodes) == 1


def test_a_model_whose_layers_all_read_the_embedding_has_no_cut() -> None:
    sketch = Sketch()
    tokens = sketch.add("Parameter")
    embedded = state = sketch.add("Gather", tokens)
    for _ in range(3):
        attention = sketch.add(cuts.ATTENTION, state, state, state)
        state = sketch.add("Add", attention, embedded)
    result = sketch.add("Result", state)
    graph, number = sketch.shuffled(0)
    with pytest.raises(ModelError, match="before layer 1"):
        cuts.find_cuts(graph, number[tokens], number[result], lambda _: True)


def test_data_from_before_a_cut_is_refused_and_not_left_out() -> None:
    sketch = Sketch()
    tokens = sketch.add("Parameter")
    first = sketch.add("Gather", tokens)
    second = sketch.add("Add", first)
    end = sketch.add("Add", first, second)
    graph, number = sketch.shuffled(0)
    with pytest.raises(ModelError, match="cannot be cut there"):
        cuts.leaking_shapes(graph, (number[second], 0), number[end], number[tokens])


def test_a_model_without_attention_is_refused() -> None:
    sketch = Sketch()
    tokens = sketch.add("Parameter")
    result = sketch.add("Result", sketch.add("MatMul", tokens))
    graph, number = sketch.shuffled(0)
    with pytest.raises(ModelError, match="no attention"):
        cuts.find_cuts(graph, number[tokens], number[result], lambda _: True)


# ── hostile graphs ────────────────────────────────────────────────────────────────────────────────────────

WEIGHTS = np.arange(64, dtype=np.float32)


@functools.cache
def little() -> bytes:
    """A graph as OpenVINO writes it, small enough to be damaged a thousand times."""
    data = opset13.parameter([-1, 8], np.float32, "data")
    weights = opset13.constant(WEIGHTS.reshape(8, 8))
    result = opset13.result(opset13.matmul(data, weights, False, False))
    model = ov.Model([result], [data], "little")
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.xml"
        ov.serialize(model, path)
        return path.read_bytes()


def check(xml: bytes) -> graph_check.CheckedGraph:
    return graph_check.check(xml, WEIGHTS.nbytes)


def replaced(pattern: str, by: str) -> Callable[[], bytes]:
    def make() -> bytes:
        text, count = re.subn(pattern, by, little().decode(), count=1, flags=re.DOTALL)
        assert count == 1, pattern
        return text.encode()

    return make


DTD = '<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
BILLION = '<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
HOSTILE: dict[str, Callable[[], bytes]] = {
    "external entity": replaced(r"<\?xml.*?\?>", DTD),
    "entity bomb": replaced(r"<\?xml.*?\?>", BILLION),
    "bare doctype": replaced(r"<\?xml.*?\?>", '<?xml version="1.0"?><!DOCTYPE net SYSTEM "y.dtd">'),
    "processing instruction": replaced(r"<layers>", "<?include x?><layers>"),
    "other encoding": lambda: little().decode().encode("utf-16"),
    "empty": lambda: b"",
    "no XML": lambda: b"\x80\x04model",
    "truncated": lambda: little()[:-20],
    "trailing": lambda: little() + b"<net/>",
    "too long": lambda: b" " * (GRAPH_BYTES + 1),
    "same id twice": replaced(r'layer id="1"', 'layer id="0"'),
    "negative id": replaced(r'layer id="1"', 'layer id="-1"'),
    "id no number": replaced(r'layer id="1"', 'layer id="one"'),
    "huge id": replaced(r'layer id="1"', 'layer id="99999999999"'),
    "same name twice": replaced(
        r'(layer id="0" name=)"([^"]*)"(.*?layer id="1" name=)"[^"]*"', r'\1"\2"\3"\2"'
    ),
    "long name": replaced(r'(layer id="1" name=)"[^"]*"', rf'\1"{"x" * 5000}"'),
    "type with a path": replaced(r'type="MatMul"', 'type="../MatMul"'),
    "offset beyond": replaced(r'offset="0"', 'offset="4"'),
    "huge offset": replaced(r'offset="0"', 'offset="18446744073709551615"'),
    "negative offset": replaced(r'offset="0"', 'offset="-256"'),
    "size beyond": replaced(r'size="256"', 'size="260"'),
    "size unlike its shape": replaced(r'size="256"', 'size="252"'),
    "no offset": replaced(r'offset="0" ', ""),
    "no data": replaced(r"<data element_type[^>]*offset[^>]*/>", ""),
    "two data": replaced(r"(<data element_type[^>]*offset[^>]*/>)", r"\1\1"),
    "unknown type": replaced(r'element_type="f32"( shape="8)', r'element_type="q7"\1'),
    "string weights": replaced(r'element_type="f32"( shape="8)', r'element_type="string"\1'),
    "overflowing shape": replaced(r'shape="8, ?8"', 'shape="4294967296,4294967296"'),
    "overflowing shape of nothing": replaced(r'shape="8, ?8"', 'shape="2147483647,2147483647,0"'),
    "negative shape": replaced(r'shape="8, ?8"', 'shape="-8,-8"'),
    "open constant": replaced(r'shape="8, ?8"', 'shape="?,8"'),
    "high rank": replaced(r'shape="8, ?8"', f'shape="{"1," * 40}64"'),
    "absurd parameter": replaced(r'shape="\?,8"', 'shape="?,99999999999999"'),
    "absurd dimension": replaced(r"<dim>8</dim>", "<dim>999999999999</dim>"),
    "dimension no number": replaced(r"<dim>8</dim>", "<dim>eight</dim>"),
    "many dimensions": replaced(r"<dim>8</dim>", "<dim>8</dim>" * 20),
    "same port twice": replaced(r'(<port id="0".*?</port>)', r"\1\1"),
    "edge from nowhere": replaced(r'from-layer="0"', 'from-layer="77"'),
    "edge from no port": replaced(r'from-port="0"', 'from-port="9"'),
    "edge to nowhere": replaced(r'to-layer="2"', 'to-layer="77"'),
    "edge twice": replaced(r"(<edge [^>]*/>)", r"\1\1"),
    "circle": replaced(r'(<edge [^>]*from-layer=)"0"( from-port=)"0"', r'\1"2"\2"2"'),
    "two sections": replaced(r"<edges>", "<layers></layers><edges>"),
    "no edges": replaced(r"<edges>.*</edges>", ""),
    "other root": lambda: b"<model></model>",
    "old version": replaced(r'version="11"', 'version="7"'),
    "loop": replaced(r"<data element_type[^>]*offset[^>]*/>", "<body><layers/></body>"),
    "deep": replaced(r"<edges>", "<rt_info>" + "<a>" * 100 + "</a>" * 100 + "</rt_info><edges>"),
    "strange section": replaced(r"<edges>", "<plugins/><edges>"),
    "weights of no constant": replaced(
        r'<data transpose_a="false"', '<data offset="0" size="256" transpose_a="false"'
    ),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_graph_is_refused_before_the_reader_sees_it(make: Callable[[], bytes]) -> None:
    with pytest.raises(ModelError, match=r"the model's graph is (refused|damaged)"):
        check(make())


def test_an_honest_graph_passes_and_its_constants_are_found() -> None:
    checked = check(little())
    assert [(c.offset, c.size, c.element, c.small) for c in checked.constants] == [(0, 256, "f32", True)]
    assert graph_check.small_ranges(checked.constants) == ((0, 256),)


@pytest.mark.parametrize("name", NAMES)
def test_real_graphs_pass(name: str) -> None:
    checked = graph_check.check(xml_of(name).read_bytes(), weights_of(name).stat().st_size)
    assert {"ScaledDotProductAttention", "ReadValue"} <= checked.operations
    large = sum(constant.size for constant in checked.constants if not constant.small)
    assert large > weights_of(name).stat().st_size * 0.9


@settings(max_examples=300, derandomize=True)  # a crash of the reader would take the whole run with it
@given(st.data())
def test_whatever_is_done_to_a_graph_it_is_accepted_or_refused(data: st.DataObject) -> None:
    """The one law; and what is accepted, the reader takes or refuses, and does not fall over."""
    xml = bytearray(little())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(xml) - 1))
        length = data.draw(st.integers(0, 12))
        xml[at : at + length] = data.draw(
            st.one_of(
                st.binary(max_size=8), st.sampled_from([b"-1", b"9" * 20, b"<dim>", b'"', b"&a;", b"\0"])
            )
        )
    try:
        check(bytes(xml))
    except ModelError:
        return
    weights = ov.Tensor(WEIGHTS.view(np.uint8).copy())
    try:
        read_stateful(bytes(xml), weights)
    except ModelError:
        return


def test_a_graph_that_makes_terabytes_out_of_nothing_is_refused() -> None:
    """Constants are computed when the graph is transformed: a few bytes could ask for any memory."""
    data = opset13.parameter([-1, 1], np.float32, "data")
    wide = opset13.broadcast(opset13.constant(np.float32(0)), np.array([2**20, 2**20]))
    model = ov.Model([opset13.result(opset13.multiply(data, wide))], [data], "bomb")
    xml, weights = serialized(model)
    graph_check.check(xml, len(weights))
    with pytest.raises(ModelError, match="of little"):
        read_stateful(xml, ov.Tensor(np.frombuffer(weights, np.uint8).copy()))


def serialized(model: ov.Model) -> tuple[bytes, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.xml"
        ov.serialize(model, path)
        return path.read_bytes(), path.with_suffix(".bin").read_bytes()


def test_a_graph_that_is_no_language_model_says_why() -> None:
    with pytest.raises(ModelError, match=r"cannot be shared|does not take tokens"):
        PagedGraph(little(), ov.Tensor(WEIGHTS.view(np.uint8).copy()))


def test_a_piece_outlives_its_graph_and_the_release_of_its_pages(tmp_path: Path) -> None:
    """A compiled model reads its weights whenever it likes; were they unmapped, the process would die."""
    files = adopted("llama", tmp_path)
    graph = PagedGraph.open(files)
    piece = PagedModel(graph.span(Span(0, 2)), 64)
    rows = [np.random.default_rng(0).standard_normal((5, 1, 64), np.float32)]
    expected = piece.run(rows)
    del graph
    gc.collect()
    release(files.weights_path)
    assert np.array_equal(piece.run(rows), expected)
    again = PagedModel(PagedGraph.open(files).span(Span(0, 2)), 64)
    assert np.array_equal(again.run(rows), expected)


def test_weights_may_arrive_while_others_of_the_same_file_are_in_use(tmp_path: Path) -> None:
    """A peer that takes over a further layer fetches it while it serves those that it has."""
    whole, part = adopted("llama", tmp_path / "whole"), empty("llama", tmp_path / "part")
    for entry in part.missing_files():
        part.write_file(entry.name, whole.read_blob(entry.digest, 0, entry.size))
    results = []
    for layer in (1, 4):
        for needed in part.missing(Span(layer, layer + 1)):
            part.write_piece(needed, whole.read_blob(needed.digest, 0, needed.length))
        results.append(PagedModel(PagedGraph.open(part).span(Span(layer, layer + 1)), 64))
    rows = [np.random.default_rng(0).standard_normal((5, 1, 64), np.float32)]
    for layer, piece in zip((1, 4), results, strict=True):
        expected = PagedModel(paged("llama").span(Span(layer, layer + 1)), 64).run(rows)
        assert np.array_equal(piece.run(rows), expected)


def test_a_model_with_a_state_besides_keys_and_values_is_refused() -> None:
    """As models with convolution or state-space layers have it: nobody would carry it over, or free it."""
    model = read_stateful(xml_of("llama").read_bytes(), weights_tensor(weights_of("llama")))
    end = next(
        op for op in model.get_ordered_ops() if op.get_friendly_name().endswith("layers.2/aten::add/Add_1")
    )
    readers = end.output(0).get_target_inputs()
    before = opset13.read_value(opset13.reduce_mean(end, np.array([1]), True), "convolution")
    mixed = opset13.add(end, before)
    for reader in readers:
        reader.replace_source_output(mixed.output(0))
    keeps = opset13.assign(opset13.reduce_mean(mixed, np.array([1]), True), "convolution")
    model = ov.Model(model.get_results(), [*model.get_sinks(), keeps], model.get_parameters(), "mixed")
    xml, weights = serialized(model)
    with pytest.raises(ModelError, match="cannot be shared"):
        PagedGraph(xml, ov.Tensor(np.frombuffer(weights, np.uint8).copy()))


def test_a_skeleton_that_gives_another_graph_is_noticed() -> None:
    """A small constant that was computed from large weights would be wrong wherever these are not."""
    weights = bytearray(weights_of("llama").read_bytes())
    xml = xml_of("llama").read_bytes()
    constants = graph_check.check(xml, len(weights)).constants
    scale = next(c for c in constants if "layers.0.self_attn/aten::scaled_dot_product_attention/" in c.name)
    assert scale.small
    weights[scale.offset] ^= 1
    other = PagedGraph(xml, ov.Tensor(np.frombuffer(bytes(weights), np.uint8).copy()))
    skeleton._compare(paged("llama"), paged("llama"))
    with pytest.raises(ModelError, match="depends on its large weights"):
        skeleton._compare(paged("llama"), other)
