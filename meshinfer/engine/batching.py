"""Which of the steps that wait for a shard go into its next batch.

Steps of few rows (decode) go first, since somebody watches their text grow; at least one longer step
(prefill) goes along each time, since prefill that waited for a pause in decoding might wait for ever. Askers
take turns. A sequence is in a batch once at most, and its steps keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

BATCH_ROWS = 512
"""Rows in one batch, where single steps are not larger: on CPU, throughput no longer grows beyond it (FACTS:
prefill 256 is past the knee), while everybody in the batch waits for all of it."""

DECODE_ROWS = 16
"""A step with no more rows a sequence than this is decode: one token, or one with its guesses to verify."""


class Waiter(Protocol):
    """A step that waits: whose it is, the sequences it touches and its rows."""

    @property
    def asker(self) -> Hashable: ...
    @property
    def sequences(self) -> Sequence[Hashable]: ...
    @property
    def rows(self) -> int: ...


W = TypeVar("W", bound=Waiter)


class WaitingSteps(Generic[W]):
    """The steps that wait for one shard: in order within an asker, turn by turn between askers."""

    def __init__(self, batch_rows: int = BATCH_ROWS) -> None:
        self._batch_rows = batch_rows
        self._queues: dict[Hashable, deque[W]] = {}
        self._waiting: dict[Hashable, int] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[W]:
        for queue in self._queues.values():
            yield from queue

    def waits_for(self, sequence: Hashable) -> bool:
        """Whether a step of `sequence` waits."""
        return sequence in self._waiting

    def add(self, step: W) -> None:
        self._queues.setdefault(step.asker, deque()).append(step)
        self._length += 1
        for sequence in step.sequences:
            self._waiting[sequence] = self._waiting.get(sequence, 0) + 1

    def take(self) -> list[W]:
        """Remove and return the next batch; empty only when nothing waits."""
        if self._length == 1:
            return self.clear()
        eligible = [_eligible(queue) for queue in self._queues.values()]
        decode = _in_turn([steps for steps, _ in eligible], self._batch_rows)
        rows = sum(step.rows for step in decode)
        prefill = _in_turn([steps for _, steps in eligible], self._batch_rows - rows)
        batch = decode + prefill
        self._remove(batch)
        return batch

    def clear(self) -> list[W]:
        """Remove and return all that waits."""
        steps = list(self)
        self._queues.clear()
        self._waiting.clear()
        self._length = 0
        return steps

    def _remove(self, batch: Sequence[W]) -> None:
        taken = {id(step) for step in batch}
        self._length -= len(batch)
        for step in batch:
            for sequence in step.sequences:
                left = self._waiting[sequence] - 1
                if left:
                    self._waiting[sequence] = left
                else:
                    del self._waiting[sequence]
        for asker in dict.fromkeys(step.asker for step in batch):
            # Served askers go to the end of the line, so whoever found no room is first next time.
            queue = self._queues.pop(asker)
            rest = deque(step for step in queue if id(step) not in taken)
            if rest:
                self._queues[asker] = rest


def _eligible(queue: deque[W]) -> tuple[list[W], list[W]]:
    """The decode and prefill steps of one asker that wait for no earlier step of their own sequences."""
    decode: list[W] = []
    prefill: list[W] = []
    seen: set[Hashable] = set()
    for step in queue:
        if seen.isdisjoint(step.sequences):
            few = step.rows <= DECODE_ROWS * len(step.sequences)
            (decode if few else prefill).append(step)
        seen.update(step.sequences)
    return decode, prefill


def _in_turn(lists: Sequence[Sequence[W]], room: int) -> list[W]:
    """One step from each list, then a second from each, while they fit; the first is taken even if it does
    not."""
    chosen: list[W] = []
    used = 0
    for turn in range(max(map(len, lists), default=0)):
        for steps in lists:
            if turn >= len(steps):
                continue
            step = steps[turn]
            if chosen and used + step.rows > room:
                return chosen
            chosen.append(step)
            used += step.rows
    return chosen
