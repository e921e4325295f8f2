"""Under which of the usable plans one agent asks."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from meshinfer import limits
from meshinfer.mesh.picture import Picture
from meshinfer.mesh.plan import flaw
from meshinfer.values import ModelFacts, ModelId, PeerId, PlanId


class Asking:
    """It stays with a plan while that can be used, follows it to its successor, and where it has to choose, takes one
    that it owns a span of, or else one of the fast ones by a hash, so that askers spread over them."""

    def __init__(self, me: PeerId, picture: Picture, models: Mapping[ModelId, ModelFacts]) -> None:
        self._me = me
        self._picture = picture
        self._models = models
        self.using: PlanId | None = None

    def may_use(self, identity: PlanId) -> bool:
        """Only when all its owners have accepted it and are ready, in their own present words."""
        if not self._picture.known(identity) or not self._picture.ready(identity):
            return False
        plan = self._picture.plan(identity)
        return plan.model in self._models and flaw(plan, self._models[plan.model]) is None

    def choose(self, model: ModelId | None) -> PlanId | None:
        """`model` is the one that the mesh serves; a plan for another is better than none."""
        self.using = self._next(model)
        return self.using

    def _next(self, model: ModelId | None) -> PlanId | None:
        using = self.using
        if using is not None and self.may_use(using):
            successor, rank = self._successor(using), self._rank(using, model)
            if successor is not None and self._rank(successor, model) <= rank:
                return successor
            if rank == (False, False):
                return using
        usable = [one for one in self._picture.plans() if self.may_use(one)]
        best = min((self._rank(one, model) for one in usable), default=None)
        usable = [one for one in usable if self._rank(one, model) == best]
        return using if using in usable else self._one_of(usable)

    def _successor(self, using: PlanId) -> PlanId | None:
        plans = (one for one in self._picture.plans() if self._picture.plan(one).replaces == using)
        return min((one for one in plans if self.may_use(one)), default=None)

    def _rank(self, identity: PlanId, model: ModelId | None) -> tuple[bool, bool]:
        plan = self._picture.plan(identity)
        return self._picture.is_weak(plan), plan.model != model

    def _one_of(self, usable: list[PlanId]) -> PlanId | None:
        plans = {one: self._picture.plan(one) for one in usable}
        fastest = min((plan.predicted_us for plan in plans.values()), default=0)
        near = [
            (self._me not in plan.owners, self._spread(one), one)
            for one, plan in plans.items()
            if plan.predicted_us * 100 <= fastest * limits.SPREAD_PERCENT
        ]
        return min(near)[2] if near else None

    def _spread(self, identity: PlanId) -> bytes:
        return sha256(f"{self._me}:{identity}".encode()).digest()
