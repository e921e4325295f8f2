"""Every layer lands where it fits and runs soonest; else the figures are named."""

from __future__ import annotations

from dataclasses import replace

from mesh_samples import COSTS, advert, model, peer_id
from placement_cases import links, must_fit, peers, spans

from meshinfer.limits import MIB
from meshinfer.mesh.placement import (
    HOP_US,
    MOST_POOL_TOKENS,
    UNMEASURED_DECODE_US,
    Candidate,
    Hops,
    Options,
    Shortfall,
    place,
)
from meshinfer.values import KvShape, LinkFacts, ModelFacts, Objective, Plan, Precision


def _weights_bytes(facts: ModelFacts, first: int, last: int) -> int:
    """What layers take, loaded, without their KV."""
    return COSTS.span_bytes(facts.hidden) + sum(map(COSTS.layer_bytes, facts.layer_bytes[first:last]))


# ── one peer or several ─────────────────────────────────────────────────────────────────────────────────
def test_the_fastest_peer_that_can_holds_the_whole_model() -> None:
    assert spans(place(model(), peers(80, 80, 80, decode_us=(300, 100, 200)), COSTS)) == [(1, "0-5")]


def test_equally_fast_peers_are_told_apart_by_their_id() -> None:
    assert spans(place(model(), peers(80, 80), COSTS)) == [(0, "0-5")]


def test_a_split_comes_when_it_is_asked_for_and_is_even() -> None:
    assert spans(place(model(), peers(80, 80, 80), COSTS, Options(min_owners=3))) == [
        (0, "0-1"),
        (1, "2-3"),
        (2, "4-5"),
    ]


def test_more_owners_than_can_be_had_are_not_insisted_on() -> None:
    assert spans(place(model(), peers(80), COSTS, Options(min_owners=3))) == [(0, "0-5")]
    assert len(spans(place(model(layers=2), peers(80, 80, 80), COSTS, Options(min_owners=3)))) == 2


def test_a_hop_costs_so_no_more_owners_than_needed() -> None:
    assert len(spans(place(model(), peers(40, 40, 40, 40), COSTS))) == 2


# ── unequal peers ───────────────────────────────────────────────────────────────────────────────────────
def test_unequal_memory_gives_unequal_spans() -> None:
    plan = place(model(), peers(60, 15, 5), COSTS)
    assert spans(plan) == [(0, "0-4"), (1, "5-5")]


def test_a_peer_without_room_for_one_layer_gets_none() -> None:
    assert {peer for peer, _ in spans(place(model(), peers(11, 40, 40), COSTS))} == {1, 2}


def test_the_leftover_layer_does_not_go_where_it_does_not_fit() -> None:
    # By proportional shares the third peer would get 1.4 of the layers, and one more by rounding up.
    facts = model(layers=7)
    plan = place(facts, peers(40, 40, 20), COSTS)
    assert isinstance(plan, Plan)
    must_fit(plan, facts, peers(40, 40, 20))
    assert sorted(len(one.span) for one in plan.assignments) == [1, 3, 3]


def test_more_peers_than_layers() -> None:
    facts = model(layers=3)
    plan = place(facts, peers(*[14] * 9), COSTS)
    assert isinstance(plan, Plan)
    assert len(plan.owners) == 3
    must_fit(plan, facts, peers(*[14] * 9))


def test_layers_that_differ_in_size_are_cut_by_size() -> None:
    facts = replace(model(), layer_bytes=tuple(size * MIB for size in (30, 5, 5, 5, 5, 30)))
    plan = place(facts, peers(48, 48), COSTS)
    assert isinstance(plan, Plan)
    must_fit(plan, facts, peers(48, 48))
    assert [str(one.span) for one in plan.assignments] == ["0-2", "3-5"]


def test_faster_peers_get_more_layers() -> None:
    plan = place(model(), peers(60, 60, decode_us=(900, 100)), COSTS)
    assert isinstance(plan, Plan)
    assert {one.peer: len(one.span) for one in plan.assignments} == {peer_id(0): 1, peer_id(1): 5}


def test_kv_is_budgeted_at_its_real_precision() -> None:
    facts = replace(model(), kv=(KvShape(64, 64, 64),) * 6)  # 4 MiB a layer at 2 bytes for 256 tokens, 8 at 4
    thrifty = [Candidate.of(advert(1, 92))]
    assert spans(place(facts, thrifty, COSTS)) == [(1, "0-5")]
    assert isinstance(place(facts, [replace(thrifty[0], precision=Precision.EXACT)], COSTS), Shortfall)


def test_capacity_of_zero_is_no_candidate() -> None:
    assert isinstance(place(model(), peers(0, 0), COSTS), Shortfall)


# ── KV pools, prediction ────────────────────────────────────────────────────────────────────────────────
def pool(facts: ModelFacts, capacity_mib: int) -> int:
    plan = place(facts, peers(capacity_mib), COSTS)
    assert isinstance(plan, Plan)
    must_fit(plan, facts, peers(capacity_mib))
    return plan.assignments[0].pool_tokens


def test_what_memory_is_left_becomes_kv_room_up_to_a_bound() -> None:
    rich = replace(model(), kv=(KvShape(64, 64, 64),) * 6)  # 96 KiB a token
    spare = 100 * MIB - _weights_bytes(rich, 0, rich.layers)
    beyond = spare - rich.context * 96 * 1024  # half of it is left for a plan that takes over
    assert pool(rich, 100) == (rich.context + beyond // 2 // (96 * 1024)) // 32 * 32
    assert pool(model(), 4000) == 16 * 256
    assert pool(replace(model(), context=8192), 9000) == MOST_POOL_TOKENS
    assert pool(replace(model(), context=131_072), 9000) == 131_072, "one full context must be possible"


def test_layers_without_kv_take_none() -> None:
    facts = replace(model(), kv=(KvShape(0, 0, 0),) * 6)
    assert spans(place(facts, peers(68), COSTS)) == [(0, "0-5")]


def test_predicted_time_is_layers_and_hops() -> None:
    plan = place(model(), peers(40, 40, decode_us=(100, 200)), COSTS)
    assert isinstance(plan, Plan)
    assert plan.predicted_us == 3 * 100 + 3 * 200 + 3 * HOP_US
    alone = place(model(), peers(80), COSTS)
    assert isinstance(alone, Plan)
    assert alone.predicted_us == 6 * UNMEASURED_DECODE_US + 2 * HOP_US


# ── what does not fit ───────────────────────────────────────────────────────────────────────────────────
def test_a_model_that_does_not_fit_is_refused_with_the_figures() -> None:
    lack = place(model(), peers(20, 30), COSTS)
    assert isinstance(lack, Shortfall)
    assert dict(lack.available) == {peer_id(0): 20 * MIB, peer_id(1): 30 * MIB}
    sentence = lack.sentence({peer_id(0): "kitchen", peer_id(1): "attic"})
    assert sentence == (
        "needs 68 MiB for layers and KV; attic has 30 MiB, kitchen has 20 MiB; "
        "at least 1 more PC or a larger [sharing] memory is needed"
    )


def test_a_shortfall_says_when_not_even_one_layer_fits() -> None:
    lack = place(model(), peers(*[5] * 30), COSTS)
    assert isinstance(lack, Shortfall)
    sentence = lack.sentence({})
    assert "one layer alone takes 12 MiB" in sentence
    assert "22 more have 110 MiB in all" in sentence


def test_nobody_has_memory() -> None:
    lack = place(model(), [], COSTS)
    assert isinstance(lack, Shortfall)
    assert lack.available == ()
    assert "no peer gives any" in lack.sentence({})


def test_where_a_split_was_asked_for_the_fastest_does_not_take_nearly_all() -> None:
    forced = place(
        model(layers=12), peers(400, 400, 400, decode_us=(100, 300, 350)), COSTS, Options(min_owners=3)
    )
    assert isinstance(forced, Plan)
    assert [len(one.span) for one in forced.assignments] == [4, 4, 4]


def test_a_new_peer_counts_as_fast_as_the_others() -> None:
    """Else a PC that joins a mesh of measured ones would never, or always, be preferred."""
    plan = place(model(), peers(40, 40, decode_us=(120,)), COSTS)
    assert isinstance(plan, Plan)
    assert [len(one.span) for one in plan.assignments] == [3, 3]


# ── whole or split ──────────────────────────────────────────────────────────────────────────────────────────
def test_no_split_when_whole_is_faster() -> None:
    plan = place(model(), peers(80, 60, decode_us=(300, 200)), COSTS)
    assert spans(plan) == [(0, "0-5")]


def test_a_split_where_even_the_fastest_whole_would_be_slower() -> None:
    plan = place(model(), peers(80, 60, decode_us=(2000, 100)), COSTS)
    assert spans(plan) == [(1, "0-4"), (0, "5-5")]
    assert isinstance(plan, Plan)
    assert plan.predicted_us < 6 * 2000


def test_of_equally_fast_peers_the_one_that_is_faster_with_prompts_is_taken() -> None:
    slow, quick = peers(80, 80, decode_us=(100, 100))
    plan = place(model(), [replace(slow, prefill_us=90), replace(quick, prefill_us=40)], COSTS)
    assert spans(plan) == [(1, "0-5")]


# ── links ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_near_peer_is_better_than_a_somewhat_faster_one_far_away() -> None:
    candidates = peers(40, 40, 40, decode_us=(100, 90, 100))
    far = Options(hops=links({(0, 1): 20_000, (1, 2): 20_000, (0, 2): 300}))
    plan = place(model(), candidates, COSTS, far)
    assert {peer for peer, _ in spans(plan)} == {0, 2}
    assert isinstance(plan, Plan)
    assert plan.predicted_us == 6 * 100 + 2 * HOP_US + 300


def test_no_route_leads_over_a_broken_link() -> None:
    candidates = peers(40, 40, 40, decode_us=(100, 100, 900))
    plan = place(model(), candidates, COSTS, Options(hops=links({}, broken=[(1, 0)])))
    assert 2 in {peer for peer, _ in spans(plan)}


def test_a_third_peer_is_a_bridge_where_the_two_that_are_needed_are_not_joined() -> None:
    candidates = peers(40, 40, 12)
    plan = place(model(), candidates, COSTS, Options(hops=links({}, broken=[(0, 1)])))
    assert [peer for peer, _ in spans(plan)] in ([0, 2, 1], [1, 2, 0])


def test_broken_links_are_named_where_they_are_the_reason() -> None:
    candidates = peers(40, 40)
    lack = place(model(), candidates, COSTS, Options(hops=links({}, broken=[(1, 0)])))
    assert isinstance(lack, Shortfall)
    assert "the links between kitchen and attic failed lately" in lack.sentence(
        {peer_id(0): "kitchen", peer_id(1): "attic"}
    )
    tight = place(model(), peers(20, 30), COSTS, Options(hops=links({}, broken=[(1, 0)])))
    assert isinstance(tight, Shortfall)
    assert tight.broken == ()


def test_hops_come_from_what_peers_measured() -> None:
    """Half a round trip, the row's way over the wire, and what software takes; the worse end counts, both ways."""
    one = replace(advert(1), links=(LinkFacts(peer_id(2), 1000, 100_000), LinkFacts(peer_id(3), 0, 0)))
    other = replace(advert(2, broken=(4,)), links=(LinkFacts(peer_id(1), 800, 50_000),))
    hops = Hops.of((one, other), hidden=2048)
    row_us = 2048 * 4 * 8 * 1000 // 100_000
    assert (
        hops.between(peer_id(1), peer_id(2)) == hops.between(peer_id(2), peer_id(1)) == 400 + 400 + 2 * row_us
    )
    assert hops.between(peer_id(1), peer_id(3)) == HOP_US
    assert hops.between(peer_id(4), peer_id(2)) is None
    assert hops.between(peer_id(2), peer_id(4)) is None


# ── the largest allocation ──────────────────────────────────────────────────────────────────────────────────
def test_a_device_that_cannot_allocate_a_layer_gets_none() -> None:
    small, large = peers(80, 80, decode_us=(50, 900))
    weak = replace(small, allocation_bytes=11 * MIB)
    assert spans(place(model(), [weak, large], COSTS)) == [(1, "0-5")], "a layer takes 11.25 MiB"
    lack = place(model(), [weak], COSTS)
    assert isinstance(lack, Shortfall)
    assert "kitchen's device takes no more than 11 MiB in one piece" in lack.sentence({weak.peer: "kitchen"})


def test_the_largest_allocation_bounds_the_room_for_keys_and_values() -> None:
    rich = replace(model(), kv=(KvShape(64, 64, 64),) * 6)  # 16 KiB a token and layer
    one = replace(peers(4000)[0], allocation_bytes=20 * MIB)
    plan = place(rich, [one], COSTS)
    assert isinstance(plan, Plan)
    assert plan.assignments[0].pool_tokens == 20 * 64
    must_fit(plan, rich, [one])


# ── tokens for many ─────────────────────────────────────────────────────────────────────────────────────────
def test_for_many_people_the_slowest_stage_counts() -> None:
    candidates = peers(80, 80, decode_us=(1000, 1000))
    plan = place(model(), candidates, COSTS, Options(objective=Objective.THROUGHPUT))
    assert spans(plan) == [(0, "0-2"), (1, "3-5")]
    assert isinstance(plan, Plan)
    assert plan.stage_us == 3 * 1000 + HOP_US
    assert plan.predicted_us == 6 * 1000 + 3 * HOP_US


def test_for_many_people_a_slow_peer_gets_little_and_a_far_one_nothing() -> None:
    many = Options(objective=Objective.THROUGHPUT)
    assert spans(place(model(), peers(80, 80, decode_us=(1000, 3000)), COSTS, many)) == [
        (0, "0-4"),
        (1, "5-5"),
    ]
    far = Options(objective=Objective.THROUGHPUT, hops=links({(0, 1): 9000}))
    assert len(spans(place(model(), peers(80, 80, decode_us=(1000, 1000)), COSTS, far))) == 1
