"""Each layer is held a second time by a PC that is not its owner, wherever memory allows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_samples import COSTS, model, peer_id
from placement_cases import Mesh, links, meshes, must_fit, peers, spans, standbys

from meshinfer.limits import MIB
from meshinfer.mesh.placement import Options, memory_bytes, place
from meshinfer.mesh.plan import shards_of
from meshinfer.values import Objective, Plan, ShardKey, Span


def planned(*capacities_mib: int, options: Options = Options()) -> Plan:  # noqa: B008
    candidates = peers(*capacities_mib)
    plan = place(model(), candidates, COSTS, options)
    assert isinstance(plan, Plan)
    must_fit(plan, model(), candidates, options)
    return plan


def test_free_peers_stand_by_first() -> None:
    plan = planned(40, 40, 40, 40)
    assert spans(plan) == [(0, "0-2"), (1, "3-5")]
    assert standbys(plan) == [(2, "0-2"), (3, "3-5")]


def test_one_free_peer_with_room_stands_by_for_both_so_that_the_others_stay_free() -> None:
    plan = planned(40, 40, 80, 80, options=Options(min_owners=2))
    assert len(plan.named) == 3


def test_owners_stand_by_for_each_other_where_nobody_is_free() -> None:
    plan = planned(80, 80, options=Options(min_owners=2))
    assert standbys(plan) == [(1, "0-2"), (0, "3-5")]
    pools = {one.pool_tokens for one in (*plan.assignments, *plan.standbys)}
    assert pools == {4096}


def test_an_owner_that_stands_by_shares_its_room_for_keys_and_values() -> None:
    tight = planned(69, 69, options=Options(min_owners=2))
    assert standbys(tight) == [(1, "0-2"), (0, "3-5")]
    assert all(256 <= one.pool_tokens < 4096 for one in (*tight.assignments, *tight.standbys))


def test_none_where_memory_does_not_allow() -> None:
    assert standbys(planned(40, 40)) == []
    assert standbys(planned(40, 40, 20)) == []


def test_up_to_three_peers_share_a_span() -> None:
    plan = planned(80, 30, 30, 30)
    assert spans(plan) == [(0, "0-5")]
    assert standbys(plan) == [(1, "0-1"), (2, "2-3"), (3, "4-5")]
    assert standbys(planned(80, 15, 15, 15, 15, 15, 15)) == [], "six of them would all have to live"


def test_who_could_hold_the_whole_model_is_left_to_be_a_replica() -> None:
    assert standbys(planned(80, 80)) == []
    assert standbys(planned(80, 80, 30, 30, 30)) == [(2, "0-1"), (3, "2-3"), (4, "4-5")]


def test_a_standby_is_joined_to_its_neighbours() -> None:
    """Else the route through it would not work just when it is needed."""
    apart = Options(hops=links({}, broken=[(1, 2)]))
    assert standbys(planned(40, 40, 40, 40, options=apart)) == [(3, "0-2"), (2, "3-5")]


def test_standbys_that_have_the_layers_stay() -> None:
    plan = planned(40, 40, 40, 40)
    swapped = tuple(
        replace(one, peer=peer_id(5 - int(one.peer, 16)))  # 2 and 3 change places
        for one in plan.standbys
    )
    kept = planned(40, 40, 40, 40, options=Options(keep=replace(plan, standbys=swapped)))
    assert kept.standbys == swapped


def test_a_standby_beside_a_promise_elsewhere_has_only_what_is_left() -> None:
    taken = Options(taken_bytes={peer_id(2): 10 * MIB, peer_id(3): 39 * MIB})
    assert standbys(planned(40, 40, 40, 40, options=taken)) == []


@settings(max_examples=60, deadline=None)
@given(meshes(), st.integers(1, 3), st.sampled_from(Objective))
def test_standbys_are_sound_and_never_exceed_memory(mesh: Mesh, fewest: int, objective: Objective) -> None:
    options = mesh.options(fewest, objective)
    plan = place(mesh.facts, mesh.candidates, COSTS, options)
    if isinstance(plan, Plan):
        must_fit(plan, mesh.facts, mesh.candidates, options)
        owned = {one.peer: one.span for one in plan.assignments}
        assert all(owned.get(one.peer) != one.span for one in plan.standbys)


def test_what_a_peer_holds_twice_is_counted_once() -> None:
    shard = ShardKey(model().model, Span(0, 3), "CPU", 256)
    precision = peers(1)[0].precision
    once = memory_bytes(model(), COSTS, (shard,), precision)
    assert memory_bytes(model(), COSTS, (shard, shard), precision) == once
    plan = planned(80, 80, options=Options(min_owners=2))
    both = shards_of(plan, peer_id(0))
    assert [shard.span for shard in both] == [Span(0, 3), Span(3, 6)]
