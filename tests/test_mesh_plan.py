"""A plan that does not hold together is never followed, whoever says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mesh_samples import COSTS, model, peer_id
from placement_cases import peers

from meshinfer.mesh.placement import Options, place
from meshinfer.mesh.plan import (
    assignment_of,
    covers,
    facts_of,
    flaw,
    owner_shard,
    plan_id,
    pool_limit,
    same_but_round,
    shards_of,
    standby_shards,
)
from meshinfer.values import Assignment, Plan, PlanId, ShardKey, Span


@pytest.fixture
def plan() -> Plan:
    """Peers 0 and 1 own three layers each; 2 stands by for the first, 3 for the others."""
    plan = place(model(), peers(40, 40, 40, 40), COSTS)
    assert isinstance(plan, Plan)
    assert len(plan.owners) == 2
    assert plan.named == tuple(map(peer_id, range(4)))
    return plan


@pytest.fixture
def mutual() -> Plan:
    """Two owners that stand by for each other."""
    plan = place(model(), peers(80, 80), COSTS, Options(min_owners=2))
    assert isinstance(plan, Plan)
    assert len(plan.standbys) == len(plan.named) == 2
    return plan


def test_a_computed_plan_is_sound(plan: Plan, mutual: Plan) -> None:
    for one in (plan, mutual):
        assert flaw(one) is None
        assert flaw(one, model()) is None
        assert covers(one, 6)
        assert not covers(one, 7)


def test_the_id_is_that_of_the_content(plan: Plan) -> None:
    assert plan_id(plan) == plan_id(replace(plan))
    assert len(plan_id(plan)) == 64
    restarted = (replace(plan.inputs[0], incarnation=2), *plan.inputs[1:])
    others = [
        replace(plan, inputs=restarted),
        replace(plan, round=plan.round + 1),
        replace(plan, standbys=()),
        replace(plan, replaces=PlanId("0" * 64)),
    ]
    assert len({plan_id(one) for one in (plan, *others)}) == 5


def test_what_a_plan_says_of_a_peer(plan: Plan) -> None:
    assert assignment_of(plan, peer_id(0)) == plan.assignments[0]
    assert facts_of(plan, peer_id(2)) == plan.inputs[2]
    assert assignment_of(plan, peer_id(2)) is None, "a standby is no owner"
    assert facts_of(plan, peer_id(9)) is None


def test_the_shards_that_a_peer_holds_for_a_plan(plan: Plan, mutual: Plan) -> None:
    first = ShardKey(plan.model, Span(0, 3), "CPU", plan.assignments[0].pool_tokens)
    assert owner_shard(plan, peer_id(0)) == first
    assert shards_of(plan, peer_id(0)) == (first,)
    assert owner_shard(plan, peer_id(2)) is None
    assert standby_shards(plan, peer_id(2)) == shards_of(plan, peer_id(2))
    assert [shard.span for shard in standby_shards(plan, peer_id(2))] == [Span(0, 3)]
    assert [shard.span for shard in shards_of(mutual, peer_id(1))] == [Span(3, 6), Span(0, 3)], (
        "its own first"
    )
    assert shards_of(plan, peer_id(9)) == ()


def test_plans_that_differ_in_their_rounds_only_say_the_same(plan: Plan) -> None:
    assert same_but_round(plan, replace(plan, round=6))
    assert not same_but_round(plan, replace(plan, round=6, standbys=()))
    assert not same_but_round(plan, replace(plan, predicted_us=1))


def test_the_tightest_owner_bounds_what_may_be_asked(plan: Plan) -> None:
    first, second = plan.assignments
    assert pool_limit(replace(plan, assignments=(first, replace(second, pool_tokens=7)))) == 7


def test_flaws_are_found(plan: Plan) -> None:
    first, second = plan.assignments
    broken = {
        "a gap": replace(plan, assignments=(first, replace(second, span=Span(4, 6)))),
        "an overlap": replace(plan, assignments=(first, replace(second, span=Span(2, 6)))),
        "too short": replace(plan, assignments=(first, replace(second, span=Span(3, 5)))),
        "too long": replace(plan, assignments=(first, replace(second, span=Span(3, 7)))),
        "out of order": replace(plan, assignments=(second, first)),
        "an owner twice": replace(plan, assignments=(first, replace(second, peer=first.peer))),
        "no owner": replace(plan, assignments=(), standbys=(), inputs=()),
        "inputs out of order": replace(plan, inputs=tuple(reversed(plan.inputs))),
        "inputs of one more": replace(plan, standbys=plan.standbys[:1]),
        "no inputs": replace(plan, inputs=()),
        "no KV room": replace(plan, assignments=(first, replace(second, pool_tokens=0))),
        "no round": replace(plan, round=0),
    }
    for name, one in broken.items():
        assert flaw(one) is not None, name


def test_flaws_of_standbys_are_found(plan: Plan) -> None:
    one, other = plan.standbys
    half = replace(one, span=Span(0, 2))

    def with_standbys(*standbys: Assignment) -> Plan:
        named = {peer.peer for peer in (*plan.assignments, *standbys)}
        return replace(
            plan, standbys=standbys, inputs=tuple(facts for facts in plan.inputs if facts.peer in named)
        )

    for sound in ((), (one,), (other,), (half, replace(other, span=Span(2, 3)))):
        assert flaw(with_standbys(*sound)) is None
    broken = {
        "out of order": with_standbys(other, one),
        "a part only": with_standbys(half, other),
        "a gap": with_standbys(replace(one, span=Span(0, 1)), replace(other, span=Span(2, 3))),
        "across two owners": with_standbys(replace(one, span=Span(0, 4)), replace(other, span=Span(4, 6))),
        "the owner itself": with_standbys(replace(one, peer=peer_id(0))),
        "twice": with_standbys(one, one),
        "one peer in two pieces": with_standbys(half, replace(one, span=Span(2, 3))),
        "no KV room": with_standbys(replace(one, pool_tokens=0)),
        "beyond the model": with_standbys(one, replace(other, span=Span(6, 7))),
    }
    for name, plan_then in broken.items():
        assert flaw(plan_then) is not None, name


def test_a_plan_for_other_layers_or_another_model_is_not_sound(plan: Plan) -> None:
    assert flaw(plan, model(layers=7)) is not None
    assert flaw(plan, model("b")) is not None
