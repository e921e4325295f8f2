"""From logits to the next token.

The order is that of transformers' generation: repetition penalty, temperature, top-k, top-p, min-p, draw.
(llama.cpp applies temperature last; at temperature 1 the two agree.)

A vocabulary has up to 256,000 tokens, and to sort it takes 10 ms and more; so nothing here does. What may be
among the k largest is found by a threshold: the k-th largest of the maxima of blocks is never above the k-th
largest logit, because k blocks each hold one that is at least as large. Only the few blocks that reach it are
looked at. Equal logits rank by id, the lowest first, so that no result depends on how an algorithm orders
ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from meshinfer.answer.question import SamplingParams
from meshinfer.errors import StepError

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
History = Sequence[int] | npt.NDArray[np.int64]

_BLOCK: Final = 128
_WITHIN: Final = np.arange(_BLOCK)

_NOT_FINITE: Final = "the model gave logits that are not finite numbers: the answer cannot go on"


class Sampler:
    """Chooses the tokens of one answer. It has no state that calls change.

    A draw depends on the seed and on how many tokens came before, on nothing else: what is computed again
    after a failure draws the same token, on every platform (Philox 4x64-10 of Salmon et al. 2011, the 64 raw
    bits of which numpy keeps stable, unlike its distributions).
    """

    __slots__ = ("_seed", "params")

    def __init__(self, params: SamplingParams, seed: int) -> None:
        """`seed`, 64 bits unsigned, is used where `params` has none."""
        self.params = params
        self._seed = seed if params.seed is None else params.seed

    def pick(self, logits: Logits, history: History) -> int:
        """The next token after `history` (prompt and answer so far); `logits` is `[vocabulary]` and left
        unchanged.

        For 128k tokens about 15 µs greedy, 0.4 ms with top-p. Raises `StepError` when there is a NaN or +inf
        among the logits, or nothing finite.
        """
        if self.params.repetition_penalty != 1.0:
            logits = _penalised(logits, history, self.params.repetition_penalty)
        best = int(logits.argmax())  # finds NaN too, if there is one
        top = logits[best]
        if not np.isfinite(top):
            raise StepError(_NOT_FINITE)
        if self.params.greedy or self.params.top_k == 1 or self.params.top_p == 0.0:
            return best
        uniforms = self._uniforms(len(history))
        if 0 < self.params.top_k < logits.size:
            ranked, mass = self._ranked(logits, top)
            return int(ranked[_draw(mass, next(uniforms))])
        return self._drawn(logits, top, uniforms)

    def _ranked(self, logits: Logits, top: np.float32) -> tuple[Ids, Logits]:
        """What top-k, then top-p, then min-p leave: tokens and relative probabilities, falling."""
        ranked = largest(logits, self.params.top_k)
        mass = _mass(logits[ranked], top, self.params.temperature)
        if self.params.top_p < 1.0:
            # The token that crosses top_p still belongs to it, as in transformers.
            running = np.cumsum(mass, dtype=np.float64)
            mass = mass[: int(np.searchsorted(running, self.params.top_p * running[-1])) + 1]
        if self.params.min_p > 0.0:
            mass = mass[: max(1, int((mass >= self.params.min_p).sum()))]
        return ranked[: mass.size], mass

    def _drawn(self, logits: Logits, top: np.float32, uniforms: Iterator[float]) -> int:
        """Draws from the whole vocabulary under top-p and min-p, without ranking it.

        A token belongs to top-p when those that rank before it hold less than that share. So one is drawn
        from all and that is checked, in one pass; if it does not belong, neither does any that ranks after
        it, and the next is drawn from the rest. By rejection the result has exactly top-p's distribution,
        after 1 + ln(1 / top_p) draws on average.
        """
        mass = _mass(logits, top, self.params.temperature)
        share = self.params.top_p * float(mass.sum()) if self.params.top_p < 1.0 else np.inf
        if self.params.min_p > 0.0:
            mass *= mass >= self.params.min_p
        while True:
            drawn = _draw(mass, next(uniforms))
            if share == np.inf or _mass_before(drawn, logits, mass) < share:
                return drawn
            mass *= logits >= logits[drawn]
            mass[drawn:] *= logits[drawn:] > logits[drawn]

    def _uniforms(self, position: int) -> Iterator[float]:
        """Numbers of 53 bits in [0, 1), a stream of its own for each position."""
        stream = np.random.Philox(key=self._seed, counter=position << 64)
        while True:
            yield float(stream.random_raw() >> 11) * 2.0**-53


def pick_rows(
    logits: Logits, samplers: Sequence[Sampler], histories: Sequence[History]
) -> list[int | StepError]:
    """The next token of each row of `logits` `[rows, vocabulary]`; a row that fails does so alone."""
    return [_pick(*row) for row in zip(samplers, logits, histories, strict=True)]


def greedy(logits: Logits) -> Ids:
    """The likeliest token of each row of `[rows, vocabulary]`, the lowest id of equal ones.

    Raises `StepError` when any row has a NaN or +inf, or nothing finite.
    """
    best: Ids = logits.argmax(axis=1)
    if not np.isfinite(logits[np.arange(best.size), best]).all():
        raise StepError(_NOT_FINITE)
    return best


def largest(logits: Logits, count: int) -> Ids:
    """Ids of the `count` largest of `logits` `[vocabulary]`, falling; equal ones by id, the lowest first."""
    blocks = logits.size // _BLOCK
    near = _reaching(logits, count) if count <= blocks // 2 else _partitioned(logits, count)
    order = np.argsort(-logits[near], kind="stable")[:count]
    return near[order]


def _reaching(logits: Logits, count: int) -> Ids:
    """Ascending ids of all that can be among the `count` largest, and few others."""
    whole = logits.size // _BLOCK * _BLOCK
    maxima = logits[:whole].reshape(-1, _BLOCK).max(axis=1)
    floor = np.partition(maxima, maxima.size - count)[maxima.size - count]
    ids = (np.flatnonzero(maxima >= floor)[:, None] * _BLOCK + _WITHIN).ravel()
    ids = np.concatenate([ids, np.arange(whole, logits.size)])
    reaching: Ids = ids[logits[ids] >= floor]
    return reaching


def _partitioned(logits: Logits, count: int) -> Ids:
    """Exactly the `count` largest, equal ones ascending."""
    if count >= logits.size:
        return np.arange(logits.size)
    floor = np.partition(logits, logits.size - count)[logits.size - count]
    above = np.flatnonzero(logits > floor)
    return np.concatenate([above, np.flatnonzero(logits == floor)[: count - above.size]])


def _pick(sampler: Sampler, logits: Logits, history: History) -> int | StepError:
    try:
        return sampler.pick(logits, history)
    except StepError as error:
        return error


def _penalised(logits: Logits, history: History, penalty: float) -> Logits:
    """As Keskar et al. 2019 (CTRL): tokens that were there get less likely, whatever their logit's sign."""
    seen = np.asarray(history, dtype=np.int64)
    values = logits[seen]
    penalised = logits.copy()
    penalised[seen] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))
    return penalised


def _mass(logits: Logits, top: np.float32, temperature: float) -> Logits:
    """Probabilities relative to the best token's: in (0, 1], without overflow."""
    mass = logits - top
    if temperature != 1.0:
        mass /= np.float32(temperature)
    np.exp(mass, out=mass)
    return mass


def _mass_before(token: int, logits: Logits, mass: Logits) -> float:
    """The mass of all tokens that rank before `token`."""
    equal_before = np.count_nonzero(logits[:token] == logits[token])
    return float((mass * (logits > logits[token])).sum()) + equal_before * float(mass[token])


def _draw(mass: Logits, uniform: float) -> int:
    """An index with probability in proportion to `mass`; `uniform` lies in [0, 1)."""
    if mass.size <= 8 * _BLOCK:
        return _inverse(mass, uniform)[0]
    # First a block, then within it: a running sum over the whole vocabulary would take milliseconds.
    sums = np.add.reduceat(mass, np.arange(0, mass.size, _BLOCK))
    block, rest = _inverse(sums, uniform)
    start = block * _BLOCK
    return start + _inverse(mass[start : start + _BLOCK], rest)[0]


def _inverse(mass: Logits, uniform: float) -> tuple[int, float]:
    """The index where the running sum passes `uniform` of the total, and how far into it, in [0, 1)."""
    running = np.cumsum(mass, dtype=np.float64)
    target = uniform * running[-1]
    index = int(np.searchsorted(running, target, side="right"))
    if index >= mass.size:  # rounding at the very end
        return int(mass.argmax()), 0.0
    before = float(running[index - 1]) if index else 0.0
    return index, (target - before) / (float(running[index]) - before)
