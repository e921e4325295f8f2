"""Parts of a large mesh that plan each for themselves, so that planning costs what a plan costs and not what the mesh
does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshinfer import limits
from meshinfer.values import PeerId

_BITS = 32
_DIGITS = _BITS // 4


@dataclass(frozen=True, slots=True)
class Cell:
    """The peers whose ids begin with these `bits` bits, `prefix`; with none, all."""

    bits: int = 0
    prefix: int = 0

    def __contains__(self, peer: PeerId) -> bool:
        return int(peer[:_DIGITS], 16) >> (_BITS - self.bits) == self.prefix

    def half(self, peer: PeerId) -> Cell:
        """The half of this cell that a peer of it is in."""
        bits = self.bits + 1
        return Cell(bits, int(peer[:_DIGITS], 16) >> (_BITS - bits))

    @property
    def sibling(self) -> Cell:
        return Cell(self.bits, self.prefix ^ 1)


def cell_of(peer: PeerId, room: Mapping[PeerId, int], needed_bytes: int) -> Cell:
    """The cell in which a peer plans, out of all who are here with the bytes that each could give to a model of this
    size.

    The mesh is halved, and its halves again, while there is enough on both sides. So each cell has peers and memory for
    more than one plan; that depends on nothing that plans themselves change.
    """
    cell, inside = Cell(), list(room)
    while len(inside) > limits.ONE_CELL and cell.bits < _BITS:
        half = cell.half(peer)
        mine = [one for one in inside if one in half]
        others = [one for one in inside if one in half.sibling]
        if not (_enough(mine, room, needed_bytes) and _enough(others, room, needed_bytes)):
            break
        cell, inside = half, mine
    return cell


def _enough(peers: Sequence[PeerId], room: Mapping[PeerId, int], needed_bytes: int) -> bool:
    if len(peers) < limits.CELL_PEERS:
        return False
    return sum(room[peer] for peer in peers) >= limits.CELL_PLANS * needed_bytes
