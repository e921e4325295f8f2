"""One agent follows the right plan: told step by step, with the peers played by the test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mesh_simulator import COSTS, advert, model, peer_id

from meshinfer import limits
from meshinfer.limits import MIB
from meshinfer.mesh.events import (
    AdvertHeard,
    Effect,
    Load,
    LoadDone,
    LoadFailed,
    ModelKnown,
    NeedModel,
    PeerLeft,
    PlanUnusable,
    PlanUsable,
    Publish,
    SelfChanged,
    Tick,
    Unload,
)
from meshinfer.mesh.ownership import (
    ALONE_SETTLE_S,
    BACKOFF_MOST_S,
    BACKOFF_S,
    SETTLE_MOST_S,
    SETTLE_S,
    Ownership,
)
from meshinfer.mesh.placement import Candidate, Shortfall, place
from meshinfer.mesh.plan import plan_id
from meshinfer.values import Advert, Plan, Readiness, Span, Standing

FACTS = model()
A, B = FACTS.model, model("b").model


def holder(number: int, capacity_mib: int = 40, **fields: object) -> Advert:
    return advert(number, capacity_mib, whole=A, wants=A, **fields)  # type: ignore[arg-type]


def plan_of(*adverts: Advert, min_owners: int = 1) -> Plan:
    plan = place(FACTS, [Candidate.of(one) for one in adverts], COSTS, min_owners)
    assert isinstance(plan, Plan)
    return plan


def said(
    one: Advert, plan: Plan | None, readiness: Readiness = Readiness.READY, version: int = 2
) -> AdvertHeard:
    standing = None if plan is None else Standing(plan, readiness)
    return AdvertHeard(replace(one, standing=standing, version=version))


def started(own: Advert, *others: Advert, now: float = 0.0) -> Ownership:
    machine = Ownership(own, COSTS, now)
    machine.handle(ModelKnown(FACTS), now)
    for other in others:
        machine.handle(AdvertHeard(other), now)
    return machine


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


# ── alone ───────────────────────────────────────────────────────────────────────────────────────────────
def test_a_pc_alone_loads_the_model_and_can_be_asked() -> None:
    own = holder(1, 80)
    machine = started(own)
    assert machine.next_deadline() == ALONE_SETTLE_S
    effects = machine.handle(Tick(), ALONE_SETTLE_S)
    plan = plan_of(own)
    load = Load(plan, plan.assignments[0].span, "CPU", plan.assignments[0].pool_tokens)
    assert load in effects
    assert effects[-1] == Publish(Standing(plan, Readiness.LOADING))
    assert not machine.usable
    done = machine.handle(LoadDone(plan_id(plan)), 3.0)
    assert done == [PlanUsable(plan), Publish(Standing(plan, Readiness.READY))]
    assert machine.usable
    assert machine.next_deadline() is None


def test_too_little_memory_is_told_with_the_figures() -> None:
    machine = started(holder(1, 20))
    effects = machine.handle(Tick(), ALONE_SETTLE_S)
    assert effects == [PlanUnusable(machine.reason)]
    assert "needs 68 MiB for layers and KV; pc1 has 20 MiB" in machine.reason
    assert isinstance(machine.shortfall, Shortfall)


def test_no_model_anywhere_names_the_command_that_gets_one() -> None:
    machine = Ownership(advert(1), COSTS, 0.0)
    machine.handle(Tick(), 0.0)
    assert "meshinfer pull" in machine.reason


# ── together ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_plan_is_accepted_then_loaded_then_used_each_only_when_all_owners_are_that_far() -> None:
    own, other = holder(1), advert(2, partial=A)
    machine = started(own, other)
    plan = plan_of(own, other)
    assert machine.handle(Tick(), SETTLE_S)[-1] == Publish(Standing(plan, Readiness.ACCEPTED))
    effects = machine.handle(said(other, plan, Readiness.ACCEPTED, 2), 1.1)
    assert Load in kinds(effects)
    machine.handle(LoadDone(plan_id(plan)), 1.5)
    assert not machine.usable
    assert "pc2 (layers 3-5) has accepted" in machine.reason
    assert PlanUsable(plan) in machine.handle(said(other, plan, Readiness.READY, 3), 1.6)


def test_an_asker_without_memory_follows_the_plan_too() -> None:
    first, second = holder(1), advert(2, partial=A)
    plan = plan_of(first, second)
    machine = started(advert(3, 0), first, second)
    machine.handle(said(first, plan), 0.5)
    assert PlanUsable(plan) in machine.handle(said(second, plan), 0.5)
    assert machine.standing is None


def test_who_lacks_the_manifest_is_told_where_it_is_and_asks_again() -> None:
    machine = Ownership(advert(3), COSTS, 0.0)
    machine.handle(AdvertHeard(advert(1, partial=A)), 0.0)
    effects = machine.handle(AdvertHeard(holder(2)), 0.0)
    assert effects[0] == PlanUnusable(machine.reason)
    later = machine.handle(Tick(), 2.0)
    assert NeedModel(A, (peer_id(2), peer_id(1))) in later, "complete holders first"
    assert "fetching the description of m from pc2, pc1" in machine.reason
    machine.handle(ModelKnown(FACTS), 2.1)
    assert machine.handle(Tick(), 9.0) is not None
    assert NeedModel not in kinds(machine.handle(Tick(), 20.0))


def test_a_peer_that_lacks_the_manifest_is_given_no_span() -> None:
    machine = started(holder(1), advert(2, 80))
    machine.handle(Tick(), SETTLE_S)
    assert isinstance(machine.shortfall, Shortfall)
    assert "waiting for pc2 to fetch the model's description" in machine.reason


# ── calm ────────────────────────────────────────────────────────────────────────────────────────────────
def ready_pair() -> tuple[Ownership, Advert, Plan]:
    own, other = holder(1), advert(2, partial=A)
    machine, plan = started(own, other), plan_of(own, other)
    machine.handle(Tick(), 1.0)
    machine.handle(said(other, plan, Readiness.ACCEPTED, 2), 1.1)
    machine.handle(LoadDone(plan_id(plan)), 1.2)
    machine.handle(said(other, plan, Readiness.READY, 3), 1.3)
    assert machine.usable
    return machine, other, plan


def test_a_bystander_changes_nothing_however_strong() -> None:
    machine, _, plan = ready_pair()
    assert machine.handle(AdvertHeard(advert(3, 4000, partial=A, decode_us=1)), 2.0) == []
    assert machine.handle(Tick(), 4.0) == []
    assert machine.handle(PeerLeft(peer_id(3)), 4.1) == []
    assert machine.plan == plan


def test_a_heartbeat_that_says_nothing_new_costs_nothing() -> None:
    machine, other, plan = ready_pair()
    assert machine.handle(said(other, plan, Readiness.READY, 3), 2.0) == []


def test_ten_changes_in_a_row_are_waited_out_but_not_for_ever() -> None:
    machine = started(holder(1, 80))
    now = 0.0
    for number in range(2, 30):
        now += 0.5
        machine.handle(AdvertHeard(advert(number, 5, partial=A)), now)
        for peer in range(2, number):
            machine.handle(AdvertHeard(advert(peer, 5, partial=A)), now)
        if machine.standing is not None:
            break
    assert SETTLE_MOST_S <= now <= SETTLE_MOST_S + 1.0


# ── going and coming ────────────────────────────────────────────────────────────────────────────────────
def test_an_owner_that_leaves_ends_use_at_once_and_the_rest_plan_again() -> None:
    machine, other, plan = ready_pair()
    third = advert(3, 60, partial=A)
    machine.handle(AdvertHeard(third), 2.0)
    effects = machine.handle(PeerLeft(other.peer), 3.0)
    assert kinds(effects) == [PlanUnusable]
    assert machine.standing == Standing(plan, Readiness.READY), "it may be back in a moment"
    effects = machine.handle(Tick(), 3.0 + SETTLE_S)
    assert effects[0] == Unload(plan_id(plan))
    assert machine.standing == Standing(plan_of(holder(1), third), Readiness.ACCEPTED)


def test_an_owner_that_is_back_in_a_moment_is_used_on() -> None:
    machine, other, plan = ready_pair()
    machine.handle(Tick(), 1.3 + limits.SILENCE_S)
    assert not machine.usable
    assert machine.handle(said(other, plan, Readiness.READY, 3), 6.5)[0] == PlanUsable(plan)


def test_a_restarted_owner_does_not_hold_what_its_former_self_held() -> None:
    machine, other, plan = ready_pair()
    reborn = replace(other, incarnation=2, version=1, standing=Standing(plan, Readiness.READY))
    assert PlanUnusable in kinds(machine.handle(AdvertHeard(reborn), 2.0))
    machine.handle(Tick(), 3.0)
    assert machine.plan is not None
    assert machine.plan.inputs[1].incarnation == 2


def test_of_two_islands_the_faster_plan_is_kept_and_memory_promised_once() -> None:
    machine, _, plan = ready_pair()
    fast = [advert(3, 40, partial=A, decode_us=10), advert(4, 40, partial=A, decode_us=10)]
    better = plan_of(*fast)
    assert machine.handle(said(fast[0], better), 2.0) == []
    effects = machine.handle(said(fast[1], better), 2.0)
    assert effects == [Unload(plan_id(plan)), PlanUsable(better), Publish(None)]


def test_a_plan_that_does_not_hold_together_is_not_followed() -> None:
    other = advert(2, 80, partial=A)
    plan = plan_of(other)
    machine = started(advert(3, 0), holder(1, 0), other)
    machine.handle(said(other, replace(plan, layers=5)), 0.1)
    assert not machine.usable
    short = replace(plan.assignments[0], span=Span(0, 5))
    machine.handle(said(other, replace(plan, layers=5, assignments=(short,)), version=3), 0.2)
    assert not machine.usable, "the model has 6 layers"


# ── what goes wrong here ────────────────────────────────────────────────────────────────────────────────
def test_who_cannot_load_says_so_sits_out_and_tries_again_later_and_later() -> None:
    own = holder(1, 80)
    machine = started(own)
    now, pause = ALONE_SETTLE_S, BACKOFF_S
    for _ in range(8):
        machine.handle(Tick(), now)
        while machine.standing is None:
            now = machine.next_deadline() or now
            machine.handle(Tick(), now)
        assert machine.standing.readiness is Readiness.LOADING
        effects = machine.handle(LoadFailed(plan_id(machine.standing.plan), "the disk is full"), now)
        assert effects[0] == Unload(plan_id(plan_of(own)))
        assert machine.standing == Standing(plan_of(own), Readiness.FAILED, "the disk is full")
        machine.handle(Tick(), now + SETTLE_S)
        assert "pc1 could not load its layers: the disk is full" in machine.reason
        assert machine.next_deadline() == now + pause
        now, pause = now + pause, min(2 * pause, BACKOFF_MOST_S)
    assert pause == BACKOFF_MOST_S


def test_a_peer_that_could_not_load_is_left_out_of_the_next_plan() -> None:
    machine, other, plan = ready_pair()
    machine.handle(AdvertHeard(advert(3, 60, partial=A)), 2.0)
    machine.handle(said(other, plan, Readiness.FAILED, 4), 3.0)
    machine.handle(Tick(), 4.0)
    assert machine.plan is not None
    assert peer_id(2) not in machine.plan.owners


def test_more_memory_is_reason_enough_to_try_again_at_once() -> None:
    own = holder(1, 80)
    machine = started(own)
    machine.handle(Tick(), 2.0)
    machine.handle(LoadFailed(plan_id(plan_of(own)), "out of memory"), 3.0)
    machine.handle(SelfChanged(replace(own, capacity_bytes=100 * MIB, version=5)), 10.0)
    machine.handle(Tick(), 11.0)
    assert machine.standing is not None
    assert machine.standing.readiness is Readiness.LOADING


def test_a_pc_that_gives_less_memory_than_it_promised_takes_the_promise_back() -> None:
    machine, _, plan = ready_pair()
    less = replace(holder(1), capacity_bytes=20 * MIB, version=9)
    effects = machine.handle(SelfChanged(less), 2.0)
    assert effects[0] == Unload(plan_id(plan))
    assert effects[-1] == Publish(None)
    assert not machine.usable


def test_word_of_a_load_that_was_called_off_is_ignored() -> None:
    machine, other, plan = ready_pair()
    machine.handle(PeerLeft(other.peer), 2.0)
    machine.handle(Tick(), 3.0)
    assert machine.handle(LoadDone(plan_id(plan)), 3.1) == []
    assert machine.handle(LoadFailed(plan_id(plan), "stopped"), 3.1) == []


# ── which model ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("wants", "chosen"), [((A, A, B), A), ((A, B, B), B), ((B, A, None), A), ((None,) * 3, A)]
)
def test_the_model_that_most_peers_want_is_served(wants: tuple[str | None, ...], chosen: str) -> None:
    machine = Ownership(advert(9, 0), COSTS, 0.0)
    for letter in "ab":
        machine.handle(ModelKnown(model(letter, layers=2)), 0.0)
    for number, want in enumerate(wants):
        one = advert(number, 80, whole=A, partial=B, wants=want)  # type: ignore[arg-type]
        holdings = tuple(replace(holding, complete=True) for holding in one.holdings)
        machine.handle(AdvertHeard(replace(one, holdings=holdings)), 0.0)
    machine.handle(Tick(), 1.0)
    assert machine.plan is not None
    assert machine.plan.model == chosen


def test_a_plan_in_use_is_kept_while_anybody_wants_its_model() -> None:
    machine, _, plan = ready_pair()
    for number in (3, 4, 5):
        machine.handle(AdvertHeard(advert(number, 80, whole=B, wants=B)), 2.0)
    machine.handle(Tick(), 4.0)
    assert machine.plan == plan
    machine.handle(SelfChanged(replace(holder(1), wants=B, version=9)), 4.1)
    assert not machine.usable, "now nobody wants it, and somebody wants another"


def test_the_model_outlives_the_pc_that_brought_it() -> None:
    machine, _, plan = ready_pair()
    machine.handle(SelfChanged(replace(advert(1, partial=A), version=9)), 2.0)
    assert machine.plan == plan, "nobody wants it any more, but nobody wants another either"


def test_a_plan_with_fewer_owners_than_asked_for_is_kept_until_more_are_possible() -> None:
    own = holder(1, 80, min_owners=2)
    machine = started(own)
    machine.handle(Tick(), 2.0)
    machine.handle(LoadDone(plan_id(plan_of(own))), 3.0)
    assert machine.usable
    other = advert(2, 80, partial=A)
    machine.handle(AdvertHeard(other), 4.0)
    assert machine.usable
    machine.handle(Tick(), 5.0)
    assert machine.standing == Standing(plan_of(own, other, min_owners=2), Readiness.ACCEPTED)
