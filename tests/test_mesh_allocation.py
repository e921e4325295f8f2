"""All agents that know the same follow the same plans, and go on following them while those are being accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_samples import COSTS, advert, model, peer_id

from meshinfer.mesh.allocation import Allocation, Better, allocate
from meshinfer.mesh.cells import Cell, cell_of
from meshinfer.mesh.picture import Picture, Status
from meshinfer.mesh.plan import flaw, plan_id, same_but_round
from meshinfer.mesh.scene import Scene
from meshinfer.values import Advert, ModelFacts, PeerId, Plan, PlanId, Readiness, Standing

FACTS, OTHER = model(), model("b", layers=4)
A, B = FACTS.model, OTHER.model
MODELS = {A: FACTS, B: OTHER}


def able(number: int, capacity_mib: int = 40, **fields: Any) -> Advert:
    return advert(number, capacity_mib, partial=A, **fields)


def allocation(
    adverts: Iterable[Advert], facts: ModelFacts = FACTS, ripe: frozenset[PlanId] = frozenset()
) -> Allocation:
    picture = Picture(adverts)
    peers = tuple(picture.peers)
    return allocate(Scene(picture, Cell(), peers, 1, facts.model, MODELS, COSTS, ripe))


def standing_by(one: Advert, plan: Plan, readiness: Readiness = Readiness.READY) -> Advert:
    return replace(one, standings=(*one.standings, Standing(plan, readiness)))


def all_standing_by(adverts: Iterable[Advert], *plans: Plan) -> list[Advert]:
    said = list(adverts)
    for plan in plans:
        said = [standing_by(one, plan) if one.peer in plan.named else one for one in said]
    return said


def only(found: Allocation) -> Plan:
    assert len(found.targets) == 1, found
    return found.targets[0]


def without(adverts: Iterable[Advert], number: int) -> list[Advert]:
    return [one for one in adverts if one.peer != peer_id(number)]


# ── new plans ───────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_left_makes_replicas() -> None:
    found = allocation(able(number, 80) for number in range(4))
    assert sorted(plan.owners for plan in found.targets) == [(peer_id(number),) for number in range(4)]


def test_each_peer_is_in_one_plan_only() -> None:
    found = allocation(able(number, 30) for number in range(12))
    named = [peer for plan in found.targets for peer in plan.named]
    assert len(found.targets) >= 2
    assert len(named) == len(set(named))


def test_too_little_memory_is_told_with_the_figures() -> None:
    found = allocation([able(1, 20), able(2, 10)])
    assert found.targets == ()
    assert found.shortfall is not None
    assert found.shortfall.available == ((peer_id(1), 20 << 20), (peer_id(2), 10 << 20))


def test_who_lacks_the_manifest_failed_or_plans_by_other_rules_is_given_no_span() -> None:
    failed = standing_by(able(3, 80), only(allocation([able(3, 80)])), Readiness.FAILED)
    found = allocation([advert(1, 80), replace(able(2, 80), rules=2), failed])
    assert found.targets == ()


def test_no_route_joins_two_that_call_their_link_broken() -> None:
    assert allocation([able(1, broken=(2,)), able(2)]).targets == ()
    assert only(allocation([able(1, broken=(2,)), able(2), able(3)])).owners.count(peer_id(3)) == 1


# ── doubt ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_one_that_accepts_nothing_is_left_out_by_all() -> None:
    found = allocation([able(1, doubts=(3,)), able(2, doubts=(3,)), able(3)])
    assert set(only(found).named) == {peer_id(1), peer_id(2)}


def test_one_that_doubts_everybody_is_left_out_and_not_everybody() -> None:
    assert Picture([able(1), able(2), able(3, doubts=(1, 2))]).left_out() == {peer_id(3)}


def test_of_two_that_doubt_each_other_one_is_left_out() -> None:
    picture = Picture([able(1, doubts=(2,)), able(2, doubts=(1,)), able(3)])
    assert len(picture.left_out()) == 1


def test_doubts_of_the_absent_count_for_nothing() -> None:
    picture = Picture([able(1, doubts=(2,)), able(2)])
    picture.put(peer_id(1), None)
    assert picture.left_out() == frozenset()


# ── plans that are there ────────────────────────────────────────────────────────────────────────────────────
def test_a_held_plan_stays_whoever_comes() -> None:
    pair = [able(1), able(2)]
    plan = only(allocation(pair))
    found = allocation([*all_standing_by(pair, plan), able(3, 4000, decode_us=1), able(0, 35)])
    assert plan in found.targets


def test_two_held_plans_do_not_disturb_each_other() -> None:
    pairs = [[able(1), able(2)], [able(3), able(4)]]
    plans = [only(allocation(pair)) for pair in pairs]
    said = [one for pair, plan in zip(pairs, plans, strict=True) for one in all_standing_by(pair, plan)]
    assert set(allocation(said).targets) == set(plans)


def test_a_broken_plan_is_repaired_with_what_is_loaded() -> None:
    peers = [able(number, 30) for number in range(1, 5)]
    plan = only(allocation(peers[:3]))
    assert len(plan.owners) == 3
    said = all_standing_by(peers, plan)
    gone = plan.owners[1]
    repaired = only(allocation([one for one in said if one.peer != gone]))
    assert repaired.replaces == plan_id(plan)
    assert repaired.round > plan.round
    kept = set(plan.assignments) & set(repaired.assignments)
    assert {one.peer for one in kept} == set(plan.owners) - {gone}


def test_a_restarted_owner_does_not_hold_what_its_former_self_held() -> None:
    pair = [able(1), able(2)]
    plan = only(allocation(pair))
    said = all_standing_by(pair, plan)
    picture = Picture([said[0], replace(said[1], incarnation=2)])
    assert picture.status(plan_id(plan)) is Status.OVER


def test_a_plan_that_an_owner_has_passed_by_is_over() -> None:
    pair = [able(1), able(2)]
    plan = only(allocation(pair))
    said = [standing_by(pair[0], plan), replace(pair[1], round=plan.round)]
    assert Picture(said).passed_by(plan_id(plan))
    again = only(allocation(said))
    assert again.round > plan.round
    assert again.replaces == plan_id(plan)


def test_a_plan_that_does_not_hold_together_is_nobodys() -> None:
    plan = only(allocation([able(1, 80)]))
    broken = replace(plan, layers=5)
    assert flaw(broken) is not None
    assert Picture([standing_by(able(1, 80), broken)]).plans() == ()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_who_accepts_first_changes_nothing_for_the_others(data: st.DataObject) -> None:
    """Else each would chase what the others have just accepted, for ever."""
    count = data.draw(st.integers(2, 6))
    sizes = st.sampled_from((0, 12, 25, 30, 40, 80))
    peers = [
        able(number, data.draw(sizes), decode_us=data.draw(st.sampled_from((0, 100, 300))))
        for number in range(count)
    ]
    if data.draw(st.booleans()):  # a plan that has lost an owner
        before = all_standing_by(peers, *allocation(peers).targets)
        peers = without(before, data.draw(st.integers(0, count - 1)))
    targets = allocation(peers).targets
    order = data.draw(st.permutations([one.peer for one in peers]))
    said = {one.peer: one for one in peers}
    for peer in order:
        mine = [plan for plan in targets if peer in plan.named]
        said[peer] = _follow(said[peer], mine)
        now = allocation(said.values()).targets
        for plan in targets:
            assert plan in now, "a target changed while it was being accepted"


def _follow(one: Advert, targets: list[Plan]) -> Advert:
    """What an agent does: it stands by its targets, and drops the rest."""
    if not targets:
        return one
    ended = max([one.round, *(other.plan.round for other in one.standings if other.plan not in targets)])
    kept = tuple(other for other in one.standings if other.plan in targets)
    new = [plan for plan in targets if plan not in [other.plan for other in kept]]
    assert all(plan.round > max([ended, *(other.plan.round for other in kept)]) for plan in new)
    return replace(one, round=ended, standings=(*kept, *(Standing(plan, Readiness.ACCEPTED) for plan in new)))


# ── better plans ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_missing_standby_makes_a_plan_better_and_nothing_is_loaded_again() -> None:
    pair = [able(1), able(2)]
    plan = only(allocation(pair))
    said = [*all_standing_by(pair, plan), able(3)]
    found = allocation(said)
    assert found.better == ((plan_id(plan), Better.STANDBY),)
    assert found.targets == (plan,)
    ripe = allocation(said, ripe=frozenset([plan_id(plan)]))
    better = ripe.targets[-1]
    assert better.assignments == plan.assignments
    assert better.standbys
    assert better.round > plan.round


def test_an_improvement_that_somebody_has_begun_is_joined() -> None:
    pair = [able(1), able(2)]
    plan = only(allocation(pair))
    said = [*all_standing_by(pair, plan), able(3)]
    better = allocation(said, ripe=frozenset([plan_id(plan)])).targets[-1]
    begun = [standing_by(said[0], better, Readiness.ACCEPTED), *said[1:]]
    assert allocation(begun).targets[-1] == better


def test_a_faster_plan_takes_over_when_that_has_been_possible_for_long_enough() -> None:
    slow = [able(1, 40, decode_us=2000), able(2, 40, decode_us=2000)]
    plan = only(allocation(slow))
    said = [*all_standing_by(slow, plan), able(3, 40, decode_us=10)]
    found = allocation(said)
    assert found.better == ((plan_id(plan), Better.FASTER),)
    assert found.targets == (plan,)
    kept, faster = allocation(said, ripe=frozenset([plan_id(plan)])).targets
    assert kept == plan, "the old plan serves until the new one works"
    assert faster.predicted_us * 120 < plan.predicted_us * 100
    shared = {one.peer for one in set(faster.assignments) & set(plan.assignments)}
    assert set(faster.owners) - shared == {peer_id(3)}, "nobody has room for two spans"


def test_a_plan_with_fewer_owners_than_asked_for_gives_way_to_one_that_has_more() -> None:
    alone = able(1, 120, min_owners=2)
    plan = only(allocation([alone]))
    assert len(plan.owners) == 1
    found = allocation([*all_standing_by([alone], plan), able(2, 80)])
    assert plan in found.targets, "it goes on until the other one works"
    assert any(len(one.owners) == 2 for one in found.targets)


def test_two_that_planned_alone_come_together_where_a_split_is_asked_for() -> None:
    first, second = able(1, 120, min_owners=2), able(2, 120)
    plans = [only(allocation([first])), only(allocation([replace(second, min_owners=2)]))]
    said = [*all_standing_by([first], plans[0]), *all_standing_by([second], plans[1])]
    found = allocation(said)
    assert any(len(one.owners) == 2 for one in found.targets)


def test_a_weak_plan_that_works_stays_where_there_is_no_room_beside_it() -> None:
    alone = able(1, 80, min_owners=2)
    plan = only(allocation([alone]))
    loading = standing_by(alone, plan, Readiness.LOADING)
    (found,) = [one for one in allocation([loading, able(2, 80)]).targets if one != plan]
    assert len(found.owners) == 2, "it serves nobody yet, and may go"
    working, other = standing_by(alone, plan), able(2, 80)
    assert plan in allocation([working, other]).targets
    begun = standing_by(other, found, Readiness.ACCEPTED)
    after = allocation([working, begun]).targets
    assert plan in after
    assert found not in after, "nobody goes on with what the other cannot join"


def test_a_model_that_nobody_wants_gives_way_to_one_that_somebody_wants() -> None:
    one = advert(1, 80, whole=A, partial=B, wants=B)
    plan = only(allocation([able(1, 80)]))
    found = allocation(all_standing_by([one], plan), OTHER)
    assert any(target.model == B for target in found.targets)


# ── cells ───────────────────────────────────────────────────────────────────────────────────────────────────
def _spread(count: int) -> dict[PeerId, int]:
    return {PeerId(f"{number * (2**32 // count):08x}" + "0" * 24): 40 for number in range(count)}


def test_a_small_mesh_is_one_cell_and_a_large_one_many() -> None:
    assert {cell_of(peer, _spread(32), 60) for peer in _spread(32)} == {Cell()}
    cells = {peer: cell_of(peer, _spread(1000), 60) for peer in _spread(1000)}
    for peer, cell in cells.items():
        inside = [other for other in cells if other in cell]
        assert 12 <= len(inside) <= 32
        assert all(cells[other] == cell for other in inside), "all in a cell see the same cell"
        assert peer in cell


def test_a_part_without_enough_memory_is_not_cut_off() -> None:
    room = {peer: (40 if number < 500 else 1) for number, peer in enumerate(_spread(1000))}
    assert {cell_of(peer, room, 2000).bits for peer in room} == {0, 1, 2, 3} - {0} or cell_of(
        max(room), room, 2000
    ) == Cell()


def test_rounds_are_no_part_of_what_a_plan_says() -> None:
    plan = only(allocation([able(1, 80)]))
    later = only(allocation([able(1, 80, ended=7)]))
    assert later.round == 8
    assert same_but_round(plan, later)
