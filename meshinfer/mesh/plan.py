"""What a plan is: its id, whether it is sound, and what it says of one peer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256

from meshinfer import limits
from meshinfer.values import Assignment, ModelFacts, OwnerFacts, PeerId, Plan, PlanId, ShardKey, Span
from meshinfer.wire.plan import encode_plan

KNOWN_PLANS = 4096
"""Plans whose id and soundness are remembered: four for each of 1,000 agents that one process simulates."""


@lru_cache(maxsize=KNOWN_PLANS)
def plan_id(plan: Plan) -> PlanId:
    """SHA-256 over the plan's canonical bytes, in hex."""
    return PlanId(sha256(encode_plan(plan)).hexdigest())


def assignment_of(plan: Plan, peer: PeerId) -> Assignment | None:
    """What the plan gives to a peer as an owner; None for one that is none."""
    return next((assignment for assignment in plan.assignments if assignment.peer == peer), None)


def facts_of(plan: Plan, peer: PeerId) -> OwnerFacts | None:
    """What the plan was computed from, for a peer that it names."""
    return next((facts for facts in plan.inputs if facts.peer == peer), None)


def shard_of(plan: Plan, assignment: Assignment) -> ShardKey:
    return ShardKey(plan.model, assignment.span, assignment.device, assignment.pool_tokens)


def owner_shard(plan: Plan, peer: PeerId) -> ShardKey | None:
    """What a peer runs under the plan; None for one that is no owner."""
    mine = assignment_of(plan, peer)
    return None if mine is None else shard_of(plan, mine)


def standby_shards(plan: Plan, peer: PeerId) -> tuple[ShardKey, ...]:
    """What a peer stands by with, in order of layers."""
    return tuple(shard_of(plan, one) for one in plan.standbys if one.peer == peer)


def shards_of(plan: Plan, peer: PeerId) -> tuple[ShardKey, ...]:
    """All that a peer holds for the plan, each once: the owner's shard first."""
    mine = owner_shard(plan, peer)
    return tuple(dict.fromkeys((*((mine,) if mine else ()), *standby_shards(plan, peer))))


def same_but_round(one: Plan, other: Plan) -> bool:
    """Whether two plans say the same, whichever rounds they came from."""
    return one.assignments == other.assignments and replace(one, round=other.round) == other


def pool_limit(plan: Plan) -> int:
    """Tokens that all sequences together may keep under this plan: each owner keeps all of them, so the least
    counts."""
    return min(assignment.pool_tokens for assignment in plan.assignments)


def covers(plan: Plan, layers: int) -> bool:
    """Whether the owners' spans, in order, are exactly [0, layers) without gap or overlap."""
    return bool(plan.assignments) and _tile((one.span for one in plan.assignments), Span(0, layers))


def _tile(spans: Iterable[Span], whole: Span) -> bool:
    """Whether the spans, in order, are exactly the whole."""
    reached = whole.first
    for span in spans:
        if span.first != reached:
            return False
        reached = span.last
    return reached == whole.last


@lru_cache(maxsize=KNOWN_PLANS)
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
    if any(one.pool_tokens < 1 for one in (*plan.assignments, *plan.standbys)):
        return "an owner or a standby has no room for keys and values"
    return _flaw_of_inputs(plan) or _flaw_of_standbys(plan) or _misfit(plan, facts)


def _flaw_of_inputs(plan: Plan) -> str | None:
    named = {one.peer for one in (*plan.assignments, *plan.standbys)}
    if plan.named != tuple(sorted(named)):
        return "its inputs are not those of the peers that it names, in order"
    if plan.round < 1:
        return "it is of no round"
    return None


def _flaw_of_standbys(plan: Plan) -> str | None:
    left: Sequence[Assignment] = plan.standbys
    for owner in plan.assignments:
        mine = [one for one in left if owner.span.first <= one.span.first < owner.span.last]
        left = left[len(mine) :]
        if not mine:
            continue
        if not _tile((one.span for one in mine), owner.span):
            return f"its standbys for layers {owner.span} do not cover them in order"
        if len(mine) > limits.STANDBYS_PER_SPAN:
            return f"it names {len(mine)} standbys for one span, and {limits.STANDBYS_PER_SPAN} are possible"
        if len({owner.peer, *(one.peer for one in mine)}) <= len(mine):
            return f"layers {owner.span} have a standby that is their owner, or one twice"
    return "its standbys are not in order of layers" if left else None


def _misfit(plan: Plan, facts: ModelFacts | None) -> str | None:
    if facts is None:
        return None
    if plan.model != facts.model:
        return "it is for another model"
    if plan.layers != facts.layers:
        return f"it has {plan.layers} layers, and the model has {facts.layers}"
    return None
