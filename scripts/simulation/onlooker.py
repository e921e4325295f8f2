"""An agent of which only half works: it is in the mesh, says what it has, and accepts no plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

from meshinfer.limits import HEARTBEAT_S
from meshinfer.mesh.events import Effect, Event
from meshinfer.mesh.membership import Membership
from meshinfer.values import Advert


class View(Protocol):
    @property
    def present(self) -> tuple[Advert, ...]: ...


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
