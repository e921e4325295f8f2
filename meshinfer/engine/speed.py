"""How fast a span is on its device: measured once it is warm, before it is called ready."""

from __future__ import annotations

import time

import numpy as np

from meshinfer.engine.shard import PagedShard
from meshinfer.engine.step import Chunk

_STEPS = 8
"""A tenth of a second for a span of 10 ms; the fastest of eight says what the device can do beside other work."""


def decode_us(shard: PagedShard, layers: int) -> int:
    """Microseconds that one layer takes for one token, the mean over the span's `layers`; 1 at least.

    Takes the place of warming: only for a shard that nobody uses yet.
    """
    row = np.linspace(-1, 1, shard.hidden, dtype=np.float32).reshape(1, shard.hidden)
    scratch = object()
    fastest_ns = None
    try:
        for position in range(min(_STEPS, shard.blocks_total * shard.block_tokens)):
            begun_ns = time.perf_counter_ns()
            shard.step([Chunk(scratch, position, row, 1)], time.monotonic())
            took_ns = time.perf_counter_ns() - begun_ns
            fastest_ns = took_ns if fastest_ns is None else min(fastest_ns, took_ns)
    finally:
        shard.free(scratch)
    assert fastest_ns is not None, "a pool has room for one token at least"
    return max(1, fastest_ns // 1000 // layers)
