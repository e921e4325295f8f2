"""How long work tells how far it is; whoever draws bars hands one in."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called several times a second, from the thread that pulls. An exception it raises ends the work."""

    def update(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` of one stage, in bytes mostly; `total` is 0 where nobody can know it."""


class Silent:
    def update(self, stage: str, done: int, total: int) -> None:
        """For whoever does not look."""
