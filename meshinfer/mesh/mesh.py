"""An agent's part of the mesh, whole: events and the time go in, effects come out, and nothing is done here."""

from __future__ import annotations

from dataclasses import replace

from meshinfer import limits
from meshinfer.mesh.agreement import Agreement
from meshinfer.mesh.events import (
    Effect,
    Event,
    HeartbeatHeard,
    Leave,
    LoadDone,
    LoadFailed,
    ModelKnown,
    PlanIdle,
    SelfChanged,
    Tick,
)
from meshinfer.mesh.gossip import Chance
from meshinfer.mesh.membership import Membership
from meshinfer.mesh.placement import Costs, Shortfall
from meshinfer.mesh.view import View
from meshinfer.values import Advert, LinkFacts, ModelFacts, ModelId, PeerId, Plan, Standing


class Mesh:
    """Who is here, and which plans this agent stands by and asks under.

    Call `handle` for each event, and with `Tick` when `next_deadline` has come; carry out the effects in their order.
    A `Load` must end in LoadDone or LoadFailed unless an Unload of the same shard came first: its deadline is the
    loader's own. `now` (monotonic seconds) never goes back.
    """

    def __init__(self, own: Advert, costs: Costs, random: Chance, now: float) -> None:
        """`own` is the agent's first portrait, as others decode it. What the mesh itself says of it counts for
        nothing."""
        self._portrait = own
        self.own = replace(_bare(own), version=1)
        """This agent's advert as it was last published."""
        self._membership = Membership(self.own, random, now)
        self._agreement = Agreement(self.own, costs, now)
        self._links_told_at = now - limits.HEARTBEAT_S
        self._links_due: float | None = None
        self._told: tuple[Advert, int, tuple[LinkFacts, ...], tuple[PeerId, ...], bool] | None = None
        self._compose = True
        """Whether the own advert may have something new to say."""
        self._due = self._next_due()

    # ── what it says ────────────────────────────────────────────────────────────────────────────────────
    @property
    def view(self) -> View:
        return self._membership.view

    @property
    def plan(self) -> Plan | None:
        """The plan under which this agent asks, or would if it could be used."""
        return self._agreement.plan

    @property
    def usable(self) -> bool:
        return self._agreement.usable

    @property
    def reason(self) -> str:
        """Why no question can be asked, while not `usable`."""
        return self._agreement.reason

    @property
    def shortfall(self) -> Shortfall | None:
        """The figures, where memory is the reason."""
        return self._agreement.shortfall

    @property
    def model(self) -> ModelId | None:
        """The model that the mesh serves, or is about to; None while nobody who is here has one."""
        return self._agreement.model

    @property
    def standings(self) -> tuple[Standing, ...]:
        """The plans that this agent stands by, in the order in which it accepted them."""
        return self.own.standings

    def facts(self, model: ModelId) -> ModelFacts | None:
        """What ModelKnown said of a model."""
        return self._agreement.models.get(model)

    def plans(self) -> tuple[Plan, ...]:
        """All plans that are held, as far as is known here, in order of id."""
        return self._agreement.plans()

    def usable_plans(self) -> tuple[Plan, ...]:
        """Those of them under which this agent may ask."""
        return self._agreement.usable_plans()

    def next_deadline(self) -> float:
        """When to call `handle(Tick(), now)` at the latest."""
        return self._due

    def _next_due(self) -> float:
        due = self._membership.next_deadline()
        if self._links_due is not None and self._links_due < due:
            due = self._links_due
        decide_at = None if self._membership.leaving else self._agreement.next_deadline()
        return due if decide_at is None or due < decide_at else decide_at

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────
    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what the agent has to do, in order."""
        if (
            type(event) is HeartbeatHeard
            and now < self._due
            and self._membership.takes_in_passing(event.peer, event.heartbeat, now)
        ):
            return []
        effects = self._handle(event, now)
        self._due = self._next_due()
        return effects

    def _handle(self, event: Event, now: float) -> list[Effect]:
        due = self._agreement.next_deadline()
        effects = self._membership.handle(event, now)
        changed = self._take(event, now, effects)
        changed = self._note_changes(now) or changed
        if not self._membership.leaving and (changed or (due is not None and due <= now)):
            self._agreement.decide(now, effects)
            self._membership.want(self._agreement.partners())
            if self._membership.next_deadline() <= now:
                effects += self._membership.handle(Tick(), now)
            self._compose = True
        if self._compose or (self._links_due is not None and self._links_due <= now):
            self._publish(now, effects)
        return effects

    def _take(self, event: Event, now: float, effects: list[Effect]) -> bool:
        """What plans depend on besides adverts. True where there is something to decide."""
        agreement = self._agreement
        match event:
            case SelfChanged(portrait):
                self._portrait = portrait
            case ModelKnown(facts):
                agreement.model_known(facts)
                return True
            case LoadDone(shard):
                return agreement.load_done(shard)
            case LoadFailed(shard, sentence):
                return agreement.load_failed(shard, sentence, now, effects)
            case PlanIdle(plan):
                return agreement.idle(plan)
            case Leave():
                return False
            case _:
                pass
        return False

    def _note_changes(self, now: float) -> bool:
        view, agreement = self._membership.view, self._agreement
        changed = False
        for peer in self._membership.take_changes():
            if peer != view.me:
                changed = agreement.heard(peer, view.get(peer), now) or changed
        membership = self._membership
        told = (
            self._portrait,
            membership.incarnation,
            membership.links,
            membership.broken,
            membership.leaving,
        )
        if told == self._told:
            return changed
        self._told, self._compose = told, True
        portrait, incarnation, links, broken, leaving = told
        base = replace(portrait, incarnation=incarnation, links=links, broken=broken, leaving=leaving)
        return agreement.changed(base, now) or changed

    def _publish(self, now: float, effects: list[Effect]) -> None:
        """A new version where the content differs. Mere news of links waits until a heartbeat after the last."""
        self._compose = False
        after = replace(self._agreement.own, version=self.own.version)
        if after == self.own:
            self._links_due = None
            return
        only_links = replace(after, links=self.own.links, broken=self.own.broken) == self.own
        due = self._links_told_at + limits.HEARTBEAT_S
        if only_links and due > now:
            self._links_due = due
            return
        if (after.links, after.broken) != (self.own.links, self.own.broken):
            self._links_told_at = now
        self._links_due = None
        self.own = replace(after, version=self.own.version + 1)
        effects += self._membership.publish(self.own, now)


def _bare(portrait: Advert) -> Advert:
    return replace(portrait, links=(), broken=(), doubts=(), round=0, standings=(), leaving=False)
