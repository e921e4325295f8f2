"""Which plan this agent follows: events and the time go in, effects come out, and nothing is done here.

PROTOCOL.md beside this file says why the rules are as they are, and what they do not yet cover.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from meshinfer.mesh import reasons
from meshinfer.mesh.events import (
    AdvertHeard,
    Effect,
    Event,
    Load,
    LoadDone,
    LoadFailed,
    ModelKnown,
    NeedModel,
    PeerLeft,
    PlanUnusable,
    PlanUsable,
    Publish,
    SelfChanged,
    Tick,
    Unload,
)
from meshinfer.mesh.picture import Picture
from meshinfer.mesh.placement import Candidate, Costs, Shortfall, memory_bytes, place
from meshinfer.mesh.plan import assignment_of, facts_of, flaw, plan_id
from meshinfer.mesh.view import View
from meshinfer.values import Advert, ModelFacts, ModelId, PeerId, Plan, PlanId, Readiness, Standing

SETTLE_S = 1.0
"""A plan is computed when what it depends on has been the same for so long: two heartbeats, so that ten
agents that start at the same second make one plan and not ten."""

SETTLE_MOST_S = 5.0
"""In a mesh that never rests for `SETTLE_S`, a plan is computed after so long all the same."""

ALONE_SETTLE_S = 2.0
"""An agent that has just started and hears nobody waits so long before it plans for itself alone: mDNS needs
1.2 s (measured), and loading a whole model to drop it a second later helps nobody."""

NEED_AGAIN_S = 2.0
"""A manifest that has not come is asked for again after so long: the peer that was asked may be gone."""

BACKOFF_S = 30.0
BACKOFF_MOST_S = 1800.0
"""An owner that could not load sits out of its model's plans for so long, twice as long after each failure in
a row, up to half an hour: a full disk is rarely emptied sooner, and each attempt may cost the mesh a working
plan."""

_Inputs = tuple[ModelId | None, bool, tuple[Candidate, ...], int]


@dataclass(slots=True)
class _Calm:
    """Whether what plans are computed from has been the same for long enough."""

    changed_at: float
    restless_since: float
    inputs: _Inputs | None = None

    def note(self, inputs: _Inputs, now: float) -> None:
        if inputs == self.inputs:
            return
        if self.changed_at + SETTLE_S <= now:
            self.restless_since = now
        self.changed_at = now
        self.inputs = inputs

    def acted(self, now: float) -> None:
        """A plan was computed; if in the midst of changes, the next one waits anew."""
        if self.changed_at + SETTLE_S > now:
            self.restless_since = now

    def settles_at(self) -> float:
        return min(self.changed_at + SETTLE_S, self.restless_since + SETTLE_MOST_S)


@dataclass(frozen=True, slots=True)
class _Backoff:
    failures: int
    until: float
    detail: str


class Ownership:
    """The plan that one agent follows: what it holds as an owner, and what it may use as an asker.

    `own` is this agent's advert as others decode it (feed it through the codec once, since text is cleaned
    there). The agent sends a new version of it whenever `Publish` says so, with that standing in it. Call
    `handle` for each event, and with `Tick` when `next_deadline` has come; carry out the effects in their
    order. A `Load` must end in LoadDone or LoadFailed unless an Unload of the same plan came first: its
    deadline is the loader's own.
    """

    def __init__(self, own: Advert, costs: Costs, now: float) -> None:
        self.me: PeerId = own.peer
        self.view = View(replace(own, standing=None))
        self.plan: Plan | None = None
        """The plan that is used or awaited."""
        self.model: ModelId | None = None
        """The model that the mesh serves, or is about to; None while nobody who is here has one."""
        self.usable = False
        self.reason = "the agent has just started"
        """Why no question can be asked, while not `usable`."""
        self.shortfall: Shortfall | None = None
        """The figures, where memory is the reason."""
        self._costs = costs
        self._started_at = now
        self._models: dict[ModelId, ModelFacts] = {}
        self._loaded: PlanId | None = None  # a Load was issued for it, and no Unload since
        self._backoffs: dict[ModelId, _Backoff] = {}
        self._calm = _Calm(now, now)
        self._asked: tuple[ModelId, float] | None = None
        self._computed: tuple[_Inputs, Plan | Shortfall] | None = None
        self._decide_at: float | None = now
        self._said: Plan | str | None = None

    @property
    def standing(self) -> Standing | None:
        """The plan that this agent has promised memory to, and how far it is with it."""
        return self.view.own.standing

    def facts(self, model: ModelId) -> ModelFacts | None:
        """What ModelKnown said of a model."""
        return self._models.get(model)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what the agent has to do, in order. `now` (monotonic seconds) never goes
        back."""
        due = self.next_deadline()
        effects: list[Effect] = []
        before = self.standing
        gone = self.view.expire(now)
        changed = self._take(event, now, effects)
        # Most events are heartbeats that change nothing, and cost nothing.
        if changed or gone or (due is not None and due <= now):
            self._decide(now, effects)
        if self.standing != before:
            effects.append(Publish(self.standing))
        return effects

    def next_deadline(self) -> float | None:
        """When to call `handle(Tick(), now)` at the latest."""
        times = [self._decide_at, self.view.next_expiry()]
        if self._asked is not None:
            times.append(self._asked[1] + NEED_AGAIN_S)
        backoff = self._sitting_out()
        if backoff is not None:
            times.append(backoff.until)
        return min((time for time in times if time is not None), default=None)

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────
    def _take(self, event: Event, now: float, effects: list[Effect]) -> bool:
        """Let an event change what is known; True when there is something to decide."""
        match event:
            case AdvertHeard(advert):
                return self.view.heard(advert, now)
            case PeerLeft(peer):
                return self.view.left(peer, now)
            case SelfChanged(advert):
                return self._change_self(advert, now)
            case ModelKnown(facts):
                self._models[facts.model] = facts
                return True
            case LoadDone(plan):
                return self._load_done(plan)
            case LoadFailed(plan, sentence):
                return self._load_failed(plan, sentence, now, effects)
            case Tick():
                return False
            case _:
                assert_never(event)

    def _change_self(self, advert: Advert, now: float) -> bool:
        if advert.capacity_bytes != self.view.own.capacity_bytes:
            # Somebody made room, or took it: what failed before deserves another try.
            self._backoffs = {model: replace(old, until=now) for model, old in self._backoffs.items()}
        before = replace(self.view.own, version=advert.version)
        self.view.set_own(advert)
        return self.view.own != before

    def _load_done(self, plan: PlanId) -> bool:
        standing = self._standing_for(plan)
        if standing is None or standing.readiness is not Readiness.LOADING:
            return False  # it crossed an Unload on its way
        self._backoffs.pop(standing.plan.model, None)
        self._stand(replace(standing, readiness=Readiness.READY))
        return True

    def _load_failed(self, plan: PlanId, sentence: str, now: float, effects: list[Effect]) -> bool:
        standing = self._standing_for(plan)
        if standing is None or standing.readiness not in (Readiness.LOADING, Readiness.READY):
            return False
        model = standing.plan.model
        failures = self._backoffs[model].failures + 1 if model in self._backoffs else 1
        pause_s = min(BACKOFF_S * 2 ** min(failures - 1, 16), BACKOFF_MOST_S)
        self._backoffs[model] = _Backoff(failures, now + pause_s, sentence)
        self._release(effects)
        self._stand(Standing(standing.plan, Readiness.FAILED, sentence))
        return True

    def _standing_for(self, plan: PlanId) -> Standing | None:
        standing = self.standing
        return standing if standing is not None and plan_id(standing.plan) == plan else None

    # ── decisions ───────────────────────────────────────────────────────────────────────────────────────
    def _decide(self, now: float, effects: list[Effect]) -> None:
        self._decide_at = None
        self._drop_what_cannot_stay(now, effects)
        picture = Picture(self.view.peers(now))
        kept = picture.kept(self._is_sound)
        model = self.model = picture.chosen_model() if kept is None else kept.model
        self._ask_for_manifest(picture, model, now, effects)
        goal = self._goal(picture, kept, model, now)
        if goal is not None:
            self._pursue(goal, now, effects)
            picture = Picture(self.view.peers(now))
        self._load_when_held(picture, effects)
        self._conclude(Picture(self.view.peers(now)), goal, model, effects)

    def _drop_what_cannot_stay(self, now: float, effects: list[Effect]) -> None:
        """A promise that this PC can keep no longer, and a failure that has been sat out."""
        standing = self.standing
        if standing is None:
            return
        if standing.readiness is Readiness.FAILED:
            backoff = self._sitting_out()
            if backoff is None or backoff.until <= now:
                self._stand(None)
        elif not self._can_keep(standing.plan):
            self._release(effects)
            self._stand(None)

    def _can_keep(self, plan: Plan) -> bool:
        own, assignment, then = self.view.own, assignment_of(plan, self.me), facts_of(plan, self.me)
        facts = self._models.get(plan.model)
        if assignment is None or then is None or facts is None:
            return False
        if (own.device, own.precision) != (assignment.device, then.precision):
            return False
        return memory_bytes(facts, self._costs, assignment, then.precision) <= own.capacity_bytes

    def _is_sound(self, plan: Plan) -> bool:
        return flaw(plan, self._models.get(plan.model)) is None

    def _ask_for_manifest(
        self, picture: Picture, model: ModelId | None, now: float, effects: list[Effect]
    ) -> None:
        sources = () if model is None else picture.sources(model, self.me)
        if model is None or model in self._models or not sources:
            self._asked = None
        elif self._asked is None or self._asked[0] != model or self._asked[1] + NEED_AGAIN_S <= now:
            self._asked = (model, now)
            effects.append(NeedModel(model, sources))

    def _goal(
        self, picture: Picture, kept: Plan | None, model: ModelId | None, now: float
    ) -> Plan | Shortfall | None:
        """The plan to follow; what is lacking for one; or None while that cannot be told."""
        facts = None if model is None else self._models.get(model)
        candidates = () if model is None else picture.candidates(model)
        inputs: _Inputs = (model, facts is not None, candidates, picture.min_owners())
        self._calm.note(inputs, now)
        if kept is not None and len(kept.owners) >= picture.min_owners():
            return kept
        settles_at = self._settles_at(picture)
        if settles_at > now:
            self._decide_at = settles_at
            return kept
        if facts is None:
            return kept
        best = self._place(facts, inputs)
        self._calm.acted(now)
        # A held plan with fewer owners than asked for is given up only for one that has more.
        if kept is not None and (isinstance(best, Shortfall) or len(best.owners) <= len(kept.owners)):
            return kept
        return best

    def _settles_at(self, picture: Picture) -> float:
        alone = len(picture.adverts) == 1
        return max(self._calm.settles_at(), self._started_at + ALONE_SETTLE_S if alone else 0.0)

    def _place(self, facts: ModelFacts, inputs: _Inputs) -> Plan | Shortfall:
        if self._computed is None or self._computed[0] != inputs:
            self._computed = (inputs, place(facts, inputs[2], self._costs, inputs[3]))
        return self._computed[1]

    def _pursue(self, goal: Plan | Shortfall, now: float, effects: list[Effect]) -> None:
        """Hold the goal and nothing else: what was held before is given back first, so that no byte is
        promised twice."""
        standing = self.standing
        holding = standing is not None and standing.readiness is not Readiness.FAILED
        if holding and standing is not None and standing.plan == goal:
            return
        if holding:
            self._release(effects)
            self._stand(None)
        if isinstance(goal, Shortfall) or self.me not in goal.owners:
            return
        backoff = self._backoffs.get(goal.model)
        if backoff is not None and backoff.until > now:
            self._stand(Standing(goal, Readiness.FAILED, backoff.detail))
        else:
            self._stand(Standing(goal, Readiness.ACCEPTED))

    def _load_when_held(self, picture: Picture, effects: list[Effect]) -> None:
        """Nothing is fetched or loaded before all owners have accepted: a plan that is still argued about
        costs no work."""
        standing = self.standing
        if (
            standing is None
            or standing.readiness is not Readiness.ACCEPTED
            or not picture.held(standing.plan)
        ):
            return
        mine = assignment_of(standing.plan, self.me)
        if mine is not None:
            self._loaded = plan_id(standing.plan)
            self._stand(replace(standing, readiness=Readiness.LOADING))
            effects.append(Load(standing.plan, mine.span, mine.device, mine.pool_tokens))

    def _conclude(
        self, picture: Picture, goal: Plan | Shortfall | None, model: ModelId | None, effects: list[Effect]
    ) -> None:
        """Tell whether questions can be asked, when that or its reason has changed."""
        self.plan = goal if isinstance(goal, Plan) else None
        self.shortfall = goal if isinstance(goal, Shortfall) else None
        reason = self._reason(picture, model)
        self.usable = reason is None
        self.reason = reason or ""
        said: Plan | str | None = self.plan if reason is None else reason
        if said == self._said:
            return
        self._said = said
        effects.append(PlanUsable(said) if isinstance(said, Plan) else PlanUnusable(self.reason))

    def _reason(self, picture: Picture, model: ModelId | None) -> str | None:
        if model is None:
            return reasons.NO_MODEL
        if model not in self._models:
            return reasons.fetching(picture, model, picture.sources(model, self.me))
        if self.shortfall is not None:
            return reasons.lacking(picture, model, self.shortfall)
        if self.plan is None:
            return reasons.SETTLING
        return None if picture.ready(self.plan) else reasons.waiting(picture, self.plan)

    # ── the standing ────────────────────────────────────────────────────────────────────────────────────
    def _stand(self, standing: Standing | None) -> None:
        self.view.set_standing(standing)

    def _release(self, effects: list[Effect]) -> None:
        """Give back what was loaded, or is being loaded, for the standing's plan."""
        if self._loaded is not None:
            effects.append(Unload(self._loaded))
            self._loaded = None

    def _sitting_out(self) -> _Backoff | None:
        standing = self.standing
        if standing is None or standing.readiness is not Readiness.FAILED:
            return None
        return self._backoffs.get(standing.plan.model)
