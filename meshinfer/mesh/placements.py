"""Placements, remembered: one decision looks at many, and most of them again in the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshinfer.mesh.picture import Picture
from meshinfer.mesh.placement import Candidate, Costs, Hops, Options, Shortfall, place
from meshinfer.values import ModelFacts, Objective, PeerId, Plan, ShardKey

KNOWN_PLACEMENTS = 4096
"""One for each set of peers that a decision looks at. Agents simulated in one process share them: those of a cell look
at the same."""


class Ground:
    """What links cost between the peers of a cell; hashed once, since many placements are made on it."""

    def __init__(self, picture: Picture, able: Mapping[PeerId, Candidate], hidden: int) -> None:
        adverts = (picture.get(peer) for peer in sorted(able))
        hops = Hops.of([advert for advert in adverts if advert is not None], hidden)
        inside = {pair: us for pair, us in hops.us.items() if pair[0] in able and pair[1] in able}
        broken = frozenset(pair for pair in hops.broken if pair[0] in able and pair[1] in able)
        self.hops = Hops(inside, broken)
        self._content = (frozenset(inside.items()), broken)
        self._hash = hash(self._content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ground) and self._content == other._content


@dataclass(frozen=True, slots=True)
class Request:
    """`kept` and `taken_bytes` are those of `Options`, in order of peer id."""

    candidates: tuple[Candidate, ...]
    min_owners: int
    objective: Objective
    keep: Plan | None
    kept: tuple[tuple[PeerId, frozenset[ShardKey]], ...]
    taken_bytes: tuple[tuple[PeerId, int], ...]


@lru_cache(maxsize=KNOWN_PLACEMENTS)
def placed(facts: ModelFacts, costs: Costs, request: Request, ground: Ground) -> Plan | Shortfall:
    """Without rounds, and without what it replaces: those are no part of where layers go."""
    options = Options(
        min_owners=request.min_owners,
        objective=request.objective,
        hops=ground.hops,
        keep=request.keep,
        kept=dict(request.kept),
        taken_bytes=dict(request.taken_bytes),
    )
    return place(facts, request.candidates, costs, options)


@lru_cache(maxsize=16)
def needed_bytes(facts: ModelFacts, costs: Costs) -> int:
    """What a plan takes of all its peers' memory at least."""
    nothing = place(facts, (), costs)
    return nothing.needed_bytes if isinstance(nothing, Shortfall) else 0
