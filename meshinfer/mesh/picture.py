"""What the adverts of a view say together: which plans are held, which model is wanted, who could own layers.

Pure readings: two agents with the same adverts read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshinfer.mesh.placement import Candidate
from meshinfer.mesh.plan import flaw, plan_id
from meshinfer.values import Advert, ModelId, PeerId, Plan, PlanId, Readiness

_HOLDING = frozenset({Readiness.ACCEPTED, Readiness.LOADING, Readiness.READY})


class Picture:
    """One reading of a view; `adverts` are in order of peer id."""

    def __init__(self, adverts: Sequence[Advert]) -> None:
        self.adverts = tuple(adverts)
        self._of = {advert.peer: advert for advert in adverts}
        self.names = {advert.peer: advert.name for advert in adverts}

    def readiness(self, plan: Plan, peer: PeerId) -> Readiness | None:
        """How far an owner is with this plan; None for one that is gone, was restarted, or has not accepted
        it."""
        advert = self._of.get(peer)
        if advert is None or advert.standing is None or advert.standing.plan != plan:
            return None
        then = next((facts.incarnation for facts in plan.inputs if facts.peer == peer), None)
        return advert.standing.readiness if advert.incarnation == then else None

    def held(self, plan: Plan) -> bool:
        """Whether all its owners are here and hold it."""
        return all(self.readiness(plan, peer) in _HOLDING for peer in plan.owners)

    def ready(self, plan: Plan) -> bool:
        """Whether all its owners are here and ready to serve under it."""
        return all(self.readiness(plan, peer) is Readiness.READY for peer in plan.owners)

    def kept(self, sound: Callable[[Plan], bool]) -> Plan | None:
        """The plan to keep: one that is held and sound. Of several, one that is ready goes first, then the
        one whose model more peers want, then the faster, then the lower id. None is kept for a model that
        nobody wants any more while another is wanted."""
        standings = (advert.standing for advert in self.adverts if advert.standing is not None)
        plans = {
            standing.plan
            for standing in standings
            if standing.readiness in _HOLDING and flaw(standing.plan) is None and self.held(standing.plan)
        }
        somebody_wants = any(self._wanted(model) for model in self._models())
        keepable = [
            plan for plan in plans if sound(plan) and (self._wanted(plan.model) or not somebody_wants)
        ]
        return min(keepable, key=self._rank, default=None)

    def chosen_model(self) -> ModelId | None:
        """The model to serve where no plan is kept: one that a peer has whole, then the one that most peers
        want, then the lowest id. A model that nobody has whole is tried too: its owners may hold the spans
        they need."""
        return min(
            self._models(),
            key=lambda model: (not self._whole(model), -self._wanted(model), model),
            default=None,
        )

    def candidates(self, model: ModelId) -> tuple[Candidate, ...]:
        """Peers that could own layers of a model: they have its manifest and some memory, and did not just
        fail."""
        return tuple(
            Candidate.of(advert)
            for advert in self.adverts
            if advert.capacity_bytes > 0 and _has(advert, model) and not failed(advert, model)
        )

    def without_manifest(self, model: ModelId) -> tuple[PeerId, ...]:
        """Peers with memory for layers that are still fetching the model's description."""
        return tuple(
            advert.peer for advert in self.adverts if advert.capacity_bytes > 0 and not _has(advert, model)
        )

    def failures(self, model: ModelId) -> tuple[tuple[PeerId, str], ...]:
        """Peers that could not load the model, and why."""
        return tuple(
            (advert.peer, advert.standing.detail)
            for advert in self.adverts
            if advert.standing is not None and failed(advert, model)
        )

    def min_owners(self) -> int:
        """The most demanding peer decides, so that all compute with the same number."""
        return max((advert.min_owners for advert in self.adverts), default=1)

    def sources(self, model: ModelId, me: PeerId) -> tuple[PeerId, ...]:
        """Others that have the model's manifest, those with all of the model first."""
        holders = [
            (not holding.complete, advert.peer)
            for advert in self.adverts
            for holding in advert.holdings
            if holding.model == model and advert.peer != me
        ]
        return tuple(peer for _, peer in sorted(holders))

    def model_name(self, model: ModelId) -> str:
        named = (holding for advert in self.adverts for holding in advert.holdings if holding.model == model)
        return min((holding.name for holding in named), default=model[:12])

    def _models(self) -> set[ModelId]:
        return {holding.model for advert in self.adverts for holding in advert.holdings}

    def _whole(self, model: ModelId) -> bool:
        return any(
            holding.complete
            for advert in self.adverts
            for holding in advert.holdings
            if holding.model == model
        )

    def _wanted(self, model: ModelId) -> int:
        return sum(advert.wants == model for advert in self.adverts)

    def _rank(self, plan: Plan) -> tuple[bool, int, int, PlanId]:
        return not self.ready(plan), -self._wanted(plan.model), plan.predicted_us, plan_id(plan)


def failed(advert: Advert, model: ModelId) -> bool:
    """Whether this peer could not load the model and still sits out."""
    standing = advert.standing
    return standing is not None and standing.readiness is Readiness.FAILED and standing.plan.model == model


def _has(advert: Advert, model: ModelId) -> bool:
    return any(holding.model == model for holding in advert.holdings)
