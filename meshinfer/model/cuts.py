"""Finds where a graph can be cut into layers: pure graph theory over numbered nodes, nothing of any model
family.

The *trunk* is what carries the tokens' data: the nodes that depend on the token ids other than through a
shape, and reach the result. Walking it in topological order, wherever exactly one tensor is alive the whole
computation passes through that tensor, so the graph can be cut there. Of these places, the last before each
attention begins a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from meshinfer.errors import ModelError

ATTENTION: Final = "PagedAttentionExtension"
SHAPE_OF: Final = "ShapeOf"

Tensor: TypeAlias = tuple[int, int]
"""One output of one node: (node's number, output's number)."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes in topological order: their operations, and for each the tensors that it reads."""

    kinds: Sequence[str]
    inputs: Sequence[Sequence[Tensor]]

    def of_kind(self, kind: str) -> list[int]:
        return [node for node, other in enumerate(self.kinds) if other == kind]


def trunk(graph: Topology, tokens: int, result: int) -> list[int]:
    """The nodes between `tokens` and `result`, both included, in topological order."""
    carries = [False] * len(graph.kinds)
    carries[tokens] = True
    for node in range(tokens + 1, len(graph.kinds)):
        if graph.kinds[node] != SHAPE_OF:
            carries[node] = any(carries[source] for source, _ in graph.inputs[node])
    reaching = _before(graph, result, None, set(graph.of_kind(SHAPE_OF)))
    return [node for node in sorted(reaching) if carries[node]]


def crossings(graph: Topology, path: Sequence[int]) -> list[tuple[int, Tensor]]:
    """`(node, tensor)` wherever, after `node` of the trunk has run, `tensor` is the only one that anyone
    still reads.
    """
    on_path = set(path)
    last_reader: dict[Tensor, int] = {}
    for node in path:
        for tensor in graph.inputs[node]:
            if tensor[0] in on_path:
                last_reader[tensor] = node
    outputs: dict[int, list[Tensor]] = {}
    for tensor in last_reader:
        outputs.setdefault(tensor[0], []).append(tensor)
    alive: set[Tensor] = set()
    found: list[tuple[int, Tensor]] = []
    for node in path:
        alive.difference_update([tensor for tensor in graph.inputs[node] if last_reader.get(tensor) == node])
        alive.update(outputs.get(node, ()))
        if len(alive) == 1:
            found.append((node, next(iter(alive))))
    return found


def find_cuts(graph: Topology, tokens: int, result: int, fits: Callable[[Tensor], bool]) -> list[Tensor]:
    """The tensors before layer 0, between each two layers, and after the last: one more than there are
    layers.

    `fits` says whether a tensor may be a hidden state at all (rows of real numbers). Raises ModelError
    where the graph has no attention, or no single tensor between two of them.
    """
    path = trunk(graph, tokens, result)
    attentions = [node for node in path if graph.kinds[node] == ATTENTION]
    if not attentions:
        raise ModelError(
            "the model has no attention whose keys and values could be kept in pages, so it cannot be shared"
        )
    if len(attentions) != len(graph.of_kind(ATTENTION)):
        raise ModelError(
            "the model has attention beside its main path (an encoder, say), so it cannot be shared"
        )
    stages = _stages([crossing for crossing in crossings(graph, path) if fits(crossing[1])], attentions)
    for layer, stage in enumerate(stages[:-1]):
        if not stage:
            raise ModelError(f"before layer {layer} the model has no single tensor where it could be cut")
    if not stages[-1]:
        raise ModelError("after its last layer the model has no single tensor where it could be cut")
    cuts = [stage[-1] for stage in stages[:-1]]
    # After the last layer come the final norm and the head, which look the same to this analysis. A layer
    # ends after as many crossings as the one before it did; should layers differ, a later place costs the
    # asker little and is as exact.
    ordinal = len(stages[-2]) - 1 if len(stages) > 2 else len(stages[-1]) - 1
    cuts.append(stages[-1][min(ordinal, len(stages[-1]) - 1)])
    return cuts


def _stages(found: Sequence[tuple[int, Tensor]], attentions: Sequence[int]) -> list[list[Tensor]]:
    """The crossings before the first attention, between each two, and after the last; each tensor once."""
    stages: list[list[Tensor]] = [[] for _ in range(len(attentions) + 1)]
    stage = 0
    for node, tensor in found:
        while stage < len(attentions) and node >= attentions[stage]:
            stage += 1
        if not stages[stage] or stages[stage][-1] != tensor:
            stages[stage].append(tensor)
    return stages


def segment_nodes(graph: Topology, begin: Tensor | None, end: int, known: Collection[int] = ()) -> set[int]:
    """The nodes that `end` needs when the tensor `begin` and the results of the nodes `known` are given."""
    return _before(graph, end, begin, known)


def leaking_shapes(graph: Topology, begin: Tensor, end: int, tokens: int) -> list[int]:
    """The ShapeOf nodes that `end` needs whose argument comes from before `begin`: shapes that would have to
    travel.

    Raises ModelError where data other than `begin` comes from there, for then `begin` is no cut.
    """
    early = [False] * len(graph.kinds)
    early[tokens] = True
    for node in range(tokens + 1, len(graph.kinds)):
        if graph.kinds[node] != SHAPE_OF:
            early[node] = any(early[tensor[0]] for tensor in graph.inputs[node] if tensor != begin)
    leaking: list[int] = []
    seen = {end}
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if early[node]:
            raise ModelError("a layer reads data from before its beginning, so the model cannot be cut there")
        if (
            graph.kinds[node] == SHAPE_OF
            and early[graph.inputs[node][0][0]]
            and graph.inputs[node][0] != begin
        ):
            leaking.append(node)
            continue
        for tensor in graph.inputs[node]:
            if tensor != begin and tensor[0] not in seen:
                seen.add(tensor[0])
                waiting.append(tensor[0])
    return leaking


def _before(graph: Topology, end: int, stop: Tensor | None, known: Collection[int]) -> set[int]:
    seen = {end}
    waiting = [end]
    while waiting:
        for tensor in graph.inputs[waiting.pop()]:
            if tensor != stop and tensor[0] not in seen and tensor[0] not in known:
                seen.add(tensor[0])
                waiting.append(tensor[0])
    return seen
