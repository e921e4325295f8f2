"""Parts of a large mesh that plan each for themselves, so that planning costs what a plan costs and not what the mesh
does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshinfer import limits
from meshinfer.mesh.picture import Picture
from meshinfer.mesh.placement import Costs
from meshinfer.mesh.placements import needed_bytes
from meshinfer.values import ModelFacts, ModelId, PeerId

_BITS = 32
_DIGITS = _BITS // 4


@dataclass(frozen=True, slots=True)
class Cell:
    """The peers whose ids begin with these `bits` bits, `prefix`; with none, all."""

    bits: int = 0
    prefix: int = 0

    def __contains__(self, peer: PeerId) -> bool:
        return _number(peer) >> (_BITS - self.bits) == self.prefix

    def half(self, peer: PeerId) -> Cell:
        """The half of this cell that a peer of it is in."""
        bits = self.bits + 1
        return Cell(bits, _number(peer) >> (_BITS - bits))


@lru_cache(maxsize=4096)
def _number(peer: PeerId) -> int:
    """What a peer's id begins with; as many are remembered as a roster has members."""
    return int(peer[:_DIGITS], 16)


class OwnCell:
    """The cell of one agent. It is chosen anew where peers have come or gone, or give more or less memory; in a large
    mesh at most every `limits.LOOK_AROUND_S`, since it takes a look at all of them. `again_at` is when it is due."""

    def __init__(self, me: PeerId, costs: Costs) -> None:
        self._me = me
        self._costs = costs
        self._chosen_for: tuple[ModelId | None, int] = (None, 0)
        self._chosen_at = float("-inf")
        self.cell = Cell()
        self.again_at: float | None = None

    def choose(self, picture: Picture, facts: ModelFacts, now: float) -> bool:
        """True where it is another one now."""
        before, self.again_at = self.cell, None
        reason = (facts.model, picture.room_changes)
        if len(picture) <= limits.ONE_CELL:
            self.cell = Cell()
        elif reason == self._chosen_for:
            return False
        elif now < self._chosen_at + limits.LOOK_AROUND_S:
            self.again_at = self._chosen_at + limits.LOOK_AROUND_S
            return False
        else:
            self._chosen_for, self._chosen_at = reason, now
            room = {one.peer: one.capacity_bytes for one in picture.adverts if one.capacity_bytes > 0}
            self.cell = cell_of(self._me, room, needed_bytes(facts, self._costs))
        return self.cell != before


def cell_of(peer: PeerId, room: Mapping[PeerId, int], needed_bytes: int) -> Cell:
    """The cell in which a peer plans, out of all who are here with the bytes that each could give to a model of this
    size.

    The mesh is halved, and its halves again, while there is enough on both sides. So each cell has peers and memory for
    more than one plan; that depends on nothing that plans themselves change.
    """
    cell, inside = Cell(), [(_number(one), one) for one in room]
    while len(inside) > limits.ONE_CELL and cell.bits < _BITS:
        half = cell.half(peer)
        shift, prefix = _BITS - half.bits, half.prefix
        mine = [each for each in inside if each[0] >> shift == prefix]
        others = [each for each in inside if each[0] >> shift != prefix]
        if not (_enough(mine, room, needed_bytes) and _enough(others, room, needed_bytes)):
            break
        cell, inside = half, mine
    return cell


def _enough(peers: Sequence[tuple[int, PeerId]], room: Mapping[PeerId, int], needed_bytes: int) -> bool:
    if len(peers) < limits.CELL_PEERS:
        return False
    return sum([room[peer] for _, peer in peers]) >= limits.CELL_PLANS * needed_bytes
