"""What people and programs are told of plans is what the plans were computed with, and what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mesh_samples import COSTS, advert, model, peer_id

from meshinfer.agent.report import links_of, spans_of
from meshinfer.agent.report_plan import layers_of, percent, predicted, readiness, standbys_of, standing_of
from meshinfer.agent.timing import Routes, StepPassed
from meshinfer.mesh.placement import Candidate, Options, place
from meshinfer.values import Assignment, LinkFacts, Plan, PlanId, Readiness, Span, Standing
from meshinfer.wire.messages import HopTrace


def placed(*speeds_us: int) -> Plan:
    """Three owners, each of whom has room for about a third."""
    peers = [advert(number, 40, decode_us=us) for number, us in enumerate(speeds_us)]
    plan = place(model(layers=9), map(Candidate.of, peers), COSTS, Options(min_owners=3))
    assert isinstance(plan, Plan)
    assert len(plan.assignments) == 3
    return plan


# ── predicted ───────────────────────────────────────────────────────────────────────────────────────────────


def test_predicted_parts_add_up_to_the_whole() -> None:
    plan = placed(300, 100, 200)
    owners_us, hop_us = predicted(plan, model(layers=9))
    assert hop_us is not None
    known = {peer_id(0): 300, peer_id(1): 100, peer_id(2): 200}
    assert list(owners_us) == [known[one.peer] * len(one.span) for one in plan.assignments]
    assert sum(filter(None, owners_us)) + hop_us * 4 == pytest.approx(plan.predicted_us, abs=4)


def test_large_layers_take_longer() -> None:
    plan = placed(100, 100, 100)
    facts = model(layers=9)
    sizes = [2 * facts.layer_bytes[0]] * 3 + [facts.layer_bytes[0] // 2] * 6
    owners_us, _ = predicted(plan, replace(facts, layer_bytes=tuple(sizes)))
    assert list(owners_us) == [
        100 * 9 * sum(sizes[o.span.first : o.span.last]) // sum(sizes) for o in plan.assignments
    ]
    assert predicted(plan, None)[0] == [100 * len(one.span) for one in plan.assignments], (
        "its manifest is not here"
    )


def test_what_was_assumed_is_not_called_predicted() -> None:
    owners_us, hop_us = predicted(placed(300, 0, 200), model(layers=9))
    assert owners_us.count(None) == 1
    assert hop_us is None


# ── measured ────────────────────────────────────────────────────────────────────────────────────────────────

ROUTE, OTHER = PlanId("a" * 64), PlanId("b" * 64)


def passed(total_us: int, *compute_us: int) -> StepPassed:
    return StepPassed(total_us, tuple(HopTrace(10, us, 1) for us in compute_us))


def test_a_route_s_times_are_the_medians_of_its_tokens() -> None:
    routes = Routes()
    for disturbed in (0, 0, 100_000, 0, 0):
        routes.note(ROUTE, passed(10_000 + disturbed, 3000, 4000 + disturbed))
    routes.note(OTHER, passed(1, 1, 1, 1))
    times = routes.times(ROUTE)
    assert times is not None
    assert (times.steps, times.total_us, times.compute_us, times.queue_us) == (
        5,
        10_000,
        (3000, 4000),
        (10, 10),
    )
    assert times.hop_us == round((10_000 - 7020) / 3)
    assert routes.times(PlanId("c" * 64)) is None


def test_only_the_newest_routes_and_tokens_are_remembered() -> None:
    routes = Routes()
    for number in range(1000):
        routes.note(PlanId(f"{number:064x}"), passed(number, 1))
        routes.note(ROUTE, passed(number, 1))
    times = routes.times(ROUTE)
    assert times is not None
    assert times.steps < 300
    assert times.total_us > 800
    kept = [number for number in range(1000) if routes.times(PlanId(f"{number:064x}"))]
    assert 999 in kept
    assert len(kept) < 20


# ── how far it is ───────────────────────────────────────────────────────────────────────────────────────────


def test_each_span_of_a_peer_has_its_own_state() -> None:
    own, other = Span(0, 3), Span(3, 6)
    plan = placed(100, 100, 100)
    states = [
        (Standing(plan, Readiness.ACCEPTED), "accepted", "accepted"),
        (Standing(plan, Readiness.LOADING), "loading", "loading"),
        (Standing(plan, Readiness.READY, "", (own,)), "ready", "loading"),
        (Standing(plan, Readiness.READY, "", (own, other)), "ready", "ready"),
        (Standing(plan, Readiness.FAILED, "no room"), "failed", "failed"),
    ]
    for standing, owned, stood_by in states:
        assert (readiness(standing, own), readiness(standing, other)) == (owned, stood_by)
    assert readiness(None, own) is None


def test_only_a_standing_for_that_very_plan_counts() -> None:
    plan = placed(100, 100, 100)
    later = replace(plan, round=plan.round + 1)
    author = advert(1, standings=(Standing(plan, Readiness.READY), Standing(later, Readiness.LOADING)))
    found = standing_of(author, later)
    assert found is not None
    assert found.readiness is Readiness.LOADING
    assert standing_of(author, replace(plan, round=9)) is None
    assert standing_of(None, plan) is None


def test_what_is_fetched_is_told_in_percent() -> None:
    progress = {layers_of(Span(0, 3)): (30, 90), "asking": (1, 2), layers_of(Span(3, 6)): (0, 0)}
    assert percent(progress, Span(0, 3)) == 33
    assert percent(progress, Span(3, 6)) is None
    assert percent(progress, Span(0, 4)) is None


def test_standbys_stand_with_the_owner_whose_layers_they_hold() -> None:
    plan = placed(100, 100, 100)
    first, second, _ = plan.assignments
    half = Assignment(peer_id(7), Span(second.span.first, second.span.first + 1), "CPU", 64)
    rest = Assignment(peer_id(8), Span(second.span.first + 1, second.span.last), "CPU", 64)
    plan = replace(plan, standbys=(half, rest))
    assert standbys_of(plan, first) == []
    assert standbys_of(plan, second) == [half, rest]


# ── who is here ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_link_may_be_up_and_yet_not_be_used() -> None:
    own = replace(
        advert(0, broken=(2, 3)),
        links=(LinkFacts(peer_id(1), 420, 940_000), LinkFacts(peer_id(2), 0, 0)),
    )
    up = {"up": True, "broken": False, "round_trip_us": 420, "kbit_s": 940_000}
    unmeasured = {"round_trip_us": None, "kbit_s": None}
    assert links_of(own) == {
        peer_id(1): up,
        peer_id(2): {"up": True, "broken": True, **unmeasured},
        peer_id(3): {"up": False, "broken": True, **unmeasured},
    }


def test_a_peer_s_layers_are_listed_once_whatever_plans_name_them() -> None:
    plan = placed(100, 100, 100)
    mine = next(one for one in plan.assignments if one.peer == peer_id(1))
    other = next(one for one in plan.assignments if one.peer != peer_id(1))
    plan = replace(plan, standbys=(replace(other, peer=peer_id(1)),))
    later = replace(plan, round=5)
    author = advert(
        1, standings=(Standing(plan, Readiness.READY, "", (mine.span,)), Standing(later, Readiness.LOADING))
    )
    found = {(one["first"], one["last"]): (one["role"], one["ready"]) for one in spans_of(author)}
    assert found == {
        (mine.span.first, mine.span.last): ("owner", True),
        (other.span.first, other.span.last): ("standby", False),
    }
