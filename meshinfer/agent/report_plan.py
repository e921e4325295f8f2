"""What an agent tells about plans: who runs what, how far that is, and what it takes beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshinfer.agent.prediction import Prediction, predict
from meshinfer.agent.timing import RouteTimes
from meshinfer.mesh.hops import Hops
from meshinfer.mesh.plan import facts_of, plan_id, shard_of
from meshinfer.values import Advert, Assignment, ModelId, Plan, Readiness, Span, Standing

if TYPE_CHECKING:
    from meshinfer.agent.agent import Agent


def plan(agent: Agent) -> dict[str, Any]:
    """The plan that this PC asks under or waits for, and all of the mesh."""
    return _Plans(agent).as_json()


def fetching(agent: Agent) -> dict[str, Any]:
    """What is on its way to this PC's disk."""
    return {
        what: {"done_bytes": done, "total_bytes": total} for what, (done, total) in agent.progress.items()
    }


def layers_of(span: Span) -> str:
    """What the fetching of a span is called among an agent's `progress`."""
    return f"layers {span}"


class _Plans:
    """One look at an agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._mesh = agent.mesh
        self._facts = {facts.model: facts for facts in agent.library.facts()}
        self._usable = frozenset(agent.mesh.usable_plans())
        self._names = {
            holding.model: holding.name for advert in agent.mesh.view.present for holding in advert.holdings
        }

    def as_json(self) -> dict[str, Any]:
        current = self._mesh.plan
        return {
            **(self._none() if current is None else self._current(current)),
            "fetching": fetching(self._agent),
            "plans": [self._brief(each) for each in self._plans()],
        }

    def _plans(self) -> list[Plan]:
        """All that are held, and those that this PC stands by though others do not yet."""
        own = [standing.plan for standing in self._mesh.standings]
        return list(dict.fromkeys([*self._mesh.plans(), *own]))

    def _none(self) -> dict[str, Any]:
        shortfall = self._mesh.shortfall
        available = () if shortfall is None else shortfall.available
        name_of = self._agent.name_of
        return {
            "plan": None,
            "usable": False,
            "reason": self._mesh.reason,
            "needed_bytes": None if shortfall is None else shortfall.needed_bytes,
            "by_peer": [
                {"peer": peer, "name": name_of(peer), "available_bytes": size} for peer, size in available
            ],
        }

    def _current(self, current: Plan) -> dict[str, Any]:
        times = self._agent.metrics.routes.times(plan_id(current))
        prediction = self._prediction(current)
        taken = [self._taken(current, index, times) for index in range(len(current.assignments))]
        return {
            **self._plan(current),
            "reason": None if current in self._usable else self._mesh.reason,
            "layers": current.layers,
            "predicted_us": prediction.total_us,
            "measured_us": None if times is None else times.total_us,
            "measured_steps": 0 if times is None else times.steps,
            "head_us": self._head_us() or None,
            "hops": {
                "count": len(current.assignments) + 1,
                "predicted_us": sum(prediction.hops_us) // len(prediction.hops_us),
                "measured_us": None if times is None else times.hop_us,
            },
            "owners": [
                {
                    **self._holder(current, owner),
                    "predicted_us": prediction.owners_us[index],
                    **taken[index],
                    "standbys": [self._holder(current, one) for one in standbys_of(current, owner)],
                }
                for index, owner in enumerate(current.assignments)
            ],
        }

    def _brief(self, one: Plan) -> dict[str, Any]:
        return {
            **self._plan(one),
            "predicted_us": self._prediction(one).total_us,
            "owners": [self._stated(one, owner) for owner in one.assignments],
            "standbys": [self._stated(one, standby) for standby in one.standbys],
        }

    def _plan(self, one: Plan) -> dict[str, Any]:
        return {
            "plan": plan_id(one),
            "usable": one in self._usable,
            "model": one.model,
            "model_name": self._model_name(one.model),
            "round": one.round,
            "replaces": one.replaces,
            "planned_us": one.predicted_us,
            "planned_stage_us": one.stage_us,
        }

    def _prediction(self, one: Plan) -> Prediction:
        facts = self._facts.get(one.model)
        if facts is None:
            hops = Hops()
        else:
            named = [advert for peer in one.owners if (advert := self._mesh.view.get(peer)) is not None]
            hops = Hops.of((*named, self._mesh.own), facts.hidden)
        return predict(one, facts, self._agent.me, self._mesh.view.get, hops)

    def _stated(self, plan: Plan, one: Assignment) -> dict[str, Any]:
        """An owner or a standby, and how far it is with its layers."""
        standing = standing_of(self._mesh.view.get(one.peer), plan)
        return {
            "peer": one.peer,
            "name": self._agent.name_of(one.peer),
            "self": one.peer == self._agent.me,
            "span": {"first": one.span.first, "last": one.span.last},
            "readiness": readiness(standing, one.span),
            "detail": None if standing is None else standing.detail or None,
        }

    def _holder(self, plan: Plan, one: Assignment) -> dict[str, Any]:
        """The same, and what it is to have."""
        facts = facts_of(plan, one.peer)
        here = one.peer == self._agent.me
        return {
            **self._stated(plan, one),
            "device": one.device,
            "pool_tokens": one.pool_tokens,
            "precision": None if facts is None else facts.precision.value,
            "loaded_percent": percent(self._agent.progress, one.span) if here else None,
        }

    def _taken(self, current: Plan, index: int, times: RouteTimes | None) -> dict[str, Any]:
        """What an owner takes for one token: as answers asked here had it, or else, of this PC's own span, as anybody's
        had it."""
        if times is not None:
            compute_us, queue_us = times.compute_us[index], times.queue_us[index]
            return {"measured_us": compute_us, "queue_us": queue_us, "measured_by": "asker"}
        owner = current.assignments[index]
        loaded = self._agent.owner.loaded if owner.peer == self._agent.me else ()
        key = shard_of(current, owner)
        own_us = next((one.pace.step_us for one in loaded if one.key == key), None)
        return {
            "measured_us": own_us,
            "queue_us": None,
            "measured_by": None if own_us is None else "owner",
        }

    def _head_us(self) -> int:
        """What the asker here takes for a token besides the route: the output head and the ways to it and back."""
        return sum(self._agent.metrics.median_us(f"head.{part}") for part in ("wait", "run", "return"))

    def _model_name(self, model: ModelId) -> str:
        facts = self._facts.get(model)
        return facts.name if facts is not None else self._names.get(model, model[:12])


def standing_of(advert: Advert | None, plan: Plan) -> Standing | None:
    """How far the author is with that plan; None where it does not stand by it."""
    standings = () if advert is None else advert.standings
    return next((standing for standing in standings if standing.plan == plan), None)


def standbys_of(plan: Plan, owner: Assignment) -> Sequence[Assignment]:
    return [one for one in plan.standbys if owner.span.first <= one.span.first < owner.span.last]


def readiness(standing: Standing | None, span: Span) -> str | None:
    """Of one span: a peer may serve what it owns, and still load what it stands by with."""
    if standing is None:
        return None
    if span in standing.spans:
        return Readiness.READY.value
    # Its own span is ready, and it goes on with those that it stands by with.
    return (Readiness.LOADING if standing.readiness is Readiness.READY else standing.readiness).value


def percent(progress: Mapping[str, tuple[int, int]], span: Span) -> int | None:
    """Of the bytes that a span still lacked on this PC; None while none are being fetched."""
    done, total = progress.get(layers_of(span), (0, 0))
    return done * 100 // total if total else None
