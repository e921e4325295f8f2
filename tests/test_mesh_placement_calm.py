"""What is loaded stays where it is, unless moving it is worth it; what is promised elsewhere is not promised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_samples import COSTS, model, peer_id
from placement_cases import Mesh, links, meshes, must_fit, peers, spans, standbys

from meshinfer.limits import MIB
from meshinfer.mesh.placement import SLACK_PERCENT, Candidate, Options, memory_bytes, place
from meshinfer.mesh.plan import owner_shard, plan_id, same_but_round, shards_of
from meshinfer.values import ModelFacts, Objective, PeerId, Plan, Precision, ShardKey, Span


def planned(
    candidates: Sequence[Candidate],
    options: Options = Options(),  # noqa: B008
    facts: ModelFacts = model(),  # noqa: B008
) -> Plan:
    plan = place(facts, candidates, COSTS, options)
    assert isinstance(plan, Plan)
    must_fit(plan, facts, candidates, options)
    return plan


def without(candidates: Sequence[Candidate], *numbers: int) -> list[Candidate]:
    return [one for one in candidates if int(one.peer, 16) not in numbers]


# ── after an owner died ─────────────────────────────────────────────────────────────────────────────────────
def test_the_standby_takes_over_and_the_others_stay() -> None:
    candidates = peers(40, 40, 40, 40)
    plan = planned(candidates)
    assert standbys(plan)[0] == (2, "0-2")
    again = planned(without(candidates, 0), Options(keep=plan, replaces=plan_id(plan)))
    assert spans(again) == [(2, "0-2"), (1, "3-5")]
    assert again.assignments[1] == plan.assignments[1]
    assert owner_shard(again, peer_id(2)) in shards_of(plan, peer_id(2)), "not even its pool changes"
    assert standbys(again) == [(3, "3-5")]


def test_standbys_that_shared_a_span_take_over_together() -> None:
    candidates = peers(80, 30, 30, 30)
    plan = planned(candidates)
    again = planned(without(candidates, 0), Options(keep=plan))
    assert spans(again) == standbys(plan)
    assert [one.pool_tokens for one in again.assignments] == [one.pool_tokens for one in plan.standbys]


def test_a_new_peer_takes_the_span_where_nobody_stands_by() -> None:
    candidates = peers(40, 40, 40)
    plan = planned(candidates[:2])
    assert plan.standbys == ()
    again = planned(candidates[1:], Options(keep=plan))
    assert spans(again) == [(2, "0-2"), (1, "3-5")]


def test_a_neighbour_takes_the_layers_too_where_nobody_is_free() -> None:
    candidates = peers(80, 80, 80)
    plan = planned(candidates, Options(min_owners=3))
    again = planned(without(candidates, 1), Options(min_owners=2, keep=plan))
    assert len(again.owners) == 2
    assert sum(one in plan.assignments for one in again.assignments) == 1, (
        "one of the two need not load anything"
    )


def test_a_restarted_peer_has_nothing_loaded() -> None:
    candidates = peers(40, 40)
    plan = planned(candidates)
    reborn = [replace(candidates[0], incarnation=2), candidates[1]]
    again = planned(reborn, Options(keep=plan))
    assert spans(again) == spans(plan), "its files are still there"
    assert again.inputs[0].incarnation == 2


def test_in_a_large_mesh_only_the_dead_peers_span_moves() -> None:
    random = Random(3)
    facts = replace(model(layers=40), layer_bytes=tuple(random.randint(20, 40) * MIB for _ in range(40)))
    candidates = peers(
        *[random.randint(120, 240) for _ in range(40)],
        decode_us=[random.randint(100, 200) for _ in range(40)],
    )
    for objective in Objective:
        options = Options(objective=objective)
        plan = planned(candidates, options, facts)
        dead = plan.owners[len(plan.owners) // 2]
        left = [one for one in candidates if one.peer != dead]
        again = planned(left, replace(options, keep=plan), facts)
        alive = [one for one in plan.assignments if one.peer != dead]
        if objective is Objective.LATENCY:
            assert [one for one in again.assignments if one in plan.assignments] == alive


# ── when something better would be possible ─────────────────────────────────────────────────────────────────
def test_a_slightly_better_plan_moves_nothing() -> None:
    plan = planned(peers(80, decode_us=(110,)))
    again = planned(peers(80, 80, decode_us=(110, 100)), Options(keep=plan))
    assert spans(again) == [(0, "0-5")]


def test_a_much_better_plan_moves() -> None:
    plan = planned(peers(80, decode_us=(1000,)))
    again = planned(peers(80, 80, decode_us=(1000, 100)), Options(keep=plan))
    assert spans(again) == [(1, "0-5")]


def test_bystanders_change_nothing() -> None:
    candidates = peers(40, 40, 40, 40, 40, 40, decode_us=(100,) * 6)
    plan = planned(candidates[:4])
    assert same_but_round(planned(candidates, Options(keep=plan)), plan)
    assert same_but_round(planned(candidates[:4], Options(keep=plan)), plan)


def test_a_broken_link_is_a_reason_to_move() -> None:
    candidates = peers(40, 40, 40)
    plan = planned(candidates)
    again = planned(candidates, Options(keep=plan, hops=links({}, broken=[(0, 1)])))
    assert sorted(spans(again)) != sorted(spans(plan))
    assert sum(one in (*plan.assignments, *plan.standbys) for one in again.assignments) == 2


def _moved(plan: Plan, before: Plan, facts: ModelFacts) -> int:
    """Bytes of shards that have to be loaded anew."""
    return sum(
        sum(facts.layer_bytes[one.span.first : one.span.last])
        for one in plan.assignments
        if owner_shard(plan, one.peer) not in shards_of(before, one.peer)
    )


@settings(max_examples=60, deadline=None)
@given(meshes(most_peers=5, most_layers=8), st.sampled_from(Objective), st.integers(0, 4))
def test_staying_never_costs_more_than_the_slack(mesh: Mesh, objective: Objective, gone: int) -> None:
    options = mesh.options(objective=objective)
    plan = place(mesh.facts, mesh.candidates, COSTS, options)
    left = [one for one in mesh.candidates if int(one.peer, 16) != gone]
    if not isinstance(plan, Plan):
        return
    best = place(mesh.facts, left, COSTS, options)
    sticky = replace(options, keep=plan)
    again = place(mesh.facts, left, COSTS, sticky)
    assert isinstance(best, Plan) == isinstance(again, Plan)
    if isinstance(best, Plan) and isinstance(again, Plan):
        must_fit(again, mesh.facts, left, sticky)
        assert _moved(again, plan, mesh.facts) <= _moved(best, plan, mesh.facts) * 2
        if objective is Objective.LATENCY:
            assert again.predicted_us * 100 <= best.predicted_us * (100 + SLACK_PERCENT) + 100
        else:
            assert again.stage_us * 100 <= best.stage_us * (100 + SLACK_PERCENT) + 100


# ── what is promised already ────────────────────────────────────────────────────────────────────────────────
def _promised(plan: Plan, facts: ModelFacts) -> Options:
    """Everything that a plan's peers hold must stay, as while a successor takes over."""
    kept = {peer: frozenset(shards_of(plan, peer)) for peer in plan.named}
    taken = {peer: memory_bytes(facts, COSTS, shards, Precision.AUTO) for peer, shards in kept.items()}
    return Options(keep=plan, kept=kept, taken_bytes=taken, replaces=plan_id(plan))


def test_a_successor_may_name_what_is_held_and_pays_nothing_for_it() -> None:
    candidates = peers(40, 40)
    plan = planned(candidates)
    options = _promised(plan, model())
    assert plan_id(planned(candidates, options)) != plan_id(plan)
    assert planned(candidates, options).assignments == plan.assignments


def test_a_standby_that_was_missing_is_added_beside_what_is_held() -> None:
    candidates = peers(40, 40, 40, 40)
    plan = planned(candidates[:2])
    assert plan.standbys == ()
    again = planned(candidates, _promised(plan, model()))
    assert again.assignments == plan.assignments
    assert standbys(again) == [(2, "0-2"), (3, "3-5")]


def test_a_peer_is_not_given_more_than_its_promises_leave() -> None:
    candidates = peers(40, 40, 40)
    plan = planned(candidates[:2])
    again = planned(candidates, replace(_promised(plan, model()), min_owners=3, keep=None))
    assert set(again.assignments) >= set(plan.assignments) or len(again.owners) == 2


def test_a_shard_with_too_little_room_for_keys_and_values_is_not_used() -> None:
    small = ShardKey(model().model, Span(0, 6), "CPU", 128)
    kept: dict[PeerId, frozenset[ShardKey]] = {peer_id(0): frozenset({small})}
    options = Options(kept=kept, taken_bytes={peer_id(0): 70 * MIB})
    assert spans(planned(peers(75, 80), options)) == [(1, "0-5")]
    held = {peer_id(0): frozenset({replace(small, pool_tokens=256)})}
    assert spans(planned(peers(75, 60), replace(options, kept=held))) == [(0, "0-5")]
