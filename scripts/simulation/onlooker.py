"""Agents of which only half works: they are in the mesh, say what they have, and accept no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

from meshinfer.limits import HEARTBEAT_S
from meshinfer.mesh.events import Effect, Event
from meshinfer.mesh.membership import Membership
from meshinfer.mesh.plan import plan_id
from meshinfer.mesh.view import View
from meshinfer.values import (
    Advert,
    Assignment,
    ModelFacts,
    ModelId,
    OwnerFacts,
    Plan,
    PlanId,
    Readiness,
    Span,
    Standing,
)


class Machine(Protocol):
    """What an agent runs: `meshinfer.mesh.mesh.Mesh`, or what takes its place."""

    @property
    def own(self) -> Advert: ...
    @property
    def view(self) -> View: ...
    def handle(self, event: Event, now: float) -> Sequence[Effect]: ...
    def next_deadline(self) -> float | None: ...


class Onlooker:
    """The real membership, and nothing of the agreement. Its portrait stays what it was at the start."""

    def __init__(self, own: Advert, random: Random, now: float) -> None:
        self._members = Membership(own, random, now)
        self._published_at = now

    @property
    def own(self) -> Advert:
        return self._members.view.own

    @property
    def view(self) -> View:
        return self._members.view

    def next_deadline(self) -> float:
        return self._members.next_deadline()

    def handle(self, event: Event, now: float) -> list[Effect]:
        members, own = self._members, self.own
        effects = members.handle(event, now)
        if members.leaving != own.leaving or members.incarnation != own.incarnation:
            due = True
        else:
            due = now >= self._published_at + HEARTBEAT_S
        if due and (news := self._composed()) != own:
            self._published_at = now
            effects += members.publish(replace(news, version=own.version + 1), now)
        return effects

    def _composed(self) -> Advert:
        members = self._members
        return replace(
            self.own,
            incarnation=members.incarnation,
            links=members.links,
            broken=members.broken,
            leaving=members.leaving,
        )


FORGED_EACH_S = 7.0
WORST_US = 10**9


class Forger(Onlooker):
    """Stands by plans that it made up: they name others who could do what is asked of them, and are far worse than what
    anybody would compute. Their ids are added to `forged`."""

    def __init__(
        self,
        own: Advert,
        random: Random,
        now: float,
        models: Mapping[ModelId, ModelFacts],
        forged: set[PlanId],
    ) -> None:
        super().__init__(own, random, now)
        self._random = random
        self._models = models
        self._forged = forged
        self._forge_at = now + FORGED_EACH_S * random.random()
        self._standings: tuple[Standing, ...] = ()

    def handle(self, event: Event, now: float) -> list[Effect]:
        if now >= self._forge_at:
            self._forge_at = now + FORGED_EACH_S
            self._forge()
        return super().handle(event, now)

    def _composed(self) -> Advert:
        return replace(super()._composed(), standings=self._standings)

    def _forge(self) -> None:
        facts = self._models[self._random.choice(self.own.holdings).model]
        others = [
            advert
            for advert in self.view.present
            if advert is not self.own and any(holding.model == facts.model for holding in advert.holdings)
        ]
        if not others:
            return
        owners = [self.own, *self._random.sample(others, min(len(others), facts.layers - 1, 3))]
        plan = _made_up(facts, owners)
        self._forged.add(plan_id(plan))
        self._standings = (Standing(plan, Readiness.ACCEPTED),)


def _made_up(facts: ModelFacts, owners: Sequence[Advert]) -> Plan:
    """The first owner takes what one layer for each of the others leaves."""
    first = facts.layers - len(owners) + 1
    spans = [Span(0, first), *(Span(layer, layer + 1) for layer in range(first, facts.layers))]
    floors = [max([advert.round, *(one.plan.round for one in advert.standings)]) for advert in owners]
    inputs = [
        OwnerFacts(
            advert.peer,
            advert.incarnation,
            advert.capacity_bytes,
            advert.decode_us,
            advert.precision,
        )
        for advert in owners
    ]
    return Plan(
        facts.model,
        facts.layers,
        max(floors) + 1,
        None,
        tuple(
            Assignment(advert.peer, span, advert.device, facts.context)
            for advert, span in zip(owners, spans, strict=True)
        ),
        (),
        tuple(sorted(inputs, key=lambda one: one.peer)),
        WORST_US,
        WORST_US,
    )
