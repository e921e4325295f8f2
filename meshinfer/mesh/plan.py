"""What a plan is: its id, whether it is sound, and what it says of one peer."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

from meshinfer import limits
from meshinfer.values import Assignment, ModelFacts, OwnerFacts, PeerId, Plan, PlanId
from meshinfer.wire.advert import encode_plan


@lru_cache(maxsize=1024)
def plan_id(plan: Plan) -> PlanId:
    """SHA-256 over the plan's canonical bytes, in hex."""
    return PlanId(sha256(encode_plan(plan)).hexdigest())


def assignment_of(plan: Plan, peer: PeerId) -> Assignment | None:
    """What the plan gives to a peer; None for one that is no owner."""
    return next((assignment for assignment in plan.assignments if assignment.peer == peer), None)


def facts_of(plan: Plan, peer: PeerId) -> OwnerFacts | None:
    """What the plan was computed from, for one of its owners."""
    return next((facts for facts in plan.inputs if facts.peer == peer), None)


def pool_limit(plan: Plan) -> int:
    """Tokens that all sequences together may keep under this plan: each owner keeps all of them, so the least
    counts."""
    return min(assignment.pool_tokens for assignment in plan.assignments)


def covers(plan: Plan, layers: int) -> bool:
    """Whether the spans, in order, are exactly [0, layers) without gap or overlap."""
    reached = 0
    for assignment in plan.assignments:
        if assignment.span.first != reached:
            return False
        reached = assignment.span.last
    return reached == layers


@lru_cache(maxsize=1024)
def flaw(plan: Plan, facts: ModelFacts | None = None) -> str | None:
    """Why a plan that a peer holds cannot be used, as a clause; None for a sound one.

    Without the model's facts only the plan's own consistency is judged.
    """
    if not 1 <= len(plan.assignments) <= limits.ROUTE_HOPS:
        return f"it names {len(plan.assignments)} owners, and 1 to {limits.ROUTE_HOPS} are possible"
    if not covers(plan, plan.layers):
        return f"its spans are not the {plan.layers} layers in order"
    if len(set(plan.owners)) != len(plan.owners):
        return "it names an owner twice"
    if tuple(facts.peer for facts in plan.inputs) != plan.owners:
        return "its inputs are not those of its owners"
    if any(assignment.pool_tokens < 1 for assignment in plan.assignments):
        return "an owner has no room for keys and values"
    return None if facts is None else _misfit(plan, facts)


def _misfit(plan: Plan, facts: ModelFacts) -> str | None:
    if plan.model != facts.model:
        return "it is for another model"
    if plan.layers != facts.layers:
        return f"it has {plan.layers} layers, and the model has {facts.layers}"
    return None
