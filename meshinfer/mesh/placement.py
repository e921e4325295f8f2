"""From peers and a model to a plan: who runs which layers, and who stands by; a pure function in integers, the same on
every agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshinfer import limits
from meshinfer.mesh.chains import SLACK_PERCENT, best_chain, calm_chain
from meshinfer.mesh.hops import HOP_US, Hops
from meshinfer.mesh.lanes import Bounds, Chain, Link, Task, cut
from meshinfer.mesh.rooms import (
    LEAST_POOL_TOKENS,
    MOST_POOL_TOKENS,
    Candidate,
    Costs,
    Room,
    Table,
    memory_bytes,
)
from meshinfer.mesh.shortfall import Shortfall, shortfall
from meshinfer.mesh.standbys import stand_by
from meshinfer.values import (
    Assignment,
    ModelFacts,
    Objective,
    OwnerFacts,
    PeerId,
    Plan,
    PlanId,
    ShardKey,
    Span,
)

__all__ = [
    "HOP_US",
    "LEAST_POOL_TOKENS",
    "MOST_POOL_TOKENS",
    "SLACK_PERCENT",
    "UNMEASURED_DECODE_US",
    "Candidate",
    "Costs",
    "Hops",
    "Options",
    "Shortfall",
    "memory_bytes",
    "place",
]

UNMEASURED_DECODE_US = 400
"""Assumed while nobody has run a layer: a layer of a 1.1B int4 model takes 1.4 ms, one of a 135M
model 0.28 ms. Only its size beside that of a hop matters."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan is to be, beyond what the peers can do.

    `min_owners`: the fewest owners, where they can be had. `keep`: a plan whose shards are loaded, or were: of all
    plans at most `SLACK_PERCENT` worse than the best, the one that moves the fewest bytes is taken. `kept`: shards that
    peers hold and must go on holding: naming one of them costs nothing. `taken_bytes`: what is promised there already
    and stays promised, that of the kept shards included. `replaces`: the plan that this one takes over from.
    """

    min_owners: int = 1
    objective: Objective = Objective.LATENCY
    hops: Hops = field(default_factory=Hops)
    keep: Plan | None = None
    kept: Mapping[PeerId, frozenset[ShardKey]] = field(default_factory=lambda: MappingProxyType({}))
    taken_bytes: Mapping[PeerId, int] = field(default_factory=lambda: MappingProxyType({}))
    replaces: PlanId | None = None


_DEFAULTS = Options()


def place(
    facts: ModelFacts, candidates: Iterable[Candidate], costs: Costs, options: Options = _DEFAULTS
) -> Plan | Shortfall:
    """The plan for these peers, whatever their order; or what is missing.

    It has as many owners as `min_owners` asks for, or as near to it as memory, links and peers allow; and of all such
    plans the least predicted time per token, or the fastest slowest stage. So one peer owns all layers where that is
    faster than any split. It is exact for up to `search.EXACT_LANES` peers (unless the search is given up, see there),
    good beyond. Where a split was asked for and is to answer one person soon, all peers count as equally fast: else
    the fastest would take all layers but one for each of the others, which is not what anybody asks for.
    """
    return _Placement(facts, tuple(candidates), costs, options).result()


class _Placement:
    def __init__(
        self, facts: ModelFacts, candidates: tuple[Candidate, ...], costs: Costs, options: Options
    ) -> None:
        self._facts = facts
        self._options = options
        self._table = Table(facts, costs)
        # Of peers that are as good otherwise, the first is taken: the one that is fastest with prompts.
        prefill_us = _assumed((one.prefill_us for one in candidates), 0)
        peers = sorted(candidates, key=lambda one: (one.prefill_us or prefill_us, one))
        self._decode_us = _assumed((one.decode_us for one in peers), UNMEASURED_DECODE_US)
        self._all_rooms = [self._room(one) for one in peers]
        self._rooms = [room for room in self._all_rooms if room.useful]

    def _room(self, one: Candidate) -> Room:
        options = self._options
        even = options.min_owners > 1 and options.objective is Objective.LATENCY
        price_us = self._decode_us if even else self._speed_us(one)
        taken, kept = options.taken_bytes.get(one.peer, 0), options.kept.get(one.peer, frozenset())
        return Room(one, self._table, price_us, taken, kept, options.keep)

    def _speed_us(self, one: Candidate) -> int:
        return one.decode_us or self._decode_us

    def result(self) -> Plan | Shortfall:
        most = min(len(self._rooms), self._facts.layers, limits.ROUTE_HOPS)
        for fewest in range(min(max(1, self._options.min_owners), most), 0, -1):
            chain = self._chain(self._task(fewest, self._options.hops))
            if chain is not None:
                return self._plan(chain)
        return self._shortfall()

    def _shortfall(self) -> Shortfall:
        """Broken links are blamed only where there would be a plan without them."""
        hops = self._options.hops
        broken = hops.broken_among(room.candidate.peer for room in self._rooms)
        if broken and best_chain(self._task(1, Hops(hops.us)), Objective.LATENCY) is None:
            broken = ()
        return shortfall(self._table, self._all_rooms, broken)

    def _task(self, fewest: int, hops: Hops) -> Task:
        unit = self._table.all_work
        peers = tuple(room.candidate.peer for room in self._rooms)
        ends = (HOP_US * unit,) * len(peers)
        return Task(
            lanes=tuple(room.lane for room in self._rooms),
            done=self._table.done,
            hops=hops.matrix(peers, unit),
            entry=ends,
            exit=ends,
            fewest=fewest,
        )

    def _chain(self, task: Task) -> Chain | None:
        """The owners; their spans are evened out where that costs neither time nor moves."""
        objective = self._options.objective
        chain = best_chain(task, objective)
        if chain is None or len(chain) > limits.ROUTE_HOPS:
            return None
        if self._options.keep is not None:
            chain = calm_chain(task, objective, chain, self._earlier(self._options.keep))
        slowest = max(task.stages(chain) or (0,)) if objective is Objective.THROUGHPUT else None
        bounds = Bounds(stage=slowest, still=self._options.keep is not None)
        order = [link.lane for link in chain]
        again = cut(task, order, lambda lane, span: self._rooms[lane].strain(span), bounds)
        if again is None or (task.cost(again) or 0) > (task.cost(chain) or 0):
            return chain
        return again

    def _earlier(self, keep: Plan) -> Chain:
        """The links of a plan that still can run."""
        numbers = {room.candidate.peer: i for i, room in enumerate(self._rooms)}
        links = (Link(numbers[one.peer], one.span) for one in keep.assignments if one.peer in numbers)
        return tuple(link for link in links if link.span in self._rooms[link.lane].lane.held)

    def _plan(self, owners: Chain) -> Plan:
        options, rooms = self._options, self._rooms
        standbys = stand_by(owners, rooms, self._joined, options.keep)
        spans: dict[int, list[Span]] = {}
        for link in (*owners, *standbys):
            spans.setdefault(link.lane, []).append(link.span)
        pools = {lane: rooms[lane].pool_tokens(mine) for lane, mine in spans.items()}

        def assignments(links: Chain) -> tuple[Assignment, ...]:
            ones = ((rooms[link.lane].candidate, link) for link in links)
            return tuple(
                Assignment(one.peer, link.span, one.device, pools[link.lane][link.span]) for one, link in ones
            )

        named = sorted((rooms[lane].candidate for lane in spans), key=lambda one: one.peer)
        predicted_us, stage_us = self._times_us(owners)
        return Plan(
            model=self._facts.model,
            layers=self._facts.layers,
            round=1,  # of the first; who knows what its peers have accepted gives it a later one
            replaces=options.replaces,
            assignments=assignments(owners),
            standbys=assignments(standbys),
            inputs=tuple(map(_input, named)),
            predicted_us=predicted_us,
            stage_us=stage_us,
        )

    def _joined(self, one: int, other: int) -> bool:
        peers = (self._rooms[one].candidate.peer, self._rooms[other].candidate.peer)
        return self._options.hops.between(*peers) is not None

    def _times_us(self, owners: Chain) -> tuple[int, int]:
        """Of one token, and of the slowest stage; the last owner's answer to the asker is a hop, but no stage."""
        unit = self._table.all_work
        stages, before = [], None
        for link in owners:
            one = self._rooms[link.lane].candidate
            hop_us = HOP_US if before is None else self._options.hops.between(before.peer, one.peer) or 0
            work = self._table.done[link.span.last] - self._table.done[link.span.first]
            stages.append(hop_us * unit + self._speed_us(one) * self._facts.layers * work)
            before = one
        return sum(stages) // unit + HOP_US, max(stages) // unit


def _assumed(measured: Iterable[int], otherwise: int) -> int:
    """What is assumed of a peer that was not measured: the middle one of those that were, so that nobody is preferred
    or passed over for being new."""
    known = sorted(one for one in measured if one)
    return known[(len(known) - 1) // 2] if known else otherwise


def _input(one: Candidate) -> OwnerFacts:
    return OwnerFacts(one.peer, one.incarnation, one.capacity_bytes, one.decode_us, one.precision)
