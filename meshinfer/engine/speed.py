"""How fast a span is on its device: measured once it is warm, before it is called ready."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshinfer.engine.shard import PagedShard
from meshinfer.engine.step import Chunk
from meshinfer.limits import MEASURE_S

PREFILL_ROWS: Final = 128
"""Rows of a chunk that stands for a long prompt: on CPU, microseconds a row hardly fall any more beyond it."""

_DECODE_STEPS: Final = 8
_PREFILL_STEPS: Final = 3
"""Steps of each kind; the fastest says what the device can do beside other work."""

_ENOUGH_S: Final = MEASURE_S / 2
"""No further step is begun once those of its kind took so long together: a large span's are long enough for few to do,
and a mesh waits for it."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Microseconds for one average layer and one token: alone, and in a chunk of a long prompt. 0: not known."""

    decode_us: int
    prefill_us: int

    def best(self, other: Speed) -> Speed:
        """The faster of both figures, each by itself: other work on a device only ever makes it slower."""
        return Speed(_faster(self.decode_us, other.decode_us), _faster(self.prefill_us, other.prefill_us))


def measure(shard: PagedShard, layers: float, *, prompts: bool = True) -> Speed:
    """`layers` is the work of the span in layers of average size. Figures are 1 at least; that of prompts is 0
    where those are not to be tried.

    For a shard that is warm, by whoever may use it; sequences that are in it stay. Raises `PoolFull` where they leave
    no room.
    """
    room = min(shard.blocks_total * shard.block_tokens, shard.context)
    row, count = _rows(shard, 1), min(PREFILL_ROWS, room)
    sequence, rows = object(), _rows(shard, count)
    singles = (Chunk(sequence, position, row, 1) for position in range(min(_DECODE_STEPS, room)))
    chunks = (Chunk(sequence, 0, rows, 0) for _ in range(_PREFILL_STEPS if prompts else 0))
    try:
        decode_ns, prefill_ns = _fastest_ns(shard, singles), _fastest_ns(shard, chunks)
    finally:
        shard.free(sequence)
    return Speed(_us(decode_ns / layers), _us(prefill_ns / layers / count))


def _fastest_ns(shard: PagedShard, chunks: Iterable[Chunk]) -> int:
    taken: list[int] = []
    for chunk in chunks:
        begun_ns = time.perf_counter_ns()
        shard.step([chunk], time.monotonic())
        taken.append(time.perf_counter_ns() - begun_ns)
        if sum(taken) > _ENOUGH_S * 1e9:
            break
    return min(taken, default=0)


def _rows(shard: PagedShard, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.linspace(-1, 1, count * shard.hidden, dtype=np.float32).reshape(count, shard.hidden)


def _us(nanoseconds: float) -> int:
    return max(1, round(nanoseconds / 1000)) if nanoseconds else 0


def _faster(one_us: int, other_us: int) -> int:
    return min(one_us, other_us) if one_us and other_us else one_us or other_us
