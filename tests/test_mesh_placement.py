"""Every layer lands where it fits and runs soonest, and the same on every PC; else the figures are named."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_samples import COSTS, advert, model, peer_id

from meshinfer.limits import MIB
from meshinfer.mesh.lanes import Lane, Task
from meshinfer.mesh.placement import (
    HOP_US,
    MOST_POOL_TOKENS,
    UNMEASURED_DECODE_US,
    Candidate,
    Options,
    Shortfall,
    memory_bytes,
    place,
)
from meshinfer.mesh.plan import flaw, shard_of
from meshinfer.mesh.stages import covered
from meshinfer.values import Assignment, KvShape, ModelFacts, OwnerFacts, Plan, Precision


def peers(*capacities_mib: int, decode_us: Sequence[int] = ()) -> list[Candidate]:
    speeds = [*decode_us, *[0] * len(capacities_mib)]
    return [
        Candidate.of(advert(number, capacity, decode_us=speed))
        for number, (capacity, speed) in enumerate(zip(capacities_mib, speeds, strict=False))
    ]


def spans(plan: Plan | Shortfall) -> list[tuple[int, str]]:
    assert isinstance(plan, Plan)
    return [(int(one.peer, 16), str(one.span)) for one in plan.assignments]


def _owners(plan: Plan) -> list[tuple[Assignment, OwnerFacts]]:
    facts = {one.peer: one for one in plan.inputs}
    return [(one, facts[one.peer]) for one in plan.assignments]


def must_fit(plan: Plan, facts: ModelFacts) -> None:
    for assignment, facts_then in _owners(plan):
        assert (
            memory_bytes(facts, COSTS, (shard_of(plan, assignment),), facts_then.precision)
            <= facts_then.capacity_bytes
        )
    assert flaw(plan, facts) is None


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
    must_fit(plan, facts)
    assert sorted(len(one.span) for one in plan.assignments) == [1, 3, 3]


def test_more_peers_than_layers() -> None:
    facts = model(layers=3)
    plan = place(facts, peers(*[14] * 9), COSTS)
    assert isinstance(plan, Plan)
    assert len(plan.owners) == 3
    must_fit(plan, facts)


def test_layers_that_differ_in_size_are_cut_by_size() -> None:
    facts = replace(model(), layer_bytes=tuple(size * MIB for size in (30, 5, 5, 5, 5, 30)))
    plan = place(facts, peers(48, 48), COSTS)
    assert isinstance(plan, Plan)
    must_fit(plan, facts)
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
    must_fit(plan, facts)
    return plan.assignments[0].pool_tokens


def test_what_memory_is_left_becomes_kv_room_up_to_a_bound() -> None:
    rich = replace(model(), kv=(KvShape(64, 64, 64),) * 6)  # 96 KiB a token
    spare = 100 * MIB - _weights_bytes(rich, 0, rich.layers)
    assert pool(rich, 100) == spare // (96 * 1024) // 32 * 32
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


# ── exact, and the same everywhere ──────────────────────────────────────────────────────────────────────
def fits(facts: ModelFacts, one: Candidate, first: int, last: int) -> bool:
    kv = sum(COSTS.kv_bytes(shape, one.precision, one.device) for shape in facts.kv[first:last])
    weights = _weights_bytes(facts, first, last)
    return weights + max(1, min(facts.context, 2048)) * kv <= one.capacity_bytes


def middle(candidates: Sequence[Candidate]) -> int:
    known = sorted(one.decode_us for one in candidates)
    return known[(len(known) - 1) // 2]


def least_cost(facts: ModelFacts, candidates: list[Candidate], fewest: int, even: bool) -> int | None:
    """By trying everything; in units of µs × all bytes, so that nothing is rounded."""
    all_bytes, layers = sum(facts.layer_bytes), facts.layers

    def speed(one: Candidate) -> int:
        return middle(candidates) if even else one.decode_us

    @cache
    def best(at: int, used: int) -> int | None:
        if at == layers:
            return 0 if used.bit_count() >= fewest else None
        found = None
        for i, one in enumerate(candidates):
            for last in range(at + 1, layers + 1):
                if used >> i & 1 or not fits(facts, one, at, last):
                    continue
                rest = best(last, used | 1 << i)
                if rest is not None:
                    price = speed(one) * layers * sum(facts.layer_bytes[at:last]) + HOP_US * all_bytes
                    found = price + rest if found is None else min(found, price + rest)
        return found

    return best(0, 0)


def cost_of(plan: Plan, facts: ModelFacts, even_us: int | None) -> int:
    cost = HOP_US * sum(facts.layer_bytes) * len(plan.owners)
    for one, then in _owners(plan):
        cost += (
            (even_us or then.decode_us)
            * facts.layers
            * sum(facts.layer_bytes[one.span.first : one.span.last])
        )
    return cost


@st.composite
def meshes(draw: st.DrawFn) -> tuple[ModelFacts, list[Candidate]]:
    layers = draw(st.integers(1, 10))
    sizes = draw(st.lists(st.integers(1, 40), min_size=layers, max_size=layers))
    heads = draw(st.lists(st.integers(1, 64), min_size=layers, max_size=layers))
    facts = replace(
        model(layers=layers),
        layer_bytes=tuple(size * MIB for size in sizes),
        kv=tuple(KvShape(count, 64, 64) for count in heads),
    )
    count = draw(st.integers(1, 6))
    average = sum(sizes) * 2 // count + 2
    capacities = draw(st.lists(st.integers(1, average * 2), min_size=count, max_size=count))
    speeds = draw(st.lists(st.sampled_from((50, 100, 100, 900, 2000)), min_size=count, max_size=count))
    return facts, peers(*capacities, decode_us=speeds)


@settings(max_examples=250, deadline=None)
@given(meshes(), st.integers(1, 3))
def test_no_plan_is_better_than_the_one_found(
    mesh: tuple[ModelFacts, list[Candidate]], min_owners: int
) -> None:
    facts, candidates = mesh
    plan = place(facts, candidates, COSTS, Options(min_owners))
    fewest, even = min_owners, min_owners > 1
    while fewest > 1 and least_cost(facts, candidates, fewest, even) is None:
        fewest -= 1
    least = least_cost(facts, candidates, fewest, even)
    if isinstance(plan, Shortfall):
        assert least is None
        return
    assert least is not None
    must_fit(plan, facts)
    if True:
        # All candidates count for the middle speed, those without memory as well as those with.
        assert cost_of(plan, facts, middle(candidates) if even else None) == least


@settings(max_examples=60, deadline=None)
@given(meshes(), st.randoms(use_true_random=False))
def test_the_order_in_which_peers_are_told_does_not_matter(
    mesh: tuple[ModelFacts, list[Candidate]], random: Random
) -> None:
    facts, candidates = mesh
    shuffled = list(candidates)
    random.shuffle(shuffled)
    assert place(facts, shuffled, COSTS) == place(facts, candidates, COSTS)


def test_two_hundred_peers_and_eighty_unequal_layers_in_under_a_second() -> None:
    random = Random(7)
    facts = replace(model(layers=80), layer_bytes=tuple(random.randint(20, 40) * MIB for _ in range(80)))
    for share in (5, 8, 20):
        capacity = sum(facts.layer_bytes) * share // 200 // MIB
        candidates = peers(
            *[random.randint(capacity // 3, 2 * capacity) for _ in range(200)],
            decode_us=[random.randint(100, 900) for _ in range(200)],
        )
        began = time.perf_counter()
        plan = place(facts, candidates, COSTS)
        assert time.perf_counter() - began < 1.0
        assert isinstance(plan, Plan)
        must_fit(plan, facts)
        random.shuffle(candidates)
        assert place(facts, candidates, COSTS) == plan


def test_a_tight_fit_over_more_peers_than_are_searched_exactly_is_found() -> None:
    found = 0
    for seed in range(30):
        random = Random(seed)
        facts = replace(model(layers=30), layer_bytes=tuple(random.randint(20, 40) * MIB for _ in range(30)))
        average = _weights_bytes(facts, 0, facts.layers) // MIB * 13 // 10 // 12
        capacities = [random.randint(average // 10, 2 * average - average // 10) for _ in range(12)]
        plan = place(facts, peers(*capacities), COSTS)
        everything = tuple(plan_lane(facts, one) for one in peers(*capacities))
        assert isinstance(plan, Plan) == (covered(free_task(everything)) is not None), seed
        found += isinstance(plan, Plan)
    assert 0 < found < 30, "both kinds must be among them"


def free_task(lanes: tuple[Lane, ...]) -> Task:
    nothing = (0,) * len(lanes)
    return Task(lanes, tuple(range(len(lanes[0].reach))), (nothing,) * len(lanes), nothing, nothing)


def plan_lane(facts: ModelFacts, one: Candidate) -> Lane:
    reach = []
    for first in range(facts.layers + 1):
        last = first
        while last < facts.layers and fits(facts, one, first, last + 1):
            last += 1
        reach.append(last)
    return Lane(1, tuple(reach))


def test_ten_peers_all_different_are_searched_in_bounded_time() -> None:
    for seed in range(6):
        random = Random(seed)
        facts = replace(model(layers=80), layer_bytes=tuple(random.randint(20, 40) * MIB for _ in range(80)))
        need = sum(facts.layer_bytes) // MIB
        candidates = peers(
            *[random.randint(need // 15, need // 4) for _ in range(10)],
            decode_us=[random.randint(100, 130) for _ in range(10)],
        )
        began = time.perf_counter()
        plan = place(facts, candidates, COSTS)
        assert time.perf_counter() - began < 2.0
        if isinstance(plan, Plan):
            must_fit(plan, facts)
