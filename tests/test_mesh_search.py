"""The plan found is the best there is, in bounded time, and the same on every PC."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_samples import COSTS, model
from placement_cases import Everything, Mesh, fits, links, meshes, must_fit, peers

from meshinfer.limits import MIB
from meshinfer.mesh.lanes import Lane, Task
from meshinfer.mesh.placement import Candidate, Hops, Options, Shortfall, place
from meshinfer.mesh.stages import covered
from meshinfer.values import ModelFacts, Objective, Plan


# ── compared with everything that is possible ───────────────────────────────────────────────────────────────
def must_be_best(mesh: Mesh, min_owners: int, objective: Objective) -> None:
    options = mesh.options(min_owners, objective)
    plan = place(mesh.facts, mesh.candidates, COSTS, options)
    everything = mesh.everything(even=min_owners > 1 and objective is Objective.LATENCY)
    fewest = min_owners
    while fewest > 1 and everything.least_time(fewest) is None:
        fewest -= 1
    least = everything.least_time(fewest)
    if isinstance(plan, Shortfall):
        assert least is None
        return
    assert least is not None
    must_fit(plan, mesh.facts, mesh.candidates, options)
    if objective is Objective.LATENCY:
        assert sum(everything.stages(plan)) == least
    else:
        must_be_fastest_for_many(plan, everything, fewest)


def must_be_fastest_for_many(plan: Plan, everything: Everything, fewest: int) -> None:
    stages, least = everything.stages(plan), everything.least_stage(fewest)
    assert least is not None
    assert max(stages) * 1000 <= least * 1003
    least_time = everything.least_time(fewest, least)
    assert least_time is not None
    assert sum(stages) <= least_time


def random_mesh(seed: int) -> Mesh:
    """Six peers and twelve layers, more and less tight: hypothesis prefers small ones."""
    random = Random(seed)
    facts = replace(model(layers=12), layer_bytes=tuple(random.randint(5, 40) * MIB for _ in range(12)))
    average = sum(facts.layer_bytes) // MIB * random.choice((13, 20, 40, 80)) // 60
    candidates = peers(
        *[random.randint(2, 2 * average) for _ in range(6)],
        decode_us=[random.randint(50, 900) for _ in range(6)],
    )
    pairs = [(one, other) for one in range(6) for other in range(one)]
    us = {pair: random.choice((100, 500, 1000, 3000)) for pair in pairs if random.random() < 0.7}
    broken = [pair for pair in pairs if random.random() < 0.1]
    return Mesh(facts, candidates, links(us, broken))


@settings(max_examples=200, deadline=None)
@given(meshes(), st.integers(1, 3), st.sampled_from(Objective))
def test_no_plan_is_better_than_the_one_found(mesh: Mesh, min_owners: int, objective: Objective) -> None:
    must_be_best(mesh, min_owners, objective)


@pytest.mark.parametrize("objective", Objective)
def test_no_plan_of_twelve_layers_over_six_peers_is_better(objective: Objective) -> None:
    for seed in range(12):
        must_be_best(random_mesh(seed), (1, 1, 2, 4)[seed % 4], objective)


@settings(max_examples=60, deadline=None)
@given(meshes(), st.randoms(use_true_random=False), st.sampled_from(Objective))
def test_the_order_in_which_peers_are_told_does_not_matter(
    mesh: Mesh, random: Random, objective: Objective
) -> None:
    shuffled = list(mesh.candidates)
    random.shuffle(shuffled)
    options = mesh.options(objective=objective)
    assert place(mesh.facts, shuffled, COSTS, options) == place(mesh.facts, mesh.candidates, COSTS, options)


# ── many peers ──────────────────────────────────────────────────────────────────────────────────────────────
def large(seed: int, share: int, linked: str) -> tuple[ModelFacts, list[Candidate], Hops]:
    """200 peers, each with room for so many thousandths of 80 unequal layers on average."""
    random = Random(seed)
    facts = replace(model(layers=80), layer_bytes=tuple(random.randint(20, 40) * MIB for _ in range(80)))
    capacity = sum(facts.layer_bytes) * share // 1000 // MIB
    candidates = peers(
        *[random.randint(capacity // 3, 2 * capacity) for _ in range(200)],
        decode_us=[random.randint(100, 900) for _ in range(200)],
    )
    odds = {"none": 0.0, "few": 0.04, "all": 1.0}[linked]
    pairs = [(one, other) for one in range(200) for other in range(one) if random.random() < odds]
    us = {pair: random.choice((300, 500, 800, 3000, 20_000)) for pair in pairs}
    return facts, candidates, links(us, [pair for pair in pairs if random.random() < 0.02])


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("linked", ["none", "few", "all"])
def test_two_hundred_peers_and_eighty_unequal_layers_in_under_a_second(
    objective: Objective, linked: str
) -> None:
    for share in (10, 20, 40, 200):
        facts, candidates, hops = large(7, share, linked)
        options = Options(hops=hops, objective=objective)
        began = time.process_time()
        plan = place(facts, candidates, COSTS, options)
        assert time.process_time() - began < 1.0
        assert isinstance(plan, Plan) == (share > 10), "64 of the small ones do not hold it"
        if isinstance(plan, Plan):
            must_fit(plan, facts, candidates, options)
            Random(1).shuffle(candidates)
            assert place(facts, candidates, COSTS, options) == plan


def test_a_large_mesh_is_repaired_in_under_a_second() -> None:
    facts, candidates, hops = large(7, 100, "few")
    plan = place(facts, candidates, COSTS, Options(hops=hops))
    assert isinstance(plan, Plan)
    left = [one for one in candidates if one.peer != plan.owners[1]]
    began = time.process_time()
    again = place(facts, left, COSTS, Options(hops=hops, keep=plan))
    assert time.process_time() - began < 1.0
    assert isinstance(again, Plan)
    assert sum(one in plan.assignments for one in again.assignments) >= len(plan.owners) - 2


def test_ten_peers_all_different_are_searched_in_bounded_time() -> None:
    for seed in range(4):
        random = Random(seed)
        facts = replace(model(layers=80), layer_bytes=tuple(random.randint(20, 40) * MIB for _ in range(80)))
        need = sum(facts.layer_bytes) // MIB
        candidates = peers(
            *[random.randint(need // 15, need // 4) for _ in range(10)],
            decode_us=[random.randint(100, 130) for _ in range(10)],
        )
        for objective in Objective:
            began = time.process_time()
            plan = place(facts, candidates, COSTS, Options(objective=objective))
            assert time.process_time() - began < 1.5
            if isinstance(plan, Plan):
                must_fit(plan, facts, candidates)


def test_a_tight_fit_over_more_peers_than_are_searched_exactly_is_found() -> None:
    found = 0
    for seed in range(20):
        random = Random(seed)
        facts = replace(model(layers=30), layer_bytes=tuple(random.randint(20, 40) * MIB for _ in range(30)))
        weights = COSTS.span_bytes(facts.hidden) + sum(map(COSTS.layer_bytes, facts.layer_bytes))
        average = weights // MIB * 13 // 10 // 12
        capacities = [random.randint(average // 10, 2 * average - average // 10) for _ in range(12)]
        plan = place(facts, peers(*capacities), COSTS)
        lanes = tuple(_lane(facts, one) for one in peers(*capacities))
        assert isinstance(plan, Plan) == (covered(_free(lanes)) is not None), seed
        found += isinstance(plan, Plan)
    assert 0 < found < 20, "both kinds must be among them"


def _lane(facts: ModelFacts, one: Candidate) -> Lane:
    reach = []
    for first in range(facts.layers + 1):
        last = first
        while last < facts.layers and fits(facts, one, first, last + 1):
            last += 1
        reach.append(last)
    return Lane(1, tuple(reach))


def _free(lanes: tuple[Lane, ...]) -> Task:
    """Lanes between which hops cost nothing."""
    nothing = (0,) * len(lanes)
    return Task(lanes, tuple(range(len(lanes[0].reach))), (nothing,) * len(lanes), nothing, nothing)
