"""A model's graph after the paged-attention pass, and the pieces that it is cut into at run time.

The pass is applied to the whole model and the result is cut: the other way round it fails for all pieces but
the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from meshinfer.errors import ModelError
from meshinfer.limits import HIDDEN, LAYERS, VOCABULARY
from meshinfer.model import cuts
from meshinfer.model.cuts import ATTENTION, Tensor
from meshinfer.model.manifest import GRAPH
from meshinfer.model.mapping import weights_tensor
from meshinfer.model.reading import IrModel, constant_value, read_paged, topology
from meshinfer.model.weights import ModelFiles
from meshinfer.values import KvShape, Span

TOKENS: Final = "input_ids"
HIDDEN_NAME: Final = "hidden"
LOGITS: Final = "logits"
PAGED_INPUTS: Final = frozenset(
    {
        "past_lens",
        "subsequence_begins",
        "block_indices",
        "block_indices_begins",
        "max_context_len",
        "position_ids",
    }
)
SLIDING_WINDOW_PORT: Final = 10
"""Of PagedAttentionExtension; 3 and 4 are the caches (OpenVINO,
src/core/include/openvino/op/paged_attention.hpp).
"""


class PagedGraph:
    """One model after the paged-attention pass, with its cuts found. Each piece that is taken is a model of
    its own.

    Rows are tokens: hidden states are f32, `[rows, 1, hidden]` or `[rows, hidden]` as the model has it. Not
    safe to use from two threads at once. Costs some 40 MB while it is held (SmolLM2); the weights are
    mapped, not read.
    """

    def __init__(self, xml: bytes, weights: Any) -> None:
        """From a graph that `graph_check` found harmless, and its weights (an `openvino.Tensor`, u8).

        Raises ModelError, which says why, where the model cannot be paged or cut.
        """
        self._model = read_paged(xml, weights)
        self._operations = self._model.get_ordered_ops()
        self.topology = topology(self._operations)
        self._tokens = self._find_tokens()
        self._result = self._find_result()
        self.vocabulary = _last_dimension(self._operations[self._result].input_value(0), "logits", VOCABULARY)
        self.cuts = cuts.find_cuts(self.topology, self._tokens, self._result, self._may_be_hidden)
        self.hidden = _last_dimension(self._output(self.cuts[0]), "hidden state", HIDDEN)
        self._check_cuts()
        self.kv = tuple(self._kv_shapes())
        self.sliding_window = max(self._windows(), default=0)

    @classmethod
    def open(cls, files: ModelFiles) -> PagedGraph:
        """From the store; of the weights, only what the pieces to be taken need has to be there. Raises
        ModelError.
        """
        xml = files.read_file(GRAPH)
        assert xml is not None, "every manifest names a graph"
        return cls(xml, weights_tensor(files.weights_path))

    @property
    def layers(self) -> int:
        return len(self.cuts) - 1

    def embedding(self) -> IrModel:
        """i64 `input_ids` [rows] (and i64 `position_ids` [rows] where the model adds positions) →
        `hidden`.
        """
        return self._piece(None, 0)

    def span(self, span: Span) -> IrModel:
        """`hidden`, the paged inputs, and the caches of the span's own layers → `hidden`.

        The paged inputs are those of `PAGED_INPUTS` that the layers read; the caches `key_cache.N` and
        `value_cache.N`, N counted over the whole model, have the shape and type that the device gives them
        when it compiles.
        """
        if span.last > self.layers:
            raise ModelError(f"the model has {self.layers} layers, not {span.last}")
        return self._piece(span.first, span.last)

    def head(self) -> IrModel:
        """`hidden` → `logits`, f32 `[rows, 1, vocabulary]` or `[rows, vocabulary]`: final norm and output
        matrix.
        """
        return self._piece(self.layers, None)

    def whole(self) -> IrModel:
        """The model uncut: `input_ids` and all paged inputs and caches → `logits`."""
        return self._piece(None, None)

    def constants(self) -> tuple[dict[str, int], ...]:
        """Which constants the embedding, each layer and the head read: bytes by name, in this order of
        pieces.

        Names are those of the graph's XML, save for constants that the pass made.
        """
        starts: list[Tensor | None] = [None, *self.cuts]
        ends = [*(cut[0] for cut in self.cuts), self._result]
        pieces: list[dict[str, int]] = []
        for begin, end in zip(starts, ends, strict=True):
            shapes = cuts.leaking_shapes(self.topology, begin, end, self._tokens) if begin else ()
            nodes = cuts.segment_nodes(self.topology, begin, end, shapes)
            constants = [self._operations[node] for node in nodes if self.topology.kinds[node] == "Constant"]
            pieces.append({node.get_friendly_name(): int(node.get_byte_size()) for node in constants})
        return tuple(pieces)

    def constant_nodes(self) -> list[Any]:
        """All constants that are left after the pass, whether a piece reads them or not, in topological
        order.
        """
        return [self._operations[node] for node in self.topology.of_kind("Constant")]

    # ── cutting ─────────────────────────────────────────────────────────────────────────────────────────────

    def _piece(self, first: int | None, last: int | None) -> IrModel:
        import openvino
        from openvino import opset13

        # A cut moves edges, so each piece gets a copy of the graph; the copy shares the weights (0.04 s for
        # SmolLM2). It lists its operations in the same order.
        copy = self._model.clone()
        operations = copy.get_ordered_ops()
        if last is None:
            end = operations[self._result].input_value(0)
        else:
            node, port = self.cuts[last]
            end = operations[node].output(port)
        result = opset13.result(end)
        if first is not None:
            self._begin_at(operations, first, self._result if last is None else self.cuts[last][0])
        name = LOGITS if last is None else HIDDEN_NAME
        result.set_friendly_name(name)
        result.output(0).set_names({name})
        model = openvino.Model([result], _parameters(result), f"{name}-{first}-{last}")
        self._check_piece(model, first, last)
        return model

    def _begin_at(self, operations: Sequence[Any], layer: int, end: int) -> None:
        import openvino
        from openvino import opset13

        node, port = self.cuts[layer]
        tensor = operations[node].output(port)
        shape = [-1, *([1] if len(tensor.get_partial_shape()) == 3 else []), self.hidden]
        hidden = opset13.parameter(shape, openvino.Type.f32, HIDDEN_NAME)
        hidden.output(0).set_names({HIDDEN_NAME})
        for reader in tensor.get_target_inputs():
            reader.replace_source_output(hidden.output(0))
        for shape_of in cuts.leaking_shapes(self.topology, (node, port), end, self._tokens):
            _replace_shape(operations[shape_of], hidden)

    def _check_piece(self, model: IrModel, first: int | None, last: int | None) -> None:
        """No piece may need another's caches, nor the token ids: these never travel."""
        layers = range(0 if first is None else first, self.layers if last is None else last)
        allowed = {HIDDEN_NAME if first is not None else TOKENS, *PAGED_INPUTS}
        allowed |= {f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in layers}
        foreign = {name for port in model.inputs for name in port.get_names()} - allowed
        if foreign:
            needed = ", ".join(sorted(foreign))
            raise ModelError(
                f"layers {layers.start} to {layers.stop - 1} cannot be cut out: they also need {needed}"
            )

    # ── reading what the pass left ──────────────────────────────────────────────────────────────────────────

    def _find_tokens(self) -> int:
        for node in self.topology.of_kind("Parameter"):
            if TOKENS in self._operations[node].output(0).get_names():
                return node
        raise ModelError(f"the model does not take tokens ({TOKENS}), so it cannot answer a text")

    def _find_result(self) -> int:
        results = self.topology.of_kind("Result")
        if len(results) == 1:
            return results[0]
        named = [node for node in results if LOGITS in self._operations[node].input_value(0).get_names()]
        if len(named) != 1:
            raise ModelError(f"the model has {len(results)} results, and none of them is the {LOGITS}")
        return named[0]

    def _output(self, tensor: Tensor) -> Any:
        return self._operations[tensor[0]].output(tensor[1])

    def _may_be_hidden(self, tensor: Tensor) -> bool:
        """Rows of f32, as all exporters have them whatever the weights are: `[rows, width]` or `[rows, 1,
        width]`.
        """
        output = self._output(tensor)
        shape = output.get_partial_shape()
        if output.get_element_type().get_type_name() != "f32" or shape.rank.is_dynamic:
            return False
        dimensions = list(shape)
        if len(dimensions) not in (2, 3) or dimensions[0].is_static or dimensions[-1].is_dynamic:
            return False
        return len(dimensions) == 2 or dimensions[1].is_dynamic or dimensions[1].get_length() == 1

    def _check_cuts(self) -> None:
        if self.layers > LAYERS:
            raise ModelError(f"the model has {self.layers} layers, and at most {LAYERS} are supported")
        for cut in self.cuts:
            width = _last_dimension(self._output(cut), "hidden state", HIDDEN)
            if width != self.hidden:
                raise ModelError(f"the model's layers pass on states of {self.hidden} and of {width} numbers")

    def _windows(self) -> Iterator[int]:
        """The tokens that each layer's attention looks back upon; 0 where that is all."""
        for node in self.topology.of_kind(ATTENTION):
            window = constant_value(self._operations[node].input_value(SLIDING_WINDOW_PORT))
            yield 0 if window is None else max(0, int(window.item()))

    def _kv_shapes(self) -> Iterator[KvShape]:
        """Also numbers the caches by their layers, whatever order the pass met them in."""
        for layer, node in enumerate(self.topology.of_kind(ATTENTION)):
            attention = self._operations[node]
            for kind, port in (("key", 3), ("value", 4)):
                cache = attention.input_value(port)
                cache.set_names({f"{kind}_cache.{layer}"})
                cache.get_node().set_friendly_name(f"{kind}_cache.{layer}")
            known = attention.get_rt_info()
            heads, key, value = (
                int(known[name].value) for name in ("num_k_heads", "k_head_size", "v_head_size")
            )
            if not all(0 < number <= HIDDEN for number in (heads, key, value)):
                raise ModelError(
                    f"layer {layer} has keys of {heads} heads of {key} numbers, which is not supported"
                )
            yield KvShape(heads, key, value)


def _parameters(result: Any) -> list[Any]:
    """The parameters that `result` needs, in the order of their names."""
    found: dict[str, Any] = {}
    seen = {result.get_name()}
    waiting = [result]
    while waiting:
        for source in waiting.pop().input_values():
            node = source.get_node()
            name = node.get_name()
            if name not in seen:
                seen.add(name)
                waiting.append(node)
                if node.get_type_name() == "Parameter":
                    found[node.get_friendly_name()] = node
    return [found[name] for name in sorted(found)]


def _replace_shape(shape_of: Any, hidden: Any) -> None:
    """Puts constants, and the number of rows of `hidden`, in the place of a shape that was taken before the
    cut.

    A static dimension that is gathered from it becomes a constant (phi3 reads a head's size so); an open
    one can only be the number of rows, for before the cut nothing else varies. `verify` would notice if it
    were otherwise.
    """
    import numpy as np
    from openvino import opset13

    element = np.dtype(shape_of.get_output_element_type(0).to_dtype())
    shape = list(shape_of.input_value(0).get_partial_shape())
    _fold_gathers(shape_of, shape, element)
    if not shape_of.output(0).get_target_inputs():
        return
    if sum(dimension.is_dynamic for dimension in shape) > 1:
        raise ModelError(
            "a layer reads the shape of a tensor from before its beginning, so the model cannot be cut there"
        )
    zero = opset13.constant(np.zeros(1, np.int64))
    rows = opset13.gather(
        opset13.shape_of(hidden, element.name.replace("int", "i")), zero, opset13.constant(np.int64(0))
    )
    parts = [
        rows if dimension.is_dynamic else opset13.constant(np.array([dimension.get_length()], element))
        for dimension in shape
    ]
    shape_of.output(0).replace(opset13.concat(parts, 0).output(0))


def _fold_gathers(shape_of: Any, shape: Sequence[Any], element: Any) -> None:
    import numpy as np
    from openvino import opset13

    for reader in shape_of.output(0).get_target_inputs():
        gather = reader.get_node()
        if gather.get_type_name() != "Gather" or reader.get_index() != 0:
            continue
        indices = gather.input_value(1).get_node()
        if indices.get_type_name() != "Constant":
            continue
        wanted = [shape[int(index)] for index in indices.data.flatten()]
        if all(dimension.is_static for dimension in wanted):
            values = np.array([dimension.get_length() for dimension in wanted], element)
            gather.output(0).replace(opset13.constant(values.reshape(indices.data.shape)).output(0))


def _last_dimension(output: Any, what: str, most: int) -> int:
    shape = output.get_partial_shape()
    if shape.rank.is_dynamic or not len(shape) or shape[len(shape) - 1].is_dynamic:
        raise ModelError(f"the width of the model's {what} is not known")
    width = int(shape[len(shape) - 1].get_length())
    if not 0 < width <= most:
        raise ModelError(f"the model's {what} is {width} wide, and at most {most} is supported")
    return width
