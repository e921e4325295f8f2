"""Checks a model against itself: cut at every place it must say what it says uncut, and what it said as it
came.

Two kinds of harm are looked for. A cut may be no cut (something else would have to travel): then the chain
differs from the uncut paged model, and by nothing at all is the only answer that counts. And the
paged-attention pass may change a model without any error (one architecture of 32 differed by 0.85): then
the paged model differs from the stateful one that it was made from. All runs are f32 throughout, for only
then are such figures comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from meshinfer.errors import ModelError
from meshinfer.limits import NEAR_TIE, ORIGINAL_DIFFERENCE, VERIFY_LOGITS_BYTES
from meshinfer.model.graph import PagedGraph
from meshinfer.model.manifest import GRAPH
from meshinfer.model.mapping import release, weights_tensor
from meshinfer.model.progress import Progress
from meshinfer.model.reading import read_stateful
from meshinfer.model.skeleton import check_skeleton
from meshinfer.model.trial import Original, PagedModel, Rows, Tokens
from meshinfer.model.weights import ModelFiles
from meshinfer.values import ModelId, Span

_SEED: Final = 20_26
_STAGE: Final = "verifying"


@dataclass(frozen=True, slots=True)
class Report:
    """What came out. `reason` says in one sentence what does not hold, and is empty where all holds.

    `cuts` counts the places where the model was cut. `max_abs_diff` is the largest difference in any logit
    between the chain and the uncut paged model, `max_abs_diff_original` between that and the model as it
    came. `greedy_equal` is strict; of `tokens` compared, `near_ties` differed where the two best logits
    were closer than `NEAR_TIE`, which no reordering of sums can be held to, and which alone do not make a
    model fail.
    """

    model: ModelId
    layers: int
    cuts: int
    max_abs_diff: float
    max_abs_diff_original: float
    greedy_equal: bool
    tokens: int
    near_ties: int
    reason: str

    @property
    def holds(self) -> bool:
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN, so a difference that is none is null."""
        fields: dict[str, Any] = {
            "model": self.model,
            "layers": self.layers,
            "cuts": self.cuts,
            "max_abs_diff": _number(self.max_abs_diff),
            "max_abs_diff_original": _number(self.max_abs_diff_original),
            "greedy_equal": self.greedy_equal,
            "tokens": self.tokens,
            "near_ties": self.near_ties,
        }
        return fields if self.holds else {**fields, "reason": self.reason}

    def sentence(self) -> str:
        """For a person."""
        if not self.holds:
            return self.reason
        ties = f" but for {self.near_ties} near ties" if self.near_ties else ""
        return (
            f"all {self.cuts} cuts of its {self.layers} layers change nothing; {self.tokens} greedy tokens "
            f"are as in the"
            f" original{ties}, its logits within {self.max_abs_diff_original:.1e}"
        )


def verify(files: ModelFiles, progress: Progress, quick: bool = False) -> Report:
    """Runs the model in the store uncut, cut at each place alone, cut at all places at once, and as it came.

    `quick` leaves out the cuts at one place alone, and takes fewer tokens. Memory: the model once, for what
    is compared is run one piece after the other. Raises ModelError where the model is not all here, or
    cannot be run or cut at all.
    """
    if not files.complete:
        raise ModelError(
            f"{files.name} is not all here, and only a whole model can be verified: pull it first"
        )
    xml = files.read_file(GRAPH)
    assert xml is not None, "every manifest names a graph"
    weights = weights_tensor(files.weights_path)
    try:
        graph = PagedGraph(xml, weights)
        check_skeleton(files, graph)
        return _Verification(files, graph, read_stateful(xml, weights), progress, quick).run()
    finally:
        release(files.weights_path)


class _Verification:
    def __init__(
        self, files: ModelFiles, graph: PagedGraph, original: Any, progress: Progress, quick: bool
    ) -> None:
        self._files = files
        self._graph = graph
        self._stateful = original
        self._progress = progress
        self._chains = list(_chains(graph.layers, quick))
        self._pieces = 4 + sum(len(chain) for chain in self._chains)
        self._done = 0
        self._prompts = _prompts(graph, files.manifest.config.context, quick)
        self._decoded = 3 if quick else 12
        self._longest = max(sum(map(len, prompt)) for prompt in self._prompts) + self._decoded

    def run(self) -> Report:
        """Piece after piece, each over all trials: so one piece is in memory at a time, and compiled once."""
        trials, original = self._original()
        whole = self._through(self._graph.whole(), trials)
        embedded = self._through(self._graph.embedding(), trials)
        head = PagedModel(self._graph.head(), self._longest)
        self._count()
        chained = 0.0
        for chain in self._chains:
            hidden = embedded
            for span in chain:
                hidden = self._through(self._graph.span(span), hidden)
            logits = [head.run(steps) for steps in hidden]
            chained = _larger(chained, _difference(whole, logits))
        return self._report(chained, whole, original)

    def _original(self) -> tuple[list[list[Tokens]], list[list[Rows]]]:
        model = Original(self._stateful)
        answers = [model.answer(prompt, self._decoded) for prompt in self._prompts]
        self._stateful = None
        self._count()
        return [tokens for tokens, _ in answers], [logits for _, logits in answers]

    def _through(self, model: Any, trials: Sequence[Sequence[Tokens | Rows]]) -> list[list[Rows]]:
        piece = PagedModel(model, self._longest)
        outputs = [piece.run(steps) for steps in trials]
        self._count()
        return outputs

    def _count(self) -> None:
        self._done += 1
        self._progress.update(_STAGE, self._done, self._pieces)

    def _report(self, chained: float, whole: list[list[Rows]], original: list[list[Rows]]) -> Report:
        from_original = _difference(whole, original)
        tokens, differing, near = _greedy(whole, original)
        return Report(
            model=self._files.model,
            layers=self._graph.layers,
            cuts=self._graph.layers + 1,
            max_abs_diff=chained,
            max_abs_diff_original=from_original,
            greedy_equal=not differing,
            tokens=tokens,
            near_ties=near,
            reason=_reason(self._files.name, chained, from_original, differing - near),
        )


def _chains(layers: int, quick: bool) -> Iterator[tuple[Span, ...]]:
    """Ways to divide the layers. Embedding and head are cut off in all of them.

    The first has all cuts at once, each layer alone; then, unless `quick`, come the cuts at one place each,
    for a longer span is compiled to other kernels than its layers alone.
    """
    yield tuple(Span(layer, layer + 1) for layer in range(layers))
    if not quick:
        for place in range(1, layers):
            yield Span(0, place), Span(place, layers)


def _prompts(graph: PagedGraph, context: int, quick: bool) -> list[list[Tokens]]:
    """Random tokens, in one step or in two: prompts are prefilled in chunks. One is longer than a sliding
    window.
    """
    random = np.random.default_rng(_SEED)
    lengths = [(11,)] if quick else [(41,), (5, 1), (19, 30)]
    beyond = graph.sliding_window + 17
    fits = beyond * graph.vocabulary * 4 <= VERIFY_LOGITS_BYTES
    if graph.sliding_window and beyond + 16 <= context and fits:
        lengths.append((beyond,))
    room = max(1, context - 16)
    return [
        [random.integers(0, graph.vocabulary, min(length, room), np.int64) for length in steps]
        for steps in lengths
    ]


def _difference(some: Sequence[Sequence[Rows]], others: Sequence[Sequence[Rows]]) -> float:
    """The largest difference between any two logits; NaN where there is a NaN."""
    largest = 0.0
    for one, other in _pairs(some, others):
        largest = _larger(largest, float(np.abs(one - other).max()))
    return largest


def _larger(one: float, other: float) -> float:
    # max() loses a NaN that stands second, and a NaN is the worst that can come of a comparison.
    return float(np.maximum(one, other))


def _greedy(some: Sequence[Sequence[Rows]], others: Sequence[Sequence[Rows]]) -> tuple[int, int, int]:
    """How many best tokens were compared, how many differ, and in how many of these the two best were
    near.
    """
    compared = differing = near = 0
    for one, other in _pairs(some, others):
        unequal = np.argmax(one, -1) != np.argmax(other, -1)
        best = np.sort(other[unequal], -1)[:, -2:]
        compared += len(unequal)
        differing += int(unequal.sum())
        near += int((best[:, 1] - best[:, 0] < NEAR_TIE).sum())
    return compared, differing, near


def _pairs(some: Sequence[Sequence[Rows]], others: Sequence[Sequence[Rows]]) -> Iterator[tuple[Rows, Rows]]:
    """Logits `[rows, vocabulary]` of the same steps; some models as they came give those of a step's last
    row only.
    """
    for one_trial, other_trial in zip(some, others, strict=True):
        for one, other in zip(one_trial, other_trial, strict=True):
            left, right = one.reshape(-1, one.shape[-1]), other.reshape(-1, other.shape[-1])
            rows = min(len(left), len(right))
            yield left[-rows:], right[-rows:]


def _reason(name: str, chained: float, from_original: float, unequal: int) -> str:
    # Written so that a NaN, which is not equal and not smaller either, is a reason too.
    if chained != 0.0:
        return (
            f"{name} cannot be shared: cut into layers, its logits are {chained:.3g} from the uncut model's"
        )
    if not from_original <= ORIGINAL_DIFFERENCE:
        return (
            f"{name} cannot be shared: with its keys and values in pages it answers otherwise than as it came"
            f" (logits {from_original:.3g} apart)"
        )
    if unequal:
        return f"{name} cannot be shared: with its keys and values in pages, {unequal} best tokens differ"
    return ""


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
