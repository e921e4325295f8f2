"""From what a cell's peers say to the plans that they are to follow: the same on every agent that knows the same.

The order is: what is held stays; what is on its way to be held goes on; what broke is repaired; new plans are made of
the peers that are left; and last, held plans are improved by them. Each takes its peers away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from meshinfer.mesh.picture import Status
from meshinfer.mesh.placement import SLACK_PERCENT, Candidate, Shortfall, memory_bytes
from meshinfer.mesh.placements import Ground, Request, placed
from meshinfer.mesh.plan import plan_id, same_but_round, shards_of
from meshinfer.mesh.scene import Scene
from meshinfer.values import (
    Objective,
    PeerId,
    Plan,
    PlanId,
    Readiness,
    ShardKey,
)


class Better(StrEnum):
    """Why a held plan is worth replacing, where it works and nothing presses."""

    FASTER = "faster"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Allocation:
    """`targets` are disjoint, but that one may name peers of the held plan that it replaces. `elsewhere` are plans of
    other cells that name peers of this one. `better` names held plans that could be improved, and why. `shortfall` says
    what is missing where there is no target at all."""

    targets: tuple[Plan, ...] = ()
    elsewhere: tuple[Plan, ...] = ()
    better: tuple[tuple[PlanId, Better], ...] = ()
    shortfall: Shortfall | None = None


def allocate(scene: Scene) -> Allocation:
    return _Allocator(scene).run()


class _Allocator:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._picture = picture = scene.picture
        self._facts = scene.models[scene.model]
        self._fewest = picture.min_owners()
        self._objective = picture.objective()
        self._able = dict(scene.able)
        self._free = set(self._able)
        self._ground = Ground(picture, self._able, self._facts.hidden)
        self._targets: list[Plan] = []
        self._kept: dict[PlanId, Plan] = {}
        self._better: list[tuple[PlanId, Better]] = []
        self._anchors: list[tuple[PlanId, Plan]] = []
        self._shortfall: Shortfall | None = None
        self._strong = False
        """Whether a plan works that is not weak: weak ones are of no more use then."""
        self._plans = {one: picture.plan(one) for one in sorted(scene.touching)}
        self._elsewhere = {one for one, plan in self._plans.items() if plan.owners[0] not in scene.cell}

    def run(self) -> Allocation:
        self._keep_held()
        self._go_on_with_open()
        self._replace_weak()
        self._repair()
        self._make_new()
        self._improve()
        self._go_on_alone()
        shortfall = None if self._targets else self._shortfall
        elsewhere = tuple(
            self._plans[one] for one in sorted(self._elsewhere) if not self._is(one, Status.OVER)
        )
        return Allocation(tuple(self._targets), elsewhere, tuple(self._better), shortfall)

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────
    def _keep_held(self) -> None:
        held = {one: plan for one, plan in self._plans.items() if self._is(one, Status.HELD)}
        self._strong = any(
            self._picture.ready(one) and not self._picture.is_weak(plan) for one, plan in held.items()
        )
        for identity, plan in held.items():
            if identity in self._elsewhere:
                self._free.difference_update(plan.named)
            elif not (self._strong and self._picture.is_weak(plan)):
                self._kept[identity] = plan
                self._target(plan)

    def _go_on_with_open(self) -> None:
        """A plan that somebody has accepted is joined where it is as good as what would be made now."""
        for identity, plan in self._latest_first():
            if identity in self._elsewhere:
                if self._is(identity, Status.OPEN):
                    self._free.difference_update(plan.named)
            elif plan.model == self._scene.model:
                if not self._is(identity, Status.OPEN) or not self._is_possible(plan):
                    self._anchors.append((identity, plan))
                elif plan.replaces not in self._kept or self._picture.is_weak(self._kept[plan.replaces]):
                    if self._is_good(plan):
                        self._target(plan)
                    else:
                        self._anchors.append((identity, plan))

    def _latest_first(self) -> list[tuple[PlanId, Plan]]:
        waiting = [(one, plan) for one, plan in self._plans.items() if not self._is(one, Status.HELD)]
        return sorted(waiting, key=lambda each: (-each[1].round, each[0]))

    def _is_possible(self, plan: Plan) -> bool:
        """Whether all whom it names can do now what it asks of them."""
        for then in plan.inputs:
            now = self._able.get(then.peer)
            if now is None or (now.incarnation, now.precision) != (then.incarnation, then.precision):
                return False
            shards = shards_of(plan, then.peer)
            if any(shard.device != now.device for shard in shards):
                return False
            if memory_bytes(self._facts, self._scene.costs, shards, now.precision) > now.capacity_bytes:
                return False
        return True

    def _is_good(self, plan: Plan) -> bool:
        """Whether it takes free peers, or those of weak plans, and nothing much better could be made of its own. What
        others might add is no matter here: they may be about to join plans of their own."""
        if self._strong and self._picture.is_weak(plan):
            return False
        weak = [kept for kept in self._overlapping(plan) if self._picture.is_weak(kept)]
        given = self._free.union(*(kept.named for kept in weak))
        if not given.issuperset(plan.named) or len(weak) < len(self._overlapping(plan)):
            return False
        if weak:
            return all(self._outdoes(plan, kept) for kept in weak) and self._spares(plan, weak)
        best = self._place(plan.named)
        if isinstance(best, Shortfall):
            return False
        return not self._clearly_better(best, plan)

    def _spares(self, plan: Plan, weak: Iterable[Plan]) -> bool:
        """Whether there is memory for a plan beside those of the weak ones that must stay until it works."""
        stay = {
            one: kept for kept in weak if not self._picture.may_be_replaced_in_place(one := plan_id(kept))
        }
        for peer in plan.named if stay else ():
            mine, now = frozenset(shards_of(plan, peer)), self._able[peer]
            if self._taken(mine | _shards(stay, peer), now) > now.capacity_bytes:
                return False
        return True

    def _overlapping(self, plan: Plan) -> list[Plan]:
        return [kept for kept in self._kept.values() if not set(plan.named).isdisjoint(kept.named)]

    def _outdoes(self, plan: Plan, weak: Plan) -> bool:
        return self._picture.unwanted(weak.model) or len(plan.owners) > len(weak.owners)

    def _clearly_better(self, one: Plan, than: Plan) -> bool:
        if len(than.owners) < self._fewest and len(one.owners) > len(than.owners):
            return True
        return self._cost(one) * (100 + SLACK_PERCENT) < self._cost(than) * 100

    def _cost(self, plan: Plan) -> int:
        return plan.stage_us if self._objective is Objective.THROUGHPUT else plan.predicted_us

    # ── what is made ────────────────────────────────────────────────────────────────────────────────────
    def _replace_weak(self) -> None:
        """Weak plans' peers together may do what each could not: beside the old plans, or, where memory is short,
        in the place of those that serve nobody."""
        weak = {
            identity: plan
            for identity, plan in self._kept.items()
            if self._picture.is_weak(plan) and not self._picture.superseded(identity)
        }
        reached = {peer for plan in self._targets for peer in plan.named if plan not in self._kept.values()}
        if not weak or any(reached.intersection(plan.named) for plan in weak.values()):
            return
        peers = self._free.union(*(plan.named for plan in weak.values())) & self._able.keys()
        stay = {one: old for one, old in weak.items() if not self._picture.may_be_replaced_in_place(one)}
        for beside in (weak, stay) if len(stay) < len(weak) else (weak,):
            plan = self._place(peers, beside=beside, replaces=min(weak))
            if isinstance(plan, Plan) and all(self._outdoes(plan, old) for old in weak.values()):
                self._target(plan)
                return

    def _repair(self) -> None:
        """Plans that broke, the latest first, each of its survivors and the free peers. Survivors of one are free for
        another when their own plan has had its turn."""
        replaced = {plan.replaces for plan in self._targets}
        anchors = [(one, plan) for one, plan in self._anchors if one not in replaced]
        claimed: dict[PeerId, PlanId] = {}
        for identity, plan in anchors:
            for peer in plan.named:
                if peer in self._free:
                    claimed.setdefault(peer, identity)
        for identity, plan in anchors:
            mine = {peer for peer, by in claimed.items() if by == identity}
            if mine:
                repaired = self._place(mine | (self._free - claimed.keys()), keep=plan, replaces=identity)
                claimed = {peer: by for peer, by in claimed.items() if by != identity}
                if isinstance(repaired, Plan) and not (self._targets and self._picture.is_weak(repaired)):
                    self._target(repaired)

    def _make_new(self) -> None:
        """As many more as there is room for: replicas, for other people's questions."""
        while self._free:
            plan = self._place(self._free)
            if isinstance(plan, Shortfall):
                self._shortfall = plan
                return
            if self._targets and self._picture.is_weak(plan):
                return
            self._target(plan)
        if not self._targets and isinstance(nobody := self._place(()), Shortfall):
            self._shortfall = nobody

    def _go_on_alone(self) -> None:
        """Whom doubts leave out may still serve by itself what it has room for."""
        for peer, one in self._scene.in_doubt.items():
            if not any(peer in plan.named for plan in self._targets):
                self._able[peer] = one
                plan = self._place((peer,))
                if isinstance(plan, Plan) and not (self._targets and self._picture.is_weak(plan)):
                    self._target(plan)

    def _improve(self) -> None:
        for identity, plan in self._kept.items():
            if (
                self._picture.superseded(identity)
                or self._picture.is_weak(plan)
                or plan.model != self._scene.model
            ):
                continue
            found = self._improvement(identity, plan)
            if found is None:
                continue
            better, why = found
            begun = self._begun(identity, better)
            self._better.append((identity, why))
            if begun is not None or identity in self._scene.ripe:
                self._target(begun or better)

    def _begun(self, identity: PlanId, better: Plan) -> Plan | None:
        """The same improvement, where somebody's patience has ended before this agent's."""
        for plan in self._plans.values():
            if (
                plan.replaces == identity
                and same_but_round(plan, better)
                and self._is(plan_id(plan), Status.OPEN)
            ):
                return plan
        return None

    def _improvement(self, identity: PlanId, plan: Plan) -> tuple[Plan, Better] | None:
        if not self._able.keys() >= set(plan.owners):
            return None  # it works, and what it costs now cannot be told
        beside, own = {identity: plan}, self._able.keys() & set(plan.named)
        best = self._place(own | self._free, keep=plan, beside=beside, replaces=identity)
        if isinstance(best, Shortfall):
            return None
        if best.assignments == plan.assignments:
            covered = {layer for one in best.standbys for layer in range(one.span.first, one.span.last)}
            return (best, Better.STANDBY) if len(covered) > len(self._stood_by(plan)) else None
        now = self._place(own, keep=plan, beside=beside, replaces=identity)
        if isinstance(now, Plan) and _same_layout(now, plan) and not self._clearly_better(best, now):
            return None
        return None if _same_layout(best, plan) else (best, Better.FASTER)

    def _stood_by(self, plan: Plan) -> set[int]:
        """Layers that a living standby has, or is about to have."""
        layers: set[int] = set()
        for standby in plan.standbys:
            advert, standing = (
                self._picture.get(standby.peer),
                self._picture.standing(plan_id(plan), standby.peer),
            )
            then = next(facts.incarnation for facts in plan.inputs if facts.peer == standby.peer)
            if advert is None or advert.incarnation != then:
                continue
            if standing is None and self._picture.floor(standby.peer) >= plan.round:
                continue
            if standing is None or standing.readiness is not Readiness.FAILED:
                layers.update(range(standby.span.first, standby.span.last))
        return layers

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────────
    def _is(self, identity: PlanId, status: Status) -> bool:
        return self._picture.status(identity) is status

    def _target(self, plan: Plan) -> None:
        self._targets.append(plan)
        self._free.difference_update(plan.named)

    def _place(
        self,
        peers: Iterable[PeerId],
        keep: Plan | None = None,
        beside: Mapping[PlanId, Plan] | None = None,
        replaces: PlanId | None = None,
    ) -> Plan | Shortfall:
        among = tuple(self._able[peer] for peer in sorted(peers))
        shards = {one: _shards(beside, one.peer) for one in among} if beside else {}
        kept = tuple((one.peer, mine) for one, mine in shards.items() if mine)
        taken = tuple((one.peer, self._taken(mine, one)) for one, mine in shards.items() if mine)
        request = Request(among, self._fewest, self._objective, keep, kept, taken)
        found = placed(self._facts, self._scene.costs, request, self._ground)
        return found if isinstance(found, Shortfall) else self._stamped(replace(found, replaces=replaces))

    def _taken(self, shards: frozenset[ShardKey], one: Candidate) -> int:
        total = 0
        for model in {shard.model for shard in shards}:
            facts = self._scene.models.get(model)
            if facts is None:
                return one.capacity_bytes  # who does not know the model cannot tell, and takes no chances
            mine = [shard for shard in shards if shard.model == model]
            total += memory_bytes(facts, self._scene.costs, mine, one.precision)
        return total

    def _stamped(self, plan: Plan) -> Plan:
        """With a round that all whom it names can still accept. That depends on what they have accepted so far and on
        nothing else: who adopts the plan changes the round of none that is computed after."""
        return replace(plan, round=1 + max(map(self._picture.floor, plan.named)))


def _same_layout(one: Plan, other: Plan) -> bool:
    """Whether the same peers own the same layers, in whatever room."""
    return [(each.peer, each.span) for each in one.assignments] == [
        (each.peer, each.span) for each in other.assignments
    ]


def _shards(plans: Mapping[PlanId, Plan], peer: PeerId) -> frozenset[ShardKey]:
    return frozenset(shard for plan in plans.values() for shard in shards_of(plan, peer))
