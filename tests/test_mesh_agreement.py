"""A few real machines in one room come to plans, and keep, repair, replace and drop them as people would expect."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from mesh_room import Room, Seat
from mesh_samples import advert, model, peer_id

from meshinfer import limits
from meshinfer.limits import MIB
from meshinfer.mesh.plan import plan_id, shards_of
from meshinfer.values import Advert, ModelId, Plan, Readiness

A, B = model().model, model("b", layers=4).model


def holder(number: int, capacity_mib: int = 40, **fields: Any) -> Advert:
    return advert(number, capacity_mib, whole=A, wants=A, **fields)


def settled(*portraits: Advert, most_s: float = 8.0) -> Room:
    room = Room()
    room.start(*portraits)
    room.run_until(room.settled, most_s)
    return room


def used(room: Room) -> Plan:
    """The plan under which all ask."""
    plans = {seat.usable for seat in room.living}
    assert len(plans) == 1, plans
    (plan,) = plans
    assert plan is not None
    return plan


def standing(seat: Seat) -> Plan:
    assert len(seat.mesh.standings) == 1, seat.mesh.standings
    return seat.mesh.standings[0].plan


# ── coming up ───────────────────────────────────────────────────────────────────────────────────────────────
def test_a_pc_alone_loads_the_model_and_can_be_asked() -> None:
    room = Room()
    (seat,) = room.start(holder(1, 80))
    room.run(limits.ALONE_SETTLE_S - 0.1)
    assert seat.loads == []
    room.run_until(room.settled, 1.0)
    assert used(room).owners == (peer_id(1),)


def test_five_that_come_up_at_once_agree_within_three_seconds() -> None:
    room = Room()
    room.start(holder(1, 25), *(advert(number, 25) for number in range(2, 6)))
    assert room.run_until(room.settled, 3.0) < 3.0
    assert len(used(room).owners) >= 3


def test_too_little_memory_is_told_with_the_figures() -> None:
    room = Room()
    (seat,) = room.start(holder(1, 20))
    room.run(3.0)
    assert not seat.mesh.usable
    assert "needs 68 MiB for layers and KV; pc1 has 20 MiB" in seat.mesh.reason
    assert seat.mesh.shortfall is not None
    assert seat.mesh.standings == ()


def test_no_model_anywhere_names_the_command_that_gets_one() -> None:
    room = Room()
    (seat,) = room.start(advert(1))
    room.run(3.0)
    assert "meshinfer pull" in seat.mesh.reason


def test_an_asker_without_memory_asks_too() -> None:
    room = settled(holder(1), advert(2), advert(3, 0))
    assert room.seats[peer_id(3)].usable == used(room)
    assert room.seats[peer_id(3)].mesh.standings == ()


def test_each_pc_that_has_room_for_the_whole_model_runs_it_whole_and_asks_itself() -> None:
    room = settled(*(holder(number, 80) for number in range(1, 4)))
    for seat in room.living:
        assert seat.usable == standing(seat)
        assert seat.usable.owners == (seat.peer,)


def test_askers_are_spread_over_the_plans_of_others() -> None:
    owners = [holder(number, 80) for number in range(1, 4)]
    room = settled(*owners)
    room.start(*(advert(number, 0) for number in range(10, 26)))
    room.run_until(room.settled, 5.0)
    asked = {seat.usable.owners for seat in room.living[3:] if seat.usable}
    assert len(asked) == 3


# ── calm ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_bystanders_that_come_and_go_change_nothing() -> None:
    room = settled(holder(1), advert(2), advert(3))
    plan = used(room)
    loads = [len(seat.loads) for seat in room.living]
    for number in range(10, 16):
        room.start(advert(number, 10))
        room.run(1.0)
        (room.kill if number % 2 else room.leave)(number)
        room.run(1.0)
    room.run(70.0)
    assert used(room) == plan
    assert [len(seat.loads) for seat in room.living] == loads


def test_a_missing_standby_is_found_without_an_interruption() -> None:
    room = settled(holder(1), advert(2))
    before = used(room)
    assert before.standbys == ()
    room.start(advert(3))
    room.run(limits.STANDBY_LASTS_S + 5.0)
    after = used(room)
    assert after.replaces == plan_id(before)
    assert after.assignments == before.assignments
    assert {one.peer for one in after.standbys} == {peer_id(3)}
    for seat in room.living[:2]:
        assert len(seat.loads) == 1, "what owners have loaded is shared by both plans"
        assert seat.interruptions == 0


def test_a_replaced_plan_is_served_for_a_while_and_then_let_go_of() -> None:
    room = settled(holder(1), advert(2))
    before = used(room)
    room.start(advert(3))
    room.run(limits.STANDBY_LASTS_S + 10.0)
    first = room.seats[peer_id(1)]
    assert set(first.serving) == {plan_id(before), plan_id(used(room))}
    room.run(limits.RETIRE_S)
    assert set(first.serving) == {plan_id(used(room))}
    assert standing(first) == used(room)


def test_a_faster_pc_takes_over_only_when_it_has_stayed() -> None:
    slow = [replace(holder(1), decode_us=3000), replace(advert(2), decode_us=3000)]
    room = settled(*slow)
    before = used(room)
    room.start(advert(3, 40, decode_us=100))
    room.run(limits.FASTER_LASTS_S - 5.0)
    assert peer_id(3) not in used(room).owners
    room.run(25.0)
    assert peer_id(3) in used(room).owners
    assert used(room).predicted_us < before.predicted_us
    assert [seat.interruptions for seat in room.living] == [0, 0, 0]


# ── death and return ────────────────────────────────────────────────────────────────────────────────────────
def test_when_an_owner_dies_the_rest_have_a_new_plan_within_three_seconds() -> None:
    room = settled(holder(1, 30), *(advert(number, 30) for number in range(2, 5)))
    before = used(room)
    dead = before.owners[1]
    room.kill(int(dead, 16))
    assert room.run_until(lambda: all(seat.usable != before for seat in room.living), 2.0) < 1.5
    began = room.now
    room.run_until(room.settled, 3.0)
    assert room.now - began < 2.0
    after = used(room)
    assert after.replaces == plan_id(before)
    assert dead not in after.named


def test_the_last_holder_of_some_layers_goes_and_service_resumes_when_it_returns() -> None:
    room = settled(holder(1), advert(2))
    room.kill(2)
    room.run(10.0)
    (seat,) = room.living
    assert not seat.mesh.usable
    assert "at least 1 more PC" in seat.mesh.reason
    assert seat.shards == {}, "memory for nothing is given back"
    room.restart(2)
    room.run_until(room.settled, 5.0)
    assert used(room).owners == (peer_id(1), peer_id(2)) or used(room).owners == (peer_id(2), peer_id(1))


def test_an_owner_that_is_back_in_a_moment_goes_on_without_a_load() -> None:
    room = settled(holder(1), advert(2))
    plan = used(room)
    room.split({1}, {2})
    room.run(2.0)
    assert all(seat.usable is None for seat in room.living)
    room.heal()
    room.run_until(room.settled, 3.0)
    assert used(room) == plan
    assert all(len(seat.loads) == 1 for seat in room.living)


def test_two_pcs_one_leaves_and_the_other_goes_on_alone() -> None:
    room = settled(holder(1, 80, min_owners=2), holder(2, 80, min_owners=2))
    assert len(used(room).owners) == 2
    room.leave(2)
    room.run_until(room.settled, 3.0)
    assert used(room).owners == (peer_id(1),)


def test_both_islands_serve_where_they_can_and_memory_is_promised_once_when_they_heal() -> None:
    room = settled(holder(1, 30), *(advert(number, 30) for number in range(2, 7)))
    room.split({1, 2, 3}, {4, 5, 6})
    room.run(6.0)
    room.run_until(room.settled, 6.0)
    plans = {seat.usable for seat in room.living}
    assert len(plans) == 2
    room.heal()
    room.run(15.0)
    room.run_until(room.settled, 5.0)
    assert {seat.usable for seat in room.living} <= plans | _replacements(room, plans)


def _replacements(room: Room, plans: set[Plan | None]) -> set[Plan]:
    """Successors that gained a standby of the other island."""
    ids = {plan_id(plan) for plan in plans if plan is not None}
    return {one.plan for seat in room.living for one in seat.mesh.standings if one.plan.replaces in ids}


def test_a_link_that_fails_between_two_owners_does_not_remove_either() -> None:
    room = settled(holder(1, 30), *(advert(number, 30) for number in range(2, 5)))
    before = used(room)
    one, other = (int(peer, 16) for peer in before.owners[:2])
    room.split({one}, {other})
    room.run(10.0)
    room.run_until(room.settled, 5.0)
    after = used(room)
    assert len(room.living[0].mesh.view.present) == 4
    pairs = set(pairwise(after.owners))
    assert not pairs & {(peer_id(one), peer_id(other)), (peer_id(other), peer_id(one))}


# ── what goes wrong on a PC ─────────────────────────────────────────────────────────────────────────────────
def test_who_cannot_load_says_so_and_is_left_out_until_it_has_sat_that_out() -> None:
    room = Room()
    first, second, third = room.start(holder(1), advert(2), advert(3))
    second.fails = True
    room.run_until(lambda: any(one.readiness is Readiness.FAILED for one in second.mesh.standings), 5.0)
    room.run_until(room.settled, 5.0)
    assert set(used(room).owners) == {first.peer, third.peer}
    assert second.mesh.standings[0].detail == "the disk is full"
    second.fails = False
    room.run(limits.BACKOFF_S + limits.STANDBY_LASTS_S + 5.0)
    assert {one.peer for one in used(room).standbys} == {second.peer}, "it may try again"


def test_a_failure_is_told_and_each_pause_is_longer() -> None:
    room = Room()
    (seat,) = room.start(holder(1, 80))
    seat.fails = True
    times = []
    for _ in range(4):
        room.run_until(lambda: [one.readiness for one in seat.mesh.standings] == [Readiness.FAILED], 300.0)
        times.append(room.now)
        room.run_until(lambda: "pc1 could not load its layers: the disk is full" in seat.mesh.reason, 3.0)
        room.run_until(lambda: not seat.mesh.standings, 300.0)
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[0] >= limits.BACKOFF_S
    assert all(after > 1.5 * before for before, after in pairwise(pauses))


def test_more_memory_is_reason_enough_to_try_again_at_once() -> None:
    room = Room()
    (seat,) = room.start(holder(1, 80))
    seat.fails = True
    room.run(4.0)
    seat.fails = False
    seat.change(capacity_bytes=100 * MIB)
    room.run_until(room.settled, 3.0)


def test_a_pc_that_gives_less_memory_than_it_promised_takes_the_promise_back() -> None:
    room = settled(holder(1), advert(2), advert(3))
    lessened = room.seats[used(room).owners[0]]
    lessened.change(capacity_bytes=10 * MIB)
    assert lessened.serving == {}
    assert lessened.shards == {}
    room.run_until(room.settled, 5.0)
    assert lessened.peer not in used(room).owners


def test_one_that_accepts_nothing_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is here and heard, but its machine never decides on plans."""
    room = Room()
    seats = room.start(holder(1), advert(2, 60), advert(3))
    monkeypatch.setattr(seats[1].mesh._agreement, "acceptable", lambda allocation: [])
    room.run_until(lambda: seats[0].usable is not None and seats[2].usable is not None, 15.0)
    assert set(used(room).owners) == {peer_id(1), peer_id(3)}


def test_of_two_pcs_that_do_not_get_on_one_goes_on_alone_and_serves_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room()
    seats = room.start(holder(1, 80, min_owners=2), holder(2, 80, min_owners=2))
    alone = (peer_id(2),)
    monkeypatch.setattr(
        seats[1].mesh._agreement,
        "acceptable",
        lambda allocation: [plan for plan in allocation.targets if plan.owners == alone],
    )
    room.run_until(lambda: all(seat.usable is not None for seat in seats), 15.0)
    assert used(room).owners == (peer_id(1),)


def test_a_restarted_agent_is_part_of_the_next_plan() -> None:
    room = settled(holder(1), advert(2), advert(3))
    for _ in range(5):
        number = int(used(room).owners[0], 16)
        if number == 1:
            number = int(used(room).owners[1], 16)
        room.kill(number)
        room.restart(number)
        room.run(1.0)
        room.run_until(room.settled, 8.0)


# ── which model ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("wants", "chosen"), [((A, A, B), A), ((A, B, B), B), ((B, A, None), A), ((None,) * 3, A)]
)
def test_the_model_that_most_peers_want_is_served(wants: tuple[ModelId | None, ...], chosen: ModelId) -> None:
    room = Room()
    for number, want in enumerate(wants, 1):
        one = advert(number, 80, whole=A, partial=B, wants=want)
        room.start(replace(one, holdings=tuple(replace(holding, complete=True) for holding in one.holdings)))
    room.run_until(room.settled, 5.0)
    assert {seat.usable.model for seat in room.living if seat.usable} == {chosen}
    assert {seat.mesh.model for seat in room.living} == {chosen}


def test_a_plan_in_use_is_kept_while_anybody_wants_its_model() -> None:
    room = settled(holder(1, 80), holder(2, 80))
    room.start(*(advert(number, 80, whole=B, wants=B) for number in (3, 4, 5)))
    room.run(10.0)
    plan = room.seats[peer_id(1)].usable
    assert plan is not None
    assert plan.model == A
    for seat in room.living[:2]:
        seat.change(wants=B)
    room.run(15.0)
    assert {seat.usable.model for seat in room.living if seat.usable} == {B}


def test_the_model_outlives_the_pc_that_brought_it() -> None:
    room = settled(holder(1), advert(2), advert(3))
    plan = used(room)
    room.seats[peer_id(1)].change(wants=None)
    room.run(5.0)
    assert used(room) == plan


def test_where_a_split_is_asked_for_those_that_planned_alone_come_together() -> None:
    room = Room()
    room.start(holder(1, 200, min_owners=2))
    room.run(4.0)
    assert used(room).owners == (peer_id(1),)
    room.start(advert(2, 80))
    room.run(5.0)
    assert set(used(room).owners) == {peer_id(1), peer_id(2)}
    assert [seat.interruptions for seat in room.living] == [0, 0]


def test_what_is_loaded_for_a_plan_is_all_that_is_loaded() -> None:
    room = settled(holder(1, 30), *(advert(number, 30) for number in range(2, 6)))
    room.kill(int(used(room).owners[0], 16))
    room.run(10.0)
    room.run_until(room.settled, 10.0)
    for seat in room.living:
        promised = {shard for one in seat.mesh.standings for shard in shards_of(one.plan, seat.peer)}
        assert set(seat.shards) == promised


def test_a_plan_of_too_few_is_followed_at_once_to_one_of_more_that_are_still_too_few() -> None:
    room = settled(holder(1, 200, min_owners=9), advert(2, 200))
    before = used(room)
    room.start(advert(3, 200))
    room.run(8.0)
    assert len(used(room).owners) == 3
    assert used(room).replaces == plan_id(before), "and not only when its owners let go of the earlier one"
    assert [seat.interruptions for seat in room.living] == [0, 0, 0]


def test_a_failed_load_is_tried_again_when_somebody_comes_who_has_the_model() -> None:
    room = Room()
    first, second = room.start(holder(1, 30), advert(2, 60))
    second.fails = True
    room.run_until(lambda: any(one.readiness is Readiness.FAILED for one in second.mesh.standings), 10.0)
    room.kill(1)
    second.fails = False
    room.run(1.0)
    begun = room.now
    room.start(holder(3, 30))
    room.run_until(
        lambda: second.usable is not None and second.peer in second.usable.owners, limits.BACKOFF_S / 2
    )
    assert room.now - begun < limits.BACKOFF_S / 2
    assert not first.alive
