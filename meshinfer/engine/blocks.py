"""Which blocks of a shard's KV memory belong to which sequence, and how many bytes KV takes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshinfer.engine.step import BadStep, MissingKv, PoolFull
from meshinfer.limits import LEASE_S
from meshinfer.values import KvShape, Precision

CPU_BLOCK_TOKENS = 32
GPU_BLOCK_TOKENS = 16

U8_PARAMETERS = 8
"""A scale and a zero point, f32 each. OpenVINO's CPU plugin keeps a pair per channel for a block of keys, and
a pair per token for values (measured on 2026.4; the tests compare with compiled models)."""


class Write(Protocol):
    """`count` tokens of `sequence` from `position` on; a `Chunk` is one."""

    @property
    def sequence(self) -> Hashable: ...
    @property
    def position(self) -> int: ...
    @property
    def count(self) -> int: ...


class _Holding:
    """What one sequence has: `held` tokens are written, `blocks` reach further during a step."""

    __slots__ = ("blocks", "held", "table", "touched")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.table: NDArray[np.int32] | None = (
            None  # `blocks` as the device wants them; made anew when they change
        )
        self.held = 0
        self.touched = 0.0


class BlockPool:
    """Blocks of KV memory, each owned by one sequence or free.

    A step is `reserve`d, computed, and then `commit`ted or `abandon`ed. Blocks freed last are used first, so
    that memory which was never needed is never touched. Times are seconds of any one monotonic clock.
    """

    def __init__(self, blocks: int, block_tokens: int, lease_s: float = LEASE_S) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"not a pool: {blocks} blocks of {block_tokens} tokens")
        self.blocks_total = blocks
        self.block_tokens = block_tokens
        self._lease_s = lease_s
        self._free = list(range(blocks - 1, -1, -1))
        self._holdings: dict[Hashable, _Holding] = {}

    @property
    def blocks_free(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        return tuple(self._holdings)

    def held(self, sequence: Hashable) -> int:
        """Tokens of `sequence` whose KV is here."""
        holding = self._holdings.get(sequence)
        return holding.held if holding else 0

    def blocks(self, sequence: Hashable) -> NDArray[np.int32]:
        """The blocks of `sequence`, in order; not to be changed."""
        holding = self._holdings[sequence]
        if holding.table is None:
            holding.table = np.array(holding.blocks, np.int32)
        return holding.table

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def reserve(self, writes: Sequence[Write], now: float) -> None:
        """Forget what lies beyond each write's position and make room for it: all of `writes`, or none.

        Raises `BadStep` for a sequence named twice, `MissingKv` and `PoolFull`; then nothing has changed.
        """
        changes, needed = self._changes(writes)
        if needed > len(self._free):
            raise PoolFull(needed, len(self._free))
        for holding, blocks in changes:  # all give back before any takes: `needed` counts on it
            self._shrink(holding, blocks)
        for holding, blocks in changes:
            self._grow(holding, blocks)
        for write, (holding, _) in zip(writes, changes, strict=True):
            holding.held = write.position
            holding.touched = now
            self._holdings[write.sequence] = holding

    def commit(self, writes: Iterable[Write]) -> None:
        """The KV of reserved `writes` is written."""
        for write in writes:
            self._holdings[write.sequence].held = write.position + write.count

    def abandon(self, writes: Iterable[Write]) -> None:
        """The step of reserved `writes` failed: what lies before their positions is kept, the rest given
        back."""
        for write in writes:
            if holding := self._holdings.get(write.sequence):
                self._shrink(holding, self.blocks_for(holding.held))
                if not holding.held:
                    del self._holdings[write.sequence]

    def free(self, sequence: Hashable) -> bool:
        """Give back all blocks of `sequence`; False if it had none."""
        holding = self._holdings.pop(sequence, None)
        if holding is None:
            return False
        self._free.extend(reversed(holding.blocks))
        return True

    def expire(self, now: float) -> list[Hashable]:
        """Free the sequences that nobody stepped for the time of a lease; returns them."""
        late = [name for name, holding in self._holdings.items() if now - holding.touched >= self._lease_s]
        for name in late:
            self.free(name)
        return late

    def _changes(self, writes: Sequence[Write]) -> tuple[list[tuple[_Holding, int]], int]:
        """For each write its sequence's holding and the blocks that it will have; and how many more that is
        in all."""
        changes = []
        more = 0
        for write in writes:
            holding = self._holdings.get(write.sequence) or _Holding()
            if write.position > holding.held:
                raise MissingKv([self.held(each.sequence) for each in writes])
            blocks = self.blocks_for(write.position + write.count)
            more += blocks - len(holding.blocks)
            changes.append((holding, blocks))
        if len(writes) > 1 and len({write.sequence for write in writes}) < len(writes):
            raise BadStep("a step names one sequence twice")
        return changes, more

    def _shrink(self, holding: _Holding, blocks: int) -> None:
        if len(holding.blocks) > blocks:
            self._free.extend(reversed(holding.blocks[blocks:]))
            del holding.blocks[blocks:]
            holding.table = None

    def _grow(self, holding: _Holding, blocks: int) -> None:
        if len(holding.blocks) < blocks:
            first = len(self._free) - (blocks - len(holding.blocks))
            holding.blocks.extend(reversed(self._free[first:]))
            del self._free[first:]
            holding.table = None


def kv_block_tokens(device: str) -> int:
    """Tokens in one block of KV on `device` ("CPU", "GPU", "GPU.1")."""
    return GPU_BLOCK_TOKENS if device.startswith("GPU") else CPU_BLOCK_TOKENS


def kv_block_bytes(kv: KvShape, precision: Precision, device: str) -> int:
    """Bytes of one block of one layer's KV: exact for CPU.

    For GPU it is what f16 (or f32, in `EXACT`) comes to; it could not be compared with a real one.
    """
    tokens = kv_block_tokens(device)
    if precision is Precision.EXACT:
        return kv.heads * tokens * (kv.key + kv.value) * 4
    if device.startswith("GPU"):
        return kv.heads * tokens * (kv.key + kv.value) * 2
    return kv.heads * ((tokens + U8_PARAMETERS) * kv.key + tokens * (kv.value + U8_PARAMETERS))


def kv_bytes_per_token(kv: KvShape, precision: Precision, device: str) -> int:
    """Bytes that one layer's KV takes for one token, rounded up; see `kv_block_bytes`."""
    return -(-kv_block_bytes(kv, precision, device) // kv_block_tokens(device))
