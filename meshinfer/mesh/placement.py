"""From peers and a model to a plan: who runs which layers; a pure function in integers, the same on every
agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

from meshinfer import limits
from meshinfer.mesh import search
from meshinfer.values import (
    Advert,
    Assignment,
    KvShape,
    ModelFacts,
    Objective,
    OwnerFacts,
    PeerId,
    Plan,
    PlanId,
    Precision,
    ShardKey,
    Span,
)

HOP_US = 500
"""One hop from owner to owner: a round trip of 8 kB over ZeroMQ with CURVE takes about 150 µs on loopback, a
further inference call about 300 µs (both measured). Links are not measured yet, so all cost the same."""

SOFTWARE_US = 300
"""What a hop takes besides the network: frames, encryption, waking the engine (measured on loopback)."""

ROW_BYTES_PER_NUMBER = 4
"""Hidden states travel as f32 at most."""

SLACK_PERCENT = 20
"""What a plan may be worse than the best one for leaving shards where they are loaded."""

UNMEASURED_DECODE_US = 400
"""Assumed while nobody has run a layer: a layer of a 1.1B int4 model takes 1.4 ms, one of a 135M
model 0.28 ms. Only its size beside that of a hop matters."""

LEAST_POOL_TOKENS = 2048
"""KV room that an owner must have at least, or the model's context where that is shorter: one long
question."""

MOST_POOL_TOKENS = 65_536
CONTEXTS_IN_POOL = 16
"""More KV room than 16 full contexts or 65,536 tokens serves nobody, and the memory is better left to the
PC's user."""

NAMED_PEERS = 8
"""A sentence names so many peers, those with the most memory first, and counts the others."""

POOL_STEP_TOKENS = 32
"""Pools are whole blocks of the engine's (FACTS: 32 tokens on CPU), rounded down, so that none exceeds its
memory."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What memory a device needs, in bytes; the engine knows, and agents of one program version agree.

    `kv_bytes`: one layer, one token. `layer_bytes`: one layer with weights of so many bytes on disk, loaded.
    `span_bytes`: what a span of a model of this width takes besides, however many layers it has.
    """

    kv_bytes: Callable[[KvShape, Precision, str], int]
    layer_bytes: Callable[[int], int]
    span_bytes: Callable[[int], int]


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A peer that could own a span. `decode_us` is for one average layer and one token, 0 while unknown."""

    peer: PeerId
    incarnation: int
    round: int
    capacity_bytes: int
    allocation_bytes: int
    decode_us: int
    prefill_us: int
    precision: Precision
    device: str

    @classmethod
    def of(cls, advert: Advert, base_round: int = 0) -> Candidate:
        """`base_round` is the last round that is over for that peer: the plan's is greater."""
        return cls(
            advert.peer,
            advert.incarnation,
            base_round,
            advert.capacity_bytes,
            advert.allocation_bytes,
            advert.decode_us,
            advert.prefill_us,
            advert.precision,
            advert.device,
        )


@dataclass(frozen=True, slots=True)
class Hops:
    """What it costs to pass one token's rows from owner to owner.

    `us` holds what was measured, in µs, by (from, to); all other pairs cost `HOP_US`. The pairs in `broken` (in either
    order) are never neighbours on a route.
    """

    us: Mapping[tuple[PeerId, PeerId], int] = field(default_factory=lambda: MappingProxyType({}))
    broken: frozenset[tuple[PeerId, PeerId]] = frozenset()

    @classmethod
    def of(cls, adverts: Iterable[Advert], hidden: int) -> Hops:
        """From what peers say of their links, for rows of a model of this width."""
        us: dict[tuple[PeerId, PeerId], int] = {}
        broken: set[tuple[PeerId, PeerId]] = set()
        row_bits = hidden * ROW_BYTES_PER_NUMBER * 8
        for advert in adverts:
            broken.update((advert.peer, other) for other in advert.broken)
            for link in advert.links:
                if link.round_trip_us <= 0:
                    continue
                transfer_us = row_bits * 1000 // link.kbit_s if link.kbit_s > 0 else 0
                hop_us = link.round_trip_us // 2 + transfer_us + SOFTWARE_US
                # Both ends measure the same link; the more careful of the two counts for both directions.
                for pair in ((advert.peer, link.peer), (link.peer, advert.peer)):
                    us[pair] = max(hop_us, us.get(pair, 0))
        return cls(us, frozenset(broken))

    def between(self, one: PeerId, other: PeerId) -> int | None:
        """None where no route may lead from the one to the other."""
        if (one, other) in self.broken or (other, one) in self.broken:
            return None
        return self.us.get((one, other), HOP_US)


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan is to be, beyond what the peers can do.

    `min_owners`: the fewest owners, where they can be had. `keep`: a plan whose shards are loaded, or were: of all
    plans within `SLACK_PERCENT` of the best, the one that moves the fewest bytes is taken. `kept`: shards that peers
    hold and must go on holding: naming one of them costs nothing. `taken_bytes`: what is promised there already and
    stays promised, the kept shards included. `replaces`: the plan that this one takes over from.
    """

    min_owners: int = 1
    objective: Objective = Objective.LATENCY
    hops: Hops = field(default_factory=Hops)
    keep: Plan | None = None
    kept: Mapping[PeerId, frozenset[ShardKey]] = field(default_factory=lambda: MappingProxyType({}))
    taken_bytes: Mapping[PeerId, int] = field(default_factory=lambda: MappingProxyType({}))
    replaces: PlanId | None = None


_DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No plan: what the model needs (layers, and KV for one long question) and what each peer has, in
    bytes."""

    needed_bytes: int
    largest_layer_bytes: int
    available: tuple[tuple[PeerId, int], ...]

    def sentence(self, names: Mapping[PeerId, str]) -> str:
        """For a person: needed, available by peer, and what would help."""
        most = sorted(self.available, key=lambda have: (-have[1], have[0]))
        have = [f"{names.get(peer, peer)} has {_mib(free)}" for peer, free in most[:NAMED_PEERS]]
        if len(most) > NAMED_PEERS:
            rest = sum(free for _, free in most[NAMED_PEERS:])
            have.append(f"{len(most) - NAMED_PEERS} more have {_mib(rest)} in all")
        needed = _mib(self.needed_bytes, up=True)
        return f"needs {needed} for layers and KV; {', '.join(have) or 'no peer gives any'}; {self._remedy()}"

    def _remedy(self) -> str:
        largest = max((free for _, free in self.available), default=0)
        if largest < self.largest_layer_bytes:
            layer = _mib(self.largest_layer_bytes, up=True)
            return f"one layer alone takes {layer}, so a PC needs a larger [sharing] memory"
        # Memory in pieces may be enough in sum and yet hold no plan: then one more PC is a first guess.
        useful = sum(free for _, free in self.available if free >= self.largest_layer_bytes)
        more = max(1, -(-(self.needed_bytes - useful) // largest))
        return f"at least {more} more PC{'s' if more > 1 else ''} or a larger [sharing] memory is needed"


def place(
    facts: ModelFacts, candidates: Iterable[Candidate], costs: Costs, options: Options = _DEFAULTS
) -> Plan | Shortfall:
    """The plan for these peers, whatever their order; or what is missing.

    One peer owns all layers where one has room (the fastest, then the least id), unless `min_owners` asks for
    more; it then has as many as asked, or as near to it as memory and peers allow. A split minimises
    predicted time per token: exactly, for up to `search.EXACT_LANES` peers (unless the search is given up,
    see there), well beyond. Where a split was asked for, all peers count as equally fast: else the fastest would
    take all layers but one for each of the others, which is not what anybody asks for.
    """
    table = _Table(facts, costs)
    min_owners = options.min_owners
    peers = sorted(candidate for candidate in candidates if candidate.capacity_bytes > 0)
    assumed_us = _assumed_us(peers)
    rooms = [_Room(candidate, table, assumed_us, even=min_owners > 1) for candidate in peers]
    usable = [room for room in rooms if room.lane.reach != tuple(range(facts.layers + 1))]
    most = min(len(usable), facts.layers, limits.ROUTE_HOPS)
    for fewest in range(min(max(1, min_owners), most), 0, -1):
        links = _whole(usable, facts.layers) if fewest == 1 else None
        links = links or _split(usable, table, fewest)
        if links is not None and fewest <= len(links) <= limits.ROUTE_HOPS:
            return _plan(facts, [(usable[link.lane], link.span) for link in links], table, options)
    return table.shortfall(rooms)


def memory_bytes(facts: ModelFacts, costs: Costs, shards: Iterable[ShardKey], precision: Precision) -> int:
    """What shards of one model take of a peer's memory: weights and the whole KV pools, equal ones once."""
    total = 0
    for shard in set(shards):
        first, last = shard.span.first, shard.span.last
        weights = sum(map(costs.layer_bytes, facts.layer_bytes[first:last]))
        each = sum(costs.kv_bytes(kv, precision, shard.device) for kv in facts.kv[first:last])
        total += costs.span_bytes(facts.hidden) + weights + shard.pool_tokens * each
    return total


class _Table:
    """A model's sums: bytes, work and KV of layers [0, b), so that every span is a difference."""

    def __init__(self, facts: ModelFacts, costs: Costs) -> None:
        self.facts = facts
        self.costs = costs
        self.least_tokens = max(1, min(facts.context, LEAST_POOL_TOKENS))
        self.fixed = costs.span_bytes(facts.hidden)
        self.weights = tuple(accumulate(map(costs.layer_bytes, facts.layer_bytes), initial=0))
        # A layer's time follows its bytes: decoding is bound by reading them.
        self.work = tuple(facts.layer_bytes) if any(facts.layer_bytes) else (1,) * facts.layers
        self.all_work = sum(self.work)
        self._picked: tuple[int, ...] | None = None
        self._kv: dict[tuple[Precision, str], tuple[int, ...]] = {}
        self._reach: dict[tuple[Precision, str, int], tuple[int, ...]] = {}

    def kv(self, precision: Precision, device: str) -> tuple[int, ...]:
        """KV bytes of one token in layers [0, b)."""
        known = self._kv.get((precision, device))
        if known is None:
            each = (self.costs.kv_bytes(shape, precision, device) for shape in self.facts.kv)
            known = self._kv[precision, device] = tuple(accumulate(each, initial=0))
        return known

    def kv_of(self, candidate: Candidate, span: Span) -> int:
        kv = self.kv(candidate.precision, candidate.device)
        return kv[span.last] - kv[span.first]

    def bytes_of(self, candidate: Candidate, span: Span) -> int:
        """What a span takes there with the least KV."""
        weights = self.weights[span.last] - self.weights[span.first]
        return self.fixed + weights + self.least_tokens * self.kv_of(candidate, span)

    def reach(self, candidate: Candidate) -> tuple[int, ...]:
        """See `search.Lane.reach`. Many peers are alike, so equal ones share it."""
        key = (candidate.precision, candidate.device, candidate.capacity_bytes)
        known = self._reach.get(key)
        if known is None:
            known = self._reach[key] = self._measure(candidate)
        return known

    def _measure(self, candidate: Candidate) -> tuple[int, ...]:
        reach, last = [], 0
        for first in range(self.facts.layers):
            last = max(last, first)
            while last < self.facts.layers and self._fits(candidate, Span(first, last + 1)):
                last += 1
            reach.append(last)
        return (*reach, self.facts.layers)

    def _fits(self, candidate: Candidate, span: Span) -> bool:
        return self.bytes_of(candidate, span) <= candidate.capacity_bytes

    def picked(self, lanes: Sequence[search.Lane]) -> tuple[int, ...]:
        """A good choice of many lanes, whatever number of owners is asked for; found once."""
        if self._picked is None:
            rough = search.chosen_lanes(lanes, HOP_US * self.facts.layers)
            self._picked = rough or search.packed_lanes(lanes, self.work)
        return self._picked

    def shortfall(self, rooms: Sequence[_Room]) -> Shortfall:
        """Needs are counted as the thriftiest of the peers would have them."""
        candidates = [room.candidate for room in rooms]
        whole = Span(0, self.facts.layers)
        thrifty = min(candidates, key=lambda one: self.bytes_of(one, whole), default=_NOBODY)
        layers = (self.bytes_of(thrifty, Span(layer, layer + 1)) for layer in range(self.facts.layers))
        available = tuple((candidate.peer, candidate.capacity_bytes) for candidate in candidates)
        return Shortfall(self.bytes_of(thrifty, whole), max(layers), available)


_NOBODY = Candidate(PeerId(""), 0, 0, 0, 0, 0, 0, Precision.AUTO, "CPU")


class _Room:
    """A candidate, and the lane that the search sees in it. `decode_us` is its speed, or what is assumed of it."""

    def __init__(self, candidate: Candidate, table: _Table, assumed_us: int, even: bool) -> None:
        self.candidate = candidate
        self.decode_us = candidate.decode_us or assumed_us
        # A speed is for the average layer: a layer's time is the speed × its work × layers ÷ all work. The
        # division comes last, in `_plan`, so that comparisons lose nothing.
        price = (assumed_us if even else self.decode_us) * table.facts.layers
        self.lane = search.Lane(price, table.reach(candidate))


def _assumed_us(candidates: Sequence[Candidate]) -> int:
    """What is assumed of a peer that has not yet run a layer: the middle one of those that have, so that nobody is
    preferred or passed over for being new."""
    known = sorted(candidate.decode_us for candidate in candidates if candidate.decode_us)
    return known[(len(known) - 1) // 2] if known else UNMEASURED_DECODE_US


def _whole(rooms: Sequence[_Room], layers: int) -> search.Chain | None:
    able = [i for i, room in enumerate(rooms) if room.lane.reach[0] == layers]
    if not able:
        return None
    return (search.Link(min(able, key=lambda i: (rooms[i].lane.price, rooms[i].candidate)), Span(0, layers)),)


def _split(rooms: Sequence[_Room], table: _Table, fewest: int) -> search.Chain | None:
    """A chain over at least `fewest` of the rooms; its spans are then evened out where that costs no time."""
    if not rooms:
        return None
    order = _order([room.lane for room in rooms], table, fewest)
    if order is None:
        return None

    def strain(lane: int, span: Span) -> int:
        candidate = rooms[lane].candidate
        return table.bytes_of(candidate, span) * 1000 // candidate.capacity_bytes

    return search.cut(order, [room.lane for room in rooms], table.work, strain)


def _order(lanes: Sequence[search.Lane], table: _Table, fewest: int) -> tuple[int, ...] | None:
    """Which lanes, in order of layers. Exact for few; for many, or where that is given up, good ones are
    picked first and only those are searched."""
    if len(lanes) <= search.EXACT_LANES:
        if not search.coverable(lanes):
            return None
        order = _searched(lanes, tuple(range(len(lanes))), table, fewest)
        if order is not None:
            return order
    picked = table.picked(lanes)
    if not picked:
        return None
    spare = sorted(set(range(len(lanes))) - set(picked), key=lambda i: (lanes[i].price, i))
    picked = (*picked, *spare[: max(0, fewest - len(picked))])
    if len(picked) <= min(search.EXACT_LANES, len(lanes) - 1):
        return _searched(lanes, tuple(sorted(picked)), table, fewest) or picked
    return picked


def _searched(
    lanes: Sequence[search.Lane], among: tuple[int, ...], table: _Table, fewest: int
) -> tuple[int, ...] | None:
    chain = search.exact_chain([lanes[i] for i in among], table.work, HOP_US * table.all_work, fewest)
    return None if chain is None else tuple(among[link.lane] for link in chain)


def _plan(facts: ModelFacts, owners: Sequence[tuple[_Room, Span]], table: _Table, options: Options) -> Plan:
    assignments, inputs, cost, slowest = [], [], 0, 0
    for room, span in owners:
        one = room.candidate
        assignments.append(Assignment(one.peer, span, one.device, _pool_tokens(one, span, table)))
        inputs.append(
            OwnerFacts(one.peer, one.incarnation, one.round, one.capacity_bytes, one.decode_us, one.precision)
        )
        stage = room.decode_us * facts.layers * sum(table.work[span.first : span.last])
        cost, slowest = cost + stage, max(slowest, stage)
    # N owners cost N+1 hops: the last one answers the asker.
    predicted_us = cost // table.all_work + HOP_US * (len(owners) + 1)
    return Plan(
        facts.model,
        facts.layers,
        1 + max(one.round for one in inputs),
        options.replaces,
        tuple(assignments),
        (),
        tuple(sorted(inputs, key=lambda one: one.peer)),
        predicted_us,
        slowest // table.all_work + HOP_US,
    )


def _pool_tokens(candidate: Candidate, span: Span, table: _Table) -> int:
    """As many tokens of KV as what is left of the memory holds, within reason."""
    context = table.facts.context
    most = max(context, min(CONTEXTS_IN_POOL * context, MOST_POOL_TOKENS), table.least_tokens)
    each = table.kv_of(candidate, span)
    if each > 0:
        spare = candidate.capacity_bytes - table.bytes_of(candidate, span)
        most = min(most, table.least_tokens + spare // each)
    return max(table.least_tokens, most - most % POOL_STEP_TOKENS)


def _mib(size_bytes: int, up: bool = False) -> str:
    """Needs are rounded up and what is there down, so that the figures never seem to fit when they do not."""
    return f"{-(-size_bytes // limits.MIB) if up else size_bytes // limits.MIB} MiB"
