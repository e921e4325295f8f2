"""What people and programs are told of plans is what the plans were computed with, and what was measured."""

from __future__ import annotations

from dataclasses import replace

from mesh_samples import COSTS, advert, model, peer_id

from meshinfer.agent.prediction import predict
from meshinfer.agent.report import links_of, spans_of
from meshinfer.agent.report_plan import layers_of, percent, readiness, standbys_of, standing_of
from meshinfer.agent.timing import Routes, StepPassed
from meshinfer.mesh.hops import Hops
from meshinfer.mesh.placement import Candidate, Options, place
from meshinfer.values import Advert, Assignment, LinkFacts, PeerId, Plan, PlanId, Readiness, Span, Standing
from meshinfer.wire.messages import HopTrace


def placed(*speeds_us: int) -> Plan:
    """Three owners, each of whom has room for about a third."""
    peers = [advert(number, 40, decode_us=us) for number, us in enumerate(speeds_us)]
    plan = place(model(layers=9), map(Candidate.of, peers), COSTS, Options(min_owners=3))
    assert isinstance(plan, Plan)
    assert len(plan.assignments) == 3
    return plan


# ── predicted ───────────────────────────────────────────────────────────────────────────────────────────────


def known(*speeds_us: int) -> dict[PeerId, Advert]:
    return {peer_id(number): advert(number, decode_us=us) for number, us in enumerate(speeds_us)}


def test_without_news_the_prediction_is_the_plan_s_own() -> None:
    plan = placed(300, 100, 200)
    found = predict(plan, model(layers=9), peer_id(9), known(300, 100, 200).get, Hops())
    speeds = {peer_id(0): 300, peer_id(1): 100, peer_id(2): 200}
    assert list(found.owners_us) == [speeds[one.peer] * len(one.span) for one in plan.assignments]
    assert len(found.hops_us) == 4
    assert found.total_us == plan.predicted_us


def test_large_layers_take_longer() -> None:
    plan = placed(100, 100, 100)
    facts = model(layers=9)
    sizes = [2 * facts.layer_bytes[0]] * 3 + [facts.layer_bytes[0] // 2] * 6
    uneven = replace(facts, layer_bytes=tuple(sizes))
    found = predict(plan, uneven, peer_id(9), known(100, 100, 100).get, Hops()).owners_us
    assert list(found) == [
        100 * 9 * sum(sizes[one.span.first : one.span.last]) // sum(sizes) for one in plan.assignments
    ]
    unknown = predict(plan, None, peer_id(9), known(100, 100, 100).get, Hops()).owners_us
    assert list(unknown) == [100 * len(one.span) for one in plan.assignments], "its manifest is not here"


def test_a_first_plan_is_judged_by_what_was_measured_since() -> None:
    """Nobody had run a layer when it was made."""
    plan = placed(0, 0, 0)
    found = predict(plan, model(layers=9), peer_id(9), known(300, 300, 300).get, Hops())
    assert sum(filter(None, found.owners_us)) == 2700
    partly = predict(plan, model(layers=9), peer_id(9), known(300, 0, 300).get, Hops())
    assert partly.owners_us.count(None) == 1
    assert partly.total_us is None, "what was assumed is not called predicted"


def test_one_who_has_gone_is_judged_by_the_plan() -> None:
    plan = placed(300, 100, 200)
    found = predict(plan, model(layers=9), peer_id(9), lambda _: None, Hops())
    assert found.total_us == plan.predicted_us


def test_hops_are_the_asker_s_too() -> None:
    plan = placed(100, 100, 100)
    first, second, third = plan.owners
    us = {(peer_id(9), first): 1000, (first, second): 2000, (second, third): 3000, (third, peer_id(9)): 4000}
    broken = frozenset({(second, third)})
    found = predict(plan, model(layers=9), peer_id(9), known(100, 100, 100).get, Hops(us, broken))
    assert found.hops_us == (1000, 2000, 3000, 4000)


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
