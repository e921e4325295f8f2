"""Whether the mesh has come to rest: one view on each island, and plans that work wherever the model fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshinfer.mesh.placement import Candidate, Costs, Hops, Options, place
from meshinfer.mesh.plan import plan_id, shards_of
from meshinfer.values import Advert, ModelFacts, ModelId, PeerId, Plan, PlanId, Readiness
from simulation.pc import Pc
from simulation.process import Process
from simulation.world import World


@dataclass(frozen=True, slots=True)
class _Plans:
    """The plans of one island: `holders` by readiness of those that stand by each."""

    by_id: dict[PlanId, Plan]
    holders: dict[PlanId, dict[PeerId, Readiness]]

    def usable(self) -> set[PlanId]:
        return {plan for plan in self.by_id if self._ready(plan)}

    def _ready(self, plan: PlanId) -> bool:
        holders = self.holders[plan]
        return all(holders.get(owner) is Readiness.READY for owner in self.by_id[plan].owners)


def unrest(world: World) -> str | None:
    """Why the mesh has not come to rest yet; None when it has."""
    for island in world.paths.islands():
        reason = _unrest_on(world, island)
        if reason is not None:
            return reason
    return None


def usable_plans(world: World) -> dict[PlanId, Plan]:
    """What all owners are ready for, by their own words."""
    found: dict[PlanId, Plan] = {}
    for island in world.paths.islands():
        plans = _plans_of(_processes(island))
        found |= {plan: plans.by_id[plan] for plan in plans.usable()}
    return found


def _unrest_on(world: World, island: Sequence[Pc]) -> str | None:
    processes = _processes(island)
    plans = _plans_of(processes)
    usable = plans.usable()
    return (
        _views_differ(processes)
        or _standings_unfit(processes, plans)
        or _memory_left(processes)
        or _asking_unfit(world, processes, usable)
    )


def _processes(island: Sequence[Pc]) -> list[Process]:
    return [pc.process for pc in island if pc.process is not None]


def _plans_of(processes: Sequence[Process]) -> _Plans:
    plans = _Plans({}, {})
    for process in processes:
        if process.deaf:
            continue
        for one in process.own.standings:
            plan = plan_id(one.plan)
            plans.by_id[plan] = one.plan
            plans.holders.setdefault(plan, {})[process.me] = one.readiness
    return plans


# ── views ───────────────────────────────────────────────────────────────────────────────────────────────────
def _views_differ(processes: Sequence[Process]) -> str | None:
    here = frozenset(process.me for process in processes)
    own = {process.me: process.own for process in processes}
    looked_at: set[bytes] = set()
    for process in processes:
        if (digest := process.machine.view.digest) in looked_at:
            continue  # it knows the same as another
        looked_at.add(digest)
        present = {advert.peer for advert in process.machine.view.present}
        if present != here:
            missing, extra = len(here - present), len(present - here)
            return (
                f"{process.pc.name} misses {missing} of {len(here)} peers and has {extra} that are not here"
            )
        for advert in process.machine.view.present:
            newest = own[advert.peer]
            if advert is not newest and _tells_other(advert, newest):
                return f"{process.pc.name} has old news of {newest.name}"
    return None


def _tells_other(advert: Advert, newest: Advert) -> bool:
    """Links come and go all the time; what plans are made from does not."""
    return (
        advert.incarnation != newest.incarnation
        or advert.standings != newest.standings
        or advert.capacity_bytes != newest.capacity_bytes
        or advert.wants != newest.wants
        or advert.holdings != newest.holdings
    )


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────
def _standings_unfit(processes: Sequence[Process], plans: _Plans) -> str | None:
    for process in processes:
        if process.deaf:
            continue
        for one in process.own.standings:
            if one.readiness is Readiness.FAILED:
                continue
            if one.readiness is not Readiness.READY:
                return f"{process.pc.name} is not ready for what it stands by, but {one.readiness.value}"
            holders = plans.holders[plan_id(one.plan)]
            for owner in one.plan.owners:
                if holders.get(owner) in (None, Readiness.FAILED):
                    return f"{process.pc.name} stands by a plan that not all of its owners stand by"
    return None


def _memory_left(processes: Sequence[Process]) -> str | None:
    for process in processes:
        standing = [one.plan for one in process.own.standings if one.readiness is not Readiness.FAILED]
        promised = {shard for plan in standing for shard in shards_of(plan, process.me)}
        if not process.shards.keys() <= promised:
            return f"{process.pc.name} holds layers of no plan"
        if not all(process.shards.values()):
            return f"{process.pc.name} is still loading"
    return None


def _asking_unfit(world: World, processes: Sequence[Process], usable: set[PlanId]) -> str | None:
    for process in processes:
        if process.deaf:
            continue
        if process.usable is None and not process.reason:
            return f"{process.pc.name} has no plan to ask under and no reason"
        if process.usable_id is not None and process.usable_id not in usable:
            return f"{process.pc.name} asks under a plan that cannot be used"
        if usable and process.usable is None:
            return f"{process.pc.name} does not ask, though a plan can be used: {process.reason}"
    return None if usable or all(process.deaf for process in processes) else _possible(world, processes)


def _possible(world: World, processes: Sequence[Process]) -> str | None:
    """Why there should be a plan on this island, where there is none."""
    model = _wanted(processes)
    able = [process.own for process in processes if not process.deaf and not process.pc.disk_full]
    if model is None or not able:
        return None
    hops = _passable(world, processes)
    candidates = tuple(Candidate.of(advert) for advert in able)
    possible = _can_be_placed(world.models[model], candidates, world.costs, hops.broken)
    return "a plan is possible, and there is none" if possible else None


@lru_cache(maxsize=256)
def _can_be_placed(
    facts: ModelFacts,
    candidates: tuple[Candidate, ...],
    costs: Costs,
    broken: frozenset[tuple[PeerId, PeerId]],
) -> bool:
    """Remembered: nothing changes between most looks."""
    return isinstance(place(facts, candidates, costs, Options(hops=Hops(broken=broken))), Plan)


def _wanted(processes: Sequence[Process]) -> ModelId | None:
    """One that a peer has whole, then the one that most peers want, then the lowest id."""
    adverts = [process.own for process in processes]
    whole = {holding.model for advert in adverts for holding in advert.holdings if holding.complete}
    known = {holding.model for advert in adverts for holding in advert.holdings}
    wants = Counter(advert.wants for advert in adverts)
    return min(known, key=lambda model: (model not in whole, -wants[model], model), default=None)


def _passable(world: World, processes: Sequence[Process]) -> Hops:
    """Only ways that work, and that nobody calls broken."""
    broken = {(process.me, other) for process in processes for other in process.own.broken}
    if not world.paths.whole:
        broken |= {
            (one.me, other.me)
            for one in processes
            for other in processes
            if one is not other and not world.paths.joined(one.pc, other.pc)
        }
    return Hops(broken=frozenset(broken))
