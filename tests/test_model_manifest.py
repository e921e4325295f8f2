"""If these failed, two models could pass for one, or a peer's manifest could make this program misbehave."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import NAMES, NO_TEXTS, changed, manifest_of, weights_of, xml_of

from meshinfer.errors import ModelError
from meshinfer.limits import MANIFEST_BYTES, PIECE_BYTES, SMALL_CONSTANT_BYTES
from meshinfer.model import graph_check, ranges
from meshinfer.model.build import adopt, build_manifest
from meshinfer.model.graph_check import ConstantRange
from meshinfer.model.manifest import EMBEDDING, HEAD, Manifest, segments_of
from meshinfer.model.progress import Silent
from meshinfer.model.ranges import Range
from meshinfer.values import KvShape, Span

NAME = "llama"


def tree() -> Any:
    return json.loads(manifest_of(NAME).to_bytes())


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


# ── what a manifest says ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_survives_its_bytes(name: str) -> None:
    manifest = manifest_of(name)
    again = Manifest.parse(manifest.to_bytes())
    assert again == manifest
    assert again.model == manifest.model
    assert re.fullmatch(r"[0-9a-f]{64}", again.model)


@pytest.mark.parametrize("name", NAMES)
def test_every_large_constant_lies_in_the_pieces(name: str) -> None:
    manifest = manifest_of(name)
    covered = np.zeros(manifest.weights_size, bool)
    for piece in manifest.all_pieces:
        assert not covered[piece.offset : piece.end].any()
        covered[piece.offset : piece.end] = True
    for constant in graph_check.check(xml_of(name).read_bytes(), manifest.weights_size).constants:
        if not constant.small:
            assert covered[constant.offset : constant.end].all(), constant


def test_facts_are_what_placement_reckons_with() -> None:
    manifest = manifest_of(NAME)
    facts = manifest.facts("mine")
    assert (facts.model, facts.name, facts.layers) == (manifest.model, "mine", 6)
    assert (facts.hidden, facts.vocabulary, facts.context) == (64, 512, 512)
    assert facts.kv == (KvShape(2, 16, 16),) * 6
    # q, k, v, o, gate, up, down in f32; the norms are small constants, of which some lie between.
    matrices = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert all(matrices <= size <= matrices + SMALL_CONSTANT_BYTES for size in facts.layer_bytes)
    assert facts.embedding_bytes == facts.head_bytes == 512 * 64 * 4


def test_a_models_id_is_its_content_and_not_its_place(tmp_path: Path) -> None:
    xml, weights = changed(NAME, tmp_path / "elsewhere")
    same = build_manifest(xml, weights, NO_TEXTS, Silent())
    assert build_manifest(xml_of(NAME), weights_of(NAME), NO_TEXTS, Silent()).model == same.model
    numbers = bytearray(weights.read_bytes())
    numbers[same.pieces([3])[0].offset + 5] ^= 1
    xml, weights = changed(NAME, tmp_path / "other", weights=bytes(numbers))
    other = build_manifest(xml, weights, NO_TEXTS, Silent())
    assert other.model != same.model
    # All else is the same, and would not have to be fetched again.
    assert len(set(other.all_pieces) - set(same.all_pieces)) == 1


def test_tied_embedding_and_head_share_their_pieces(tmp_path: Path) -> None:
    """The same bytes are fetched, kept and counted once."""
    text = xml_of(NAME).read_text(encoding="utf-8")
    constants = graph_check.check(text.encode(), weights_of(NAME).stat().st_size).constants
    embedding, head = (constant for constant in constants if constant.size == 512 * 64 * 4)
    tied = text.replace(f'offset="{head.offset}" size', f'offset="{embedding.offset}" size')
    assert tied != text
    xml, weights = changed(NAME, tmp_path, xml=tied.encode())
    manifest = build_manifest(xml, weights, NO_TEXTS, Silent())
    assert manifest.embedding == manifest.head != ()
    assert manifest.bytes_of([EMBEDDING, HEAD]) == manifest.bytes_of([EMBEDDING])


def test_a_segment_that_is_not_there_is_refused() -> None:
    for segment in (6, -1):
        with pytest.raises(ModelError, match="6 layers"):
            manifest_of(NAME).pieces([segment])


def test_who_needs_what() -> None:
    assert segments_of(Span(1, 3), asker=False) == (1, 2)
    assert segments_of(None, asker=True) == (EMBEDDING, HEAD)
    assert segments_of(Span(0, 1), asker=True) == (EMBEDDING, 0, HEAD)


@pytest.mark.parametrize("damage", ["shorter", "gone", "empty"])
def test_damaged_files_are_reported_and_not_described(tmp_path: Path, damage: str) -> None:
    xml, weights = changed(NAME, tmp_path)
    if damage == "shorter":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "empty":
        weights.write_bytes(b"")
    else:
        weights.unlink()
    with pytest.raises(ModelError):
        build_manifest(xml, weights, NO_TEXTS, Silent())


def test_a_source_that_changes_while_it_is_taken_in_is_noticed(tmp_path: Path) -> None:
    xml, weights = changed(NAME, tmp_path / "source")
    manifest = build_manifest(xml, weights, NO_TEXTS, Silent())
    numbers = bytearray(weights.read_bytes())
    numbers[manifest.all_pieces[2].offset] ^= 1
    weights.write_bytes(numbers)
    with pytest.raises(ModelError, match="damaged"):
        adopt(tmp_path / "store", manifest, NAME, xml, weights, NO_TEXTS, Silent())


def test_an_interrupted_adoption_resumes(tmp_path: Path) -> None:
    class Stops:
        done = 0

        def update(self, stage: str, done: int, total: int) -> None:
            if done > total // 2:
                raise KeyboardInterrupt
            self.done = done

    manifest = build_manifest(xml_of(NAME), weights_of(NAME), NO_TEXTS, Silent())
    first, again = Stops(), []
    arguments = (tmp_path, manifest, NAME, xml_of(NAME), weights_of(NAME), NO_TEXTS)
    with pytest.raises(KeyboardInterrupt):
        adopt(*arguments, first)

    class Remembers:
        def update(self, stage: str, done: int, total: int) -> None:
            again.append(total)

    assert adopt(*arguments, Remembers()).complete
    assert again[-1] < sum(piece.length for piece in manifest.all_pieces) // 2 + 1


# ── dividing ────────────────────────────────────────────────────────────────────────────────────────────────

CONSTANTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12), st.sets(st.integers(0, 3))), min_size=1, max_size=12
)


@given(CONSTANTS)
def test_each_segment_gets_all_bytes_of_its_constants_and_shared_bytes_once(
    drawn: list[tuple[int, int, set[int]]],
) -> None:
    unit = SMALL_CONSTANT_BYTES * 2
    constants = [
        ConstantRange(f"c{i}", at * unit, size * unit, "u8") for i, (at, size, _) in enumerate(drawn)
    ]
    reads = [
        {c.name: c.size for c, (_, _, segments) in zip(constants, drawn, strict=True) if segment in segments}
        for segment in range(4)
    ]
    divided = ranges.divide(constants, reads, {constant.name for constant in constants})
    for one, other in itertools.pairwise(divided):
        assert one.end <= other.offset
    for constant, (_, _, segments) in zip(constants, drawn, strict=True):
        for segment in segments or {4}:
            mine = [part for part in divided if segment in part.segments]
            inside = sum(max(0, min(p.end, constant.end) - max(p.offset, constant.offset)) for p in mine)
            assert inside == constant.size
    assert all(0 < part.end - part.offset <= PIECE_BYTES for part in divided)


def test_neighbours_become_one_piece_and_long_ones_several() -> None:
    large, small = 3 * PIECE_BYTES, 100
    constants = [
        ConstantRange("a", 0, large, "u8"),
        ConstantRange("tiny", large, small, "u8"),
        ConstantRange("b", large + small, 5000, "u8"),
        ConstantRange("c", large + small + 5000, 5000, "u8"),
    ]
    divided = ranges.divide(
        constants, [{"a": large, "b": 5000, "tiny": small}, {"c": 5000}], {"a", "b", "c", "tiny"}
    )
    assert divided[:3] == [Range(i * PIECE_BYTES, (i + 1) * PIECE_BYTES, frozenset({0})) for i in range(3)]
    assert divided[3] == Range(large, large + small + 5000, frozenset({0}))
    assert divided[4].segments == {1}


def test_a_constant_that_the_pass_made_brings_all_that_vanished() -> None:
    """Of which it was made is not recorded; to send too much is harmless, to send too little is not."""
    constants = [ConstantRange("gone", 0, 8192, "u8"), ConstantRange("kept", 8192, 8192, "u8")]
    divided = ranges.divide(constants, [{"made": 16384}, {"kept": 8192}], {"made", "kept"})
    assert divided == [Range(0, 8192, frozenset({0})), Range(8192, 16384, frozenset({1}))]


# ── hostile manifests ───────────────────────────────────────────────────────────────────────────────────────


def with_(*path: Any) -> Callable[[Any], bytes]:
    """The manifest with the last of `path` put where the others lead."""

    def make(value: Any) -> bytes:
        *way, last, new = path
        inner = value
        for step in way:
            inner = inner[step]
        inner[last] = new
        return canonical(value)

    return make


HOSTILE: dict[str, Callable[[Any], bytes]] = {
    "empty": lambda _: b"",
    "no JSON": lambda _: b"\x80\x04manifest",
    "a number": lambda _: b"1",
    "NaN": lambda _: b'{"format":NaN}',
    "deep": lambda _: b"[" * 200_000,
    "huge number": lambda value: canonical(value).replace(b'"weights":', b'"weights":' + b"9" * 5000),
    "too long": lambda _: b" " * (MANIFEST_BYTES + 1),
    "not canonical": lambda value: json.dumps(value).encode(),
    "same key twice": lambda value: canonical(value).replace(b'"weights":', b'"weights":1,"weights":'),
    "trailing": lambda value: canonical(value) + b"\n",
    "other format": with_("format", 2),
    "format as a truth": with_("format", True),
    "unknown field": with_("extra", 1),
    "no size": with_("weights", 0),
    "size beyond all": with_("weights", 2**60),
    "size as a float": with_("weights", 1e6),
    "piece beyond the weights": with_("weights", 5000),
    "piece of nothing": with_("pieces", 0, 1, 0),
    "negative offset": with_("pieces", 0, 0, -1),
    "overlapping pieces": with_("pieces", 1, 0, 0),
    "long piece": with_("pieces", 0, 1, PIECE_BYTES + 1),
    "short digest": with_("pieces", 0, 2, "00"),
    "digest in capitals": with_("pieces", 0, 2, "A" * 64),
    "piece of nobody": with_("head", []),
    "index beyond": with_("head", [99]),
    "index twice": with_("head", [7, 7]),
    "index as a truth": with_("head", [True]),
    "negative index": with_("head", [-1]),
    "layers unlike KV": with_("layers", []),
    "too many layers": with_("layers", [[]] * 2000),
    "KV of nothing": with_("config", "kv", 0, [0, 16, 16]),
    "huge KV": with_("config", "kv", 0, [2, 10**9, 16]),
    "huge hidden": with_("config", "hidden", 10**9),
    "huge context": with_("config", "context", 10**12),
    "no vocabulary": with_("config", "vocabulary", 0),
    "token beyond": with_("config", "eos", [512]),
    "many ends": with_("config", "eos", [1] * 1000),
    "bos as text": with_("config", "bos", "1"),
    "escape in a label": with_("config", "quantization", "\x1b[2J"),
    "long label": with_("config", "quantization", "x" * 100),
    "file with a path": with_("files", "../key", ["0" * 64, 1]),
    "long file": with_("files", "graph", ["0" * 64, 10**12]),
    "no graph": lambda value: canonical({**value, "files": {"small": value["files"]["small"]}}),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_manifest_is_refused_in_one_sentence(make: Callable[[Any], bytes]) -> None:
    with pytest.raises(ModelError, match="manifest is damaged") as refusal:
        Manifest.parse(make(tree()))
    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
)


@settings(max_examples=400)
@given(st.data())
def test_whatever_is_put_into_a_manifest_it_is_refused_or_comes_back_as_it_was(data: st.DataObject) -> None:
    value = copy.deepcopy(tree())
    inner = value
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if not isinstance(inner[key], (dict, list)) or data.draw(st.booleans()):
            break
        inner = inner[key]
    inner[key] = data.draw(ODD)
    law(canonical(value))


@settings(max_examples=400)
@given(st.data())
def test_whatever_is_done_to_its_bytes_it_is_refused_or_comes_back_as_it_was(data: st.DataObject) -> None:
    raw = bytearray(manifest_of(NAME).to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    law(bytes(raw))


@given(st.binary(max_size=200))
def test_no_bytes_at_all_do_anything_else(raw: bytes) -> None:
    law(raw)


def law(raw: bytes) -> None:
    try:
        manifest = Manifest.parse(raw)
    except ModelError:
        return
    assert manifest.to_bytes() == raw
