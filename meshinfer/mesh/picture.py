"""What the adverts of the present say together: which plans are held, which model is wanted, who could own layers.

Readings are pure: two agents that know the same adverts read the same. The index is kept up by one advert at a time, so
that a mesh of a thousand costs no more at each change than the change itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from enum import Enum
from typing import Final

from meshinfer.mesh.plan import flaw, plan_id
from meshinfer.values import Advert, ModelId, Objective, PeerId, Plan, PlanId, Readiness, Standing

_NONE: Final[frozenset[PlanId]] = frozenset()


class Status(Enum):
    """What the adverts say of a plan.

    HELD: all its owners are here, in the incarnation that it was computed from, and stand by it.
    OPEN: not held, but each owner stands by it or may still accept it.
    OVER: an owner is gone, was restarted, failed, or has passed it by; or a link between two neighbours is broken.
    """

    HELD = "held"
    OPEN = "open"
    OVER = "over"


class Picture:
    """The newest adverts of the present, the own one included, and what can be read from them."""

    def __init__(self, adverts: Iterable[Advert] = ()) -> None:
        self._of: dict[PeerId, Advert] = {}
        self._order: list[PeerId] = []
        self.room_changes = 0
        """Goes up whenever somebody comes, goes, or gives more or less memory."""
        self._standings: dict[PeerId, dict[PlanId, Standing]] = {}
        self._plans: dict[PlanId, Plan] = {}
        self._holders: dict[PlanId, set[PeerId]] = {}
        self._naming: dict[PeerId, set[PlanId]] = {}
        self._status: dict[PlanId, Status] = {}
        self._whole: Counter[ModelId] = Counter()
        self._listed: Counter[ModelId] = Counter()
        self._wants: Counter[ModelId] = Counter()
        self._fewest: Counter[int] = Counter()
        self._aims: Counter[Objective] = Counter()
        self._doubting: dict[PeerId, tuple[PeerId, ...]] = {}
        for advert in adverts:
            self.put(advert.peer, advert)

    # ── keeping it up ───────────────────────────────────────────────────────────────────────────────────
    def put(self, peer: PeerId, advert: Advert | None) -> bool:
        """Take the newest advert of a peer, None when it is gone. True where this may change what is planned."""
        before = self._of.get(peer)
        if before is advert or (before and advert and _same_but_version(before, advert)):
            if advert is not None:
                self._of[peer] = advert
            return False
        if before is None or advert is None or before.capacity_bytes != advert.capacity_bytes:
            self.room_changes += 1
        if before is None:
            insort(self._order, peer)
        else:
            self._count(before, -1)
        if advert is None:
            del self._of[peer], self._order[bisect_left(self._order, peer)]
            self._doubting.pop(peer, None)
        else:
            self._of[peer] = advert
            self._count(advert, 1)
            self._note_doubts(advert)
        if before is None or advert is None or before.standings != advert.standings:
            self._stand(peer, () if advert is None else advert.standings)
        for plan in self._naming.get(peer, _NONE):
            self._status.pop(plan, None)
        return True

    def _count(self, advert: Advert, by: int) -> None:
        for holding in advert.holdings:
            self._listed[holding.model] += by
            self._whole[holding.model] += by * holding.complete
        if advert.wants is not None:
            self._wants[advert.wants] += by
        self._fewest[advert.min_owners] += by
        self._aims[advert.objective] += by

    def _note_doubts(self, advert: Advert) -> None:
        if advert.doubts:
            self._doubting[advert.peer] = advert.doubts
        else:
            self._doubting.pop(advert.peer, None)

    def _stand(self, peer: PeerId, standings: tuple[Standing, ...]) -> None:
        before = self._standings.get(peer, {})
        after = {plan_id(one.plan): one for one in standings if flaw(one.plan) is None}
        for identity in before.keys() - after.keys():
            self._holders[identity].discard(peer)
            if not self._holders[identity]:
                self._forget(identity)
        for identity in after.keys() - before.keys():
            if identity not in self._plans:
                self._remember(identity, after[identity].plan)
            self._holders[identity].add(peer)
        self._standings[peer] = after
        if not after:
            del self._standings[peer]

    def _remember(self, identity: PlanId, plan: Plan) -> None:
        self._plans[identity] = plan
        self._holders[identity] = set()
        for peer in plan.named:
            self._naming.setdefault(peer, set()).add(identity)

    def _forget(self, identity: PlanId) -> None:
        for peer in self._plans.pop(identity).named:
            self._naming[peer].discard(identity)
            if not self._naming[peer]:
                del self._naming[peer]
        del self._holders[identity]
        self._status.pop(identity, None)

    # ── peers ───────────────────────────────────────────────────────────────────────────────────────────
    def __len__(self) -> int:
        return len(self._of)

    def get(self, peer: PeerId) -> Advert | None:
        return self._of.get(peer)

    def name(self, peer: PeerId) -> str:
        advert = self._of.get(peer)
        return peer if advert is None else advert.name

    def names(self) -> dict[PeerId, str]:
        return {peer: advert.name for peer, advert in self._of.items()}

    @property
    def adverts(self) -> tuple[Advert, ...]:
        """In order of peer id."""
        return tuple(self._of[peer] for peer in self._order)

    @property
    def peers(self) -> Sequence[PeerId]:
        """In order of id."""
        return self._order

    def floor(self, peer: PeerId) -> int:
        """The last round that is over for a peer, or taken: it accepts only plans of a higher one."""
        advert = self._of.get(peer)
        if advert is None:
            return 0
        return max([advert.round, *(standing.plan.round for standing in advert.standings)])

    def is_broken(self, one: PeerId, other: PeerId) -> bool:
        """Whether either of two peers says that no route should join them."""
        first, second = self._of.get(one), self._of.get(other)
        return (first is not None and other in first.broken) or (second is not None and one in second.broken)

    def broken_among(self, peers: Collection[PeerId]) -> tuple[tuple[PeerId, PeerId], ...]:
        """Of these peers, who says of which others that no route should join them."""
        said = ((peer, other) for peer in peers if peer in self._of for other in self._of[peer].broken)
        return tuple(pair for pair in said if pair[1] in peers)

    def failed(self, peer: PeerId, model: ModelId) -> bool:
        """Whether a peer could not load the model and still sits out."""
        standings = self._standings.get(peer)
        if not standings:
            return False
        return any(
            one.readiness is Readiness.FAILED and one.plan.model == model for one in standings.values()
        )

    def failures(self, model: ModelId) -> tuple[tuple[PeerId, str], ...]:
        """Peers that could not load the model, and why."""
        return tuple(
            (advert.peer, standing.detail)
            for advert in self.adverts
            for standing in advert.standings
            if standing.readiness is Readiness.FAILED and standing.plan.model == model
        )

    def without_manifest(self, model: ModelId) -> tuple[PeerId, ...]:
        """Peers with memory for layers that are still fetching the model's description."""
        return tuple(
            advert.peer
            for advert in self.adverts
            if advert.capacity_bytes > 0 and not self.has_manifest(advert.peer, model)
        )

    def left_out(self) -> frozenset[PeerId]:
        """The fewest peers that have to be left out so that no doubt is left between two of the others.

        Whoever has most doubts, its own or others' of it, goes first; of two equal ones the more doubted, then the
        lower id. So one that waits for nothing or accepts nothing goes, whoever notices it, and all agree on it.
        """
        if not self._doubting:
            return frozenset()
        pairs = {
            (peer, other) for peer, doubts in self._doubting.items() for other in doubts if other in self._of
        }
        out: set[PeerId] = set()
        while pairs:
            in_all, of_it = Counter(end for pair in pairs for end in pair), Counter(end for _, end in pairs)
            worst = min(in_all, key=lambda peer: (-in_all[peer], -of_it[peer], peer))
            out.add(worst)
            pairs = {pair for pair in pairs if worst not in pair}
        return frozenset(out)

    # ── plans ───────────────────────────────────────────────────────────────────────────────────────────
    def plans(self) -> tuple[PlanId, ...]:
        """All that somebody present stands by, in no order."""
        return tuple(self._plans)

    def plan(self, identity: PlanId) -> Plan:
        return self._plans[identity]

    def known(self, identity: PlanId) -> bool:
        return identity in self._plans

    def naming(self, peer: PeerId) -> Set[PlanId]:
        """Plans that name a peer, whether it accepted them or not."""
        return self._naming.get(peer, _NONE)

    def standing(self, identity: PlanId, peer: PeerId) -> Standing | None:
        """How a peer stands by a plan; None for one that is gone, was restarted, or does not."""
        found = self._standings.get(peer, {}).get(identity)
        if found is None:
            return None
        then = next((facts.incarnation for facts in found.plan.inputs if facts.peer == peer), None)
        return found if self._of[peer].incarnation == then else None

    def readiness(self, plan: Plan, peer: PeerId) -> Readiness | None:
        found = self.standing(plan_id(plan), peer)
        return None if found is None else found.readiness

    def is_promised(self, identity: PlanId) -> bool:
        """Whether anybody stands by it who has not failed."""
        holders = self._holders.get(identity, ())
        return any(self._standings[peer][identity].readiness is not Readiness.FAILED for peer in holders)

    def status(self, identity: PlanId) -> Status:
        known = self._status.get(identity)
        if known is None:
            known = self._status[identity] = self._judge(identity, self._plans[identity])
        return known

    def _judge(self, identity: PlanId, plan: Plan) -> Status:
        then = {facts.peer: facts.incarnation for facts in plan.inputs}
        waiting = False
        for peer in plan.owners:
            advert, standing = self._of.get(peer), self.standing(identity, peer)
            if advert is None or advert.incarnation != then[peer]:
                return Status.OVER
            if standing is None and self.floor(peer) >= plan.round:
                return Status.OVER
            if standing is not None and standing.readiness is Readiness.FAILED:
                return Status.OVER
            waiting = waiting or standing is None
        if any(map(self.is_broken, plan.owners, plan.owners[1:])):
            return Status.OVER
        return Status.OPEN if waiting else Status.HELD

    def held(self, identity: PlanId) -> bool:
        return identity in self._plans and self.status(identity) is Status.HELD

    def ready(self, identity: PlanId) -> bool:
        """Whether all its owners are here and ready to serve under it."""
        return self.held(identity) and all(
            self._standings[peer][identity].readiness is Readiness.READY
            for peer in self._plans[identity].owners
        )

    def passed_by(self, identity: PlanId) -> bool:
        """Whether an owner that is here will never accept it, or not again: nothing can bring it back."""
        plan = self._plans[identity]
        return any(
            peer in self._of and self.standing(identity, peer) is None and self.floor(peer) >= plan.round
            for peer in plan.owners
        )

    def is_weak(self, plan: Plan) -> bool:
        """Whether a plan is only for want of a better one, however well it works."""
        return len(plan.owners) < self.min_owners() or self.unwanted(plan.model)

    def may_be_replaced_in_place(self, identity: PlanId) -> bool:
        """Whether a weak plan may go before its successor works: only where nobody is served by it, or nobody wants
        what it serves."""
        return not self.ready(identity) or self.unwanted(self._plans[identity].model)

    def superseded(self, identity: PlanId) -> bool:
        """Whether one of its owners stands by a later plan too, which is held: this one is on its way out."""
        plan = self._plans[identity]
        return any(
            other != identity and standing.plan.round > plan.round and self.held(other)
            for peer in plan.owners
            for other, standing in self._standings.get(peer, {}).items()
        )

    # ── models and wishes ───────────────────────────────────────────────────────────────────────────────
    def unwanted(self, model: ModelId) -> bool:
        """Whether nobody wants a model while somebody wants another that is here."""
        return not self._wants[model] and any(
            self._wants[other] for other in self._models() if other != model
        )

    def chosen_model(self) -> ModelId | None:
        """The model to plan for: that of a held plan, unless it is unwanted; else one that a peer has whole; of
        several the one that most peers want, then the lowest id. One that nobody has whole is tried too: its owners may
        hold the spans they need."""
        held: set[ModelId] = set()
        for identity, plan in self._plans.items():
            if plan.model not in held and self.status(identity) is Status.HELD:
                held.add(plan.model)
        kept = {model for model in held if not self.unwanted(model)}
        return min(
            {*self._models(), *kept},
            key=lambda model: (model not in kept, not self._whole[model], -self._wants[model], model),
            default=None,
        )

    def _models(self) -> list[ModelId]:
        return [model for model, count in self._listed.items() if count]

    def has_manifest(self, peer: PeerId, model: ModelId) -> bool:
        advert = self._of.get(peer)
        return advert is not None and any(holding.model == model for holding in advert.holdings)

    def sources(self, model: ModelId, me: PeerId) -> tuple[PeerId, ...]:
        """Others that have the model's manifest, those with all of the model first."""
        holders = [
            (not holding.complete, advert.peer)
            for advert in self._of.values()
            for holding in advert.holdings
            if holding.model == model and advert.peer != me
        ]
        return tuple(peer for _, peer in sorted(holders))

    def model_name(self, model: ModelId) -> str:
        listed = (holding for advert in self._of.values() for holding in advert.holdings)
        return min((holding.name for holding in listed if holding.model == model), default=model[:12])

    def min_owners(self) -> int:
        """The most demanding peer decides, so that all compute with the same number."""
        return max((number for number, count in self._fewest.items() if count), default=1)

    def objective(self) -> Objective:
        """What most would have; latency where as many would have the one as the other."""
        return max(Objective, key=lambda aim: (self._aims[aim], aim is Objective.LATENCY))


def _same_but_version(one: Advert, other: Advert) -> bool:
    """Whether two adverts of a peer differ in nothing that plans depend on."""
    return _essence(one) == _essence(other)


def _essence(advert: Advert) -> tuple[object, ...]:
    return (
        advert.incarnation,
        advert.standings,
        advert.round,
        advert.doubts,
        advert.broken,
        advert.capacity_bytes,
        advert.allocation_bytes,
        advert.decode_us,
        advert.prefill_us,
        advert.device,
        advert.precision,
        advert.rules,
        advert.holdings,
        advert.wants,
        advert.min_owners,
        advert.objective,
        advert.name,
    )
