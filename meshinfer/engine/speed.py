"""How fast a span is on its device: measured once it is warm, before it is called ready."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshinfer.engine.shard import PagedShard
from meshinfer.engine.step import Chunk

PREFILL_ROWS: Final = 128
"""Rows of a chunk that stands for a long prompt: on CPU, microseconds a row hardly fall any more beyond it."""

_DECODE_STEPS: Final = 8
"""A tenth of a second for a span of 10 ms; the fastest of eight says what the device can do beside other work."""

_PREFILL_STEPS: Final = 3
_PREFILL_ENOUGH_S: Final = 0.25
"""A chunk is run again only while all of them took less: large spans are measured by one, which is long enough."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Microseconds for one average layer and one token: alone, and in a chunk of a long prompt. 0: not known."""

    decode_us: int
    prefill_us: int


def measure(shard: PagedShard, layers: float) -> Speed:
    """`layers` is the work of the span in layers of average size. Both figures are 1 at least.

    Only for a shard that is warm and that nobody uses yet.
    """
    room = min(shard.blocks_total * shard.block_tokens, shard.context)
    decode_ns = _decode_ns(shard, min(_DECODE_STEPS, room))
    count = min(PREFILL_ROWS, room)
    prefill_ns = _prefill_ns(shard, count)
    return Speed(_us(decode_ns / layers), _us(prefill_ns / layers / count))


def _decode_ns(shard: PagedShard, steps: int) -> int:
    """The fastest of so many single tokens, one after the other."""
    row = _rows(shard, 1)
    scratch = object()
    try:
        return min(_step_ns(shard, Chunk(scratch, position, row, 1)) for position in range(steps))
    finally:
        shard.free(scratch)


def _prefill_ns(shard: PagedShard, count: int) -> int:
    """The fastest of a few chunks of `count` rows, each from the beginning."""
    rows = _rows(shard, count)
    scratch = object()
    taken: list[int] = []
    try:
        while len(taken) < _PREFILL_STEPS and sum(taken) < _PREFILL_ENOUGH_S * 1e9:
            taken.append(_step_ns(shard, Chunk(scratch, 0, rows, 0)))
    finally:
        shard.free(scratch)
    return min(taken)


def _step_ns(shard: PagedShard, chunk: Chunk) -> int:
    begun_ns = time.perf_counter_ns()
    shard.step([chunk], time.monotonic())
    return time.perf_counter_ns() - begun_ns


def _rows(shard: PagedShard, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.linspace(-1, 1, count * shard.hidden, dtype=np.float32).reshape(count, shard.hidden)


def _us(nanoseconds: float) -> int:
    return max(1, round(nanoseconds / 1000))
