"""No plan is used that an owner does not hold, whatever happens to network and PCs, and calm returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mesh_simulator import Faults, World, advert, harsh, peer_id

from meshinfer.mesh import picture
from meshinfer.mesh.ownership import Ownership
from meshinfer.mesh.picture import Picture

SEEDS = 600
BLOCKS = 6
FAULTS_S = 12.0
CONVERGE_S = 20.0
"""Silence (5 s), settling (1 to 5 s), a manifest (2.5 s) and a load (1.5 s), some of them twice."""


def converge(seed: int) -> World:
    """Run until the faults have ended and all are of one mind, or the time for that is over."""
    world = harsh(seed, until=FAULTS_S)
    world.run(FAULTS_S + 6)
    while world.disagreement() is not None and world.now < world.started_at + FAULTS_S + CONVERGE_S:
        world.run(world.now - world.started_at + 1)
    return world


def must_converge(seed: int) -> World:
    try:
        world = converge(seed)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    problem = world.disagreement()
    assert problem is None, f"seed {seed}: {problem}"
    return world


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_faulty_mesh_becomes_of_one_mind(block: int) -> None:
    share = SEEDS // BLOCKS
    usable = 0
    for seed in range(block * share, (block + 1) * share):
        world = must_converge(seed)
        usable += any(agent.alive and agent.usable for agent in world.agents.values())
    assert usable > share // 2, "the simulation proves little if most of its meshes cannot serve"


@pytest.mark.parametrize("seed", range(20))
def test_ten_agents_that_start_at_the_same_second_make_one_plan(seed: int) -> None:
    world = World(seed, Faults(), faults_end=0.0)
    for number in range(10):
        whole = min(world.models) if number == 0 else None
        own = advert(number, 20, whole=whole, wants=whole)
        world.at(world.now + world.random.random(), lambda own=own: world.start(own))  # type: ignore[misc]
    world.run(8.0)
    assert world.disagreement() is None
    assert world.agents[peer_id(0)].usable is not None
    assert [agent.plan_changes for agent in world.agents.values()] == [1] * 10
    assert len(world.loads) == len(world.agents[peer_id(0)].usable.owners), "nothing was loaded in vain"


@pytest.mark.parametrize("seed", range(10))
def test_bystanders_that_come_and_go_change_no_plan(seed: int) -> None:
    world = World(seed, Faults(), faults_end=0.0)
    whole = min(world.models)
    for number in range(3):
        world.start(advert(number, 30, whole=whole if number == 0 else None, wants=whole))
    world.run(8.0)
    plan = world.agents[peer_id(0)].usable
    assert plan is not None
    for number in range(10, 40):
        world.start(advert(number, world.random.choice((0, 30, 200)), decode_us=1))
        world.run(world.now - world.started_at + 1)
        gone = world.random.choice([peer for peer in world.agents if peer not in plan.owners])
        world.random.choice((world.crash, world.leave))(gone)
    world.run(world.now - world.started_at + 8)
    assert world.disagreement() is None
    assert {agent.usable for agent in world.agents.values() if agent.alive} == {plan}
    assert all(world.agents[owner].plan_changes == 1 for owner in plan.owners)


def test_an_agent_restarted_ten_times_in_a_minute_ends_in_a_plan() -> None:
    world = World(1, Faults(), faults_end=0.0)
    whole = min(world.models)
    for number in range(2):
        world.start(advert(number, 40, whole=whole, wants=whole))
    for _ in range(10):
        world.run(world.now - world.started_at + 6)
        world.crash(peer_id(1))
        world.restart(peer_id(1))
    world.run(world.now - world.started_at + 8)
    assert world.disagreement() is None
    assert world.agents[peer_id(0)].usable is not None


def test_a_run_is_replayed_by_its_seed() -> None:
    def story(seed: int) -> tuple[int, list[tuple[str, int, str]]]:
        world = converge(seed)
        return world.events, [(a.own.name, a.own.version, a.reason) for a in world.agents.values()]

    assert story(17) == story(17)
    assert story(17) != story(18)


# ── the simulation would notice ─────────────────────────────────────────────────────────────────────────
def _uses_before_all_are_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Picture, "ready", Picture.held)


def _loads_before_all_have_accepted(patch: pytest.MonkeyPatch) -> None:
    def some_hold(self: Picture, plan: Any) -> bool:
        return any(self.readiness(plan, peer) in picture._HOLDING for peer in plan.owners)

    patch.setattr(Picture, "held", some_hold)


def _keeps_memory_that_it_promised_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ownership, "_release", lambda self, effects: None)


def _forgets_that_a_restart_loses_all(patch: pytest.MonkeyPatch) -> None:
    def trusting(self: Picture, plan: Any, peer: Any) -> Any:
        standing = self._of[peer].standing if peer in self._of else None
        return standing.readiness if standing is not None and standing.plan.model == plan.model else None

    patch.setattr(Picture, "readiness", trusting)


@pytest.mark.parametrize(
    "mutate",
    [
        _uses_before_all_are_ready,
        _loads_before_all_have_accepted,
        _keeps_memory_that_it_promised_before,
        _forgets_that_a_restart_loses_all,
    ],
)
def test_a_broken_rule_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        _run_seeds(100)


def _run_seeds(count: int) -> None:
    for seed in range(count):
        must_converge(seed)
