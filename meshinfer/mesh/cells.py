"""Parts of a large mesh that plan each for themselves, so that planning costs what a plan costs and not what the mesh
does."""

from __future__ import annotations

from dataclasses import dataclass

from meshinfer.values import PeerId

PREFIX_BITS = 32
_PREFIX_DIGITS = PREFIX_BITS // 4


@dataclass(frozen=True, slots=True)
class Cell:
    """The peers whose ids begin with the same `bits` bits: `prefix`."""

    bits: int = 0
    prefix: int = 0

    @classmethod
    def of(cls, peer: PeerId, bits: int) -> Cell:
        return cls(bits, _head(peer) >> (PREFIX_BITS - bits))

    def __contains__(self, peer: PeerId) -> bool:
        return _head(peer) >> (PREFIX_BITS - self.bits) == self.prefix

    @property
    def sibling(self) -> Cell:
        return Cell(self.bits, self.prefix ^ 1)

    @property
    def parent(self) -> Cell:
        return Cell(self.bits - 1, self.prefix >> 1)


def _head(peer: PeerId) -> int:
    return int(peer[:_PREFIX_DIGITS], 16)
