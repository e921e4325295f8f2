"""Meshes to place models in, what every plan must keep to, and the best plan by trying everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hypothesis import strategies as st
from mesh_samples import COSTS, advert, model, peer_id

from meshinfer.limits import MIB
from meshinfer.mesh.placement import HOP_US, Candidate, Hops, Options, Shortfall, memory_bytes
from meshinfer.mesh.plan import flaw, shards_of
from meshinfer.values import KvShape, ModelFacts, Objective, PeerId, Plan, ShardKey


def peers(*capacities_mib: int, decode_us: Sequence[int] = ()) -> list[Candidate]:
    speeds = [*decode_us, *[0] * len(capacities_mib)]
    return [
        Candidate.of(advert(number, capacity, decode_us=speed))
        for number, (capacity, speed) in enumerate(zip(capacities_mib, speeds, strict=False))
    ]


def spans(plan: Plan | Shortfall) -> list[tuple[int, str]]:
    assert isinstance(plan, Plan)
    return [(int(one.peer, 16), str(one.span)) for one in plan.assignments]


def standbys(plan: Plan | Shortfall) -> list[tuple[int, str]]:
    assert isinstance(plan, Plan)
    return [(int(one.peer, 16), str(one.span)) for one in plan.standbys]


def links(us: Mapping[tuple[int, int], int], broken: Sequence[tuple[int, int]] = ()) -> Hops:
    """Hops by peers' numbers, the same in both directions."""
    both = {**us, **{(other, one): hop for (one, other), hop in us.items()}}
    named = {(peer_id(one), peer_id(other)): hop for (one, other), hop in both.items()}
    return Hops(named, frozenset((peer_id(one), peer_id(other)) for one, other in broken))


def must_fit(
    plan: Plan,
    facts: ModelFacts,
    candidates: Sequence[Candidate],
    options: Options = Options(),  # noqa: B008
) -> None:
    """What holds of every plan: it is sound, keeps to memory and links, and says what it was computed from."""
    assert flaw(plan, facts) is None
    known = {one.peer: one for one in candidates}
    for peer in plan.named:
        one = known[peer]
        kept = options.kept.get(peer, frozenset())
        shards = [shard for shard in shards_of(plan, peer) if shard not in kept]
        room = one.capacity_bytes - options.taken_bytes.get(peer, 0)
        assert not shards or memory_bytes(facts, COSTS, shards, one.precision) <= room
        for shard in shards:
            assert_allocatable(facts, one, shard)
    for one, other in zip(plan.owners, plan.owners[1:], strict=False):
        assert options.hops.between(one, other) is not None
    assert plan.replaces == options.replaces


def assert_allocatable(facts: ModelFacts, one: Candidate, shard: ShardKey) -> None:
    bound = one.allocation_bytes
    for layer in range(shard.span.first, shard.span.last):
        kv = COSTS.kv_bytes(facts.kv[layer], one.precision, one.device)
        assert not bound or max(COSTS.layer_bytes(facts.layer_bytes[layer]), kv * shard.pool_tokens) <= bound


# ── the best by trying everything ───────────────────────────────────────────────────────────────────────────
def fits(facts: ModelFacts, one: Candidate, first: int, last: int) -> bool:
    tokens = max(1, min(facts.context, 2048))
    kv = [tokens * COSTS.kv_bytes(shape, one.precision, one.device) for shape in facts.kv[first:last]]
    weights = [COSTS.layer_bytes(size) for size in facts.layer_bytes[first:last]]
    if one.allocation_bytes and max(*weights, *kv) > one.allocation_bytes:
        return False
    return COSTS.span_bytes(facts.hidden) + sum(weights) + sum(kv) <= one.capacity_bytes


def middle(candidates: Sequence[Candidate]) -> int:
    known = sorted(one.decode_us for one in candidates)
    return known[(len(known) - 1) // 2]


@dataclass(frozen=True)
class Everything:
    """All chains of owners. Costs are in units of µs × all bytes, so that nothing is rounded."""

    facts: ModelFacts
    candidates: Sequence[Candidate]
    hops: Hops
    even: bool = False

    def compute(self, i: int, first: int, last: int) -> int:
        one = self.candidates[i]
        speed_us = middle(self.candidates) if self.even else one.decode_us
        return speed_us * self.facts.layers * sum(self.facts.layer_bytes[first:last])

    def hop(self, before: int | None, i: int) -> int | None:
        if before is None:
            return HOP_US * sum(self.facts.layer_bytes)
        us = self.hops.between(self.candidates[before].peer, self.candidates[i].peer)
        return None if us is None else us * sum(self.facts.layer_bytes)

    def least(
        self, fewest: int, join: Callable[[int, int], int], stage_limit: int | None = None
    ) -> int | None:
        """`join` makes one of a stage and of what follows: their sum, or the greater."""
        layers, count = self.facts.layers, len(self.candidates)
        fit = [
            [[last > first and fits(self.facts, one, first, last) for last in range(layers + 1)]
             for first in range(layers)]
            for one in self.candidates
        ]  # fmt: skip

        @cache
        def best(at: int, used: int, before: int | None) -> int | None:
            if at == layers:
                return 0 if used.bit_count() >= fewest else None
            found = None
            for i in range(count):
                hop = None if used >> i & 1 else self.hop(before, i)
                if hop is None:
                    continue
                for last in range(at + 1, layers + 1):
                    if not fit[i][at][last]:
                        continue
                    stage = hop + self.compute(i, at, last)
                    rest = best(last, used | 1 << i, i)
                    if rest is None or (stage_limit is not None and stage > stage_limit):
                        continue
                    whole = join(stage, rest)
                    found = whole if found is None else min(found, whole)
            return found

        return best(0, 0, None)

    def least_time(self, fewest: int, stage_limit: int | None = None) -> int | None:
        """Of one token, without the hop back to the asker."""
        return self.least(fewest, lambda stage, rest: stage + rest, stage_limit)

    def least_stage(self, fewest: int) -> int | None:
        return self.least(fewest, max)

    def stages(self, plan: Plan) -> list[int]:
        numbers = {one.peer: i for i, one in enumerate(self.candidates)}
        result, before = [], None
        for one in plan.assignments:
            i = numbers[one.peer]
            hop = self.hop(before, i)
            assert hop is not None
            result.append(hop + self.compute(i, one.span.first, one.span.last))
            before = i
        return result


@dataclass(frozen=True)
class Mesh:
    facts: ModelFacts
    candidates: list[Candidate]
    hops: Hops

    def everything(self, even: bool = False) -> Everything:
        return Everything(self.facts, self.candidates, self.hops, even)

    def options(self, min_owners: int = 1, objective: Objective = Objective.LATENCY) -> Options:
        return Options(min_owners=min_owners, objective=objective, hops=self.hops)


@st.composite
def meshes(draw: st.DrawFn, most_peers: int = 6, most_layers: int = 12) -> Mesh:
    """Unequal layers, memory, speeds, largest allocations and links, some of them broken."""
    layers = draw(st.integers(1, most_layers))
    sizes = draw(st.lists(st.integers(1, 40), min_size=layers, max_size=layers))
    heads = draw(st.lists(st.integers(1, 64), min_size=layers, max_size=layers))
    facts = replace(
        model(layers=layers),
        layer_bytes=tuple(size * MIB for size in sizes),
        kv=tuple(KvShape(count, 64, 64) for count in heads),
    )
    count = draw(st.integers(1, most_peers))
    average = sum(sizes) * 2 // count + 2
    capacities = draw(st.lists(st.integers(1, average * 2), min_size=count, max_size=count))
    speeds = draw(st.lists(st.sampled_from((50, 100, 100, 900, 2000)), min_size=count, max_size=count))
    bounds = draw(st.lists(st.sampled_from((0, 0, 0, 20, 45)), min_size=count, max_size=count))
    candidates = [
        replace(one, allocation_bytes=bound * MIB)
        for one, bound in zip(peers(*capacities, decode_us=speeds), bounds, strict=True)
    ]
    return Mesh(facts, candidates, draw(_hops(count)))


@st.composite
def _hops(draw: st.DrawFn, count: int) -> Hops:
    us: dict[tuple[PeerId, PeerId], int] = {}
    broken: set[tuple[PeerId, PeerId]] = set()
    pairs = [(peer_id(one), peer_id(other)) for one in range(count) for other in range(count) if one != other]
    for pair in pairs if draw(st.booleans()) else ():
        hop = draw(st.sampled_from((0, 0, 0, 100, 500, 900, 4000, 30_000, -1)))
        if hop < 0:
            broken.add(pair)
        elif hop:
            us[pair] = hop
    return Hops(us, frozenset(broken))
