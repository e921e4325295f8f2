"""What is asked of a shard in one step, what a step took, and the ways in which one is refused."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshinfer.errors import StepError

Rows: TypeAlias = NDArray[np.float32]
"""Hidden states, one row a token: f32 `[count, hidden]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive tokens of one sequence for one step.

    `sequence` is unique across askers, such as `(asker, sequence id)`. `position` is the place of the first
    row in the sequence, in tokens; KV from there on is written anew. `want` is how many of the last rows are
    to come back: 0 for a piece of a prompt that is not its end.
    """

    sequence: Hashable
    position: int
    rows: Rows
    want: int

    @property
    def count(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where a step's time went: waiting for the device, computing, and with how many rows in all it was
    computed."""

    queue_us: int
    compute_us: int
    batch_tokens: int


class BadStep(StepError):
    """A step that no state of the shard could serve: wrong width, NaN, a position beyond the context."""


class MissingKv(StepError):
    """The shard lacks KV before a chunk's position: freed, expired, or never sent here.

    `held` is how many tokens it has of each chunk's sequence, in the order of the chunks.
    """

    def __init__(self, held: Sequence[int]) -> None:
        super().__init__(
            f"the span holds {', '.join(map(str, held))} tokens of these sequences: replay them from there"
        )
        self.held = tuple(held)


class PoolFull(StepError):
    """No room for more KV now; nothing was changed. Worth asking again when another answer has ended."""

    def __init__(self, needed_blocks: int, free_blocks: int) -> None:
        super().__init__(f"the span's KV memory is full: {needed_blocks} blocks needed, {free_blocks} free")
        self.needed_blocks = needed_blocks
        self.free_blocks = free_blocks


class Overloaded(StepError):
    """So many steps wait for the span already that another is not taken."""
