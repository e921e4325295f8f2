"""A plan that does not hold together is never followed, whoever says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mesh_samples import COSTS, advert, model, peer_id

from meshinfer.mesh.placement import Candidate, place
from meshinfer.mesh.plan import assignment_of, covers, facts_of, flaw, plan_id, pool_limit
from meshinfer.values import Plan, Span


@pytest.fixture
def plan() -> Plan:
    plan = place(model(), [Candidate.of(advert(number, 40)) for number in (1, 2)], COSTS)
    assert isinstance(plan, Plan)
    assert len(plan.owners) == 2
    return plan


def test_a_computed_plan_is_sound(plan: Plan) -> None:
    assert flaw(plan) is None
    assert flaw(plan, model()) is None
    assert covers(plan, 6)
    assert not covers(plan, 7)


def test_the_id_is_that_of_the_content(plan: Plan) -> None:
    assert plan_id(plan) == plan_id(replace(plan))
    assert len(plan_id(plan)) == 64
    restarted = (replace(plan.inputs[0], incarnation=2), plan.inputs[1])
    assert plan_id(replace(plan, inputs=restarted)) != plan_id(plan)


def test_what_a_plan_says_of_a_peer(plan: Plan) -> None:
    assert assignment_of(plan, peer_id(1)) == plan.assignments[0]
    assert facts_of(plan, peer_id(2)) == plan.inputs[1]
    assert assignment_of(plan, peer_id(3)) is None
    assert facts_of(plan, peer_id(3)) is None


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
        "no owner": replace(plan, assignments=(), inputs=()),
        "inputs of others": replace(plan, inputs=(plan.inputs[1], plan.inputs[0])),
        "no inputs": replace(plan, inputs=()),
        "no KV room": replace(plan, assignments=(first, replace(second, pool_tokens=0))),
    }
    for name, one in broken.items():
        assert flaw(one) is not None, name


def test_a_plan_for_other_layers_or_another_model_is_not_sound(plan: Plan) -> None:
    assert flaw(plan, model(layers=7)) is not None
    assert flaw(plan, model("b")) is not None
