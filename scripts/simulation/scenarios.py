"""Stories with an expected end, for a mesh of any size; a thousand agents is what they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from meshinfer.values import Plan, PlanId
from simulation import population
from simulation.figures import Figures
from simulation.goal import usable_plans
from simulation.pc import Pc
from simulation.process import Process
from simulation.run import REST_S, Progress, Run, Task

CRASHES = 10

CALM_S = 75.0
"""Before bystanders come, no plan was made for so long: one that is better by a fifth replaces another after 60 s."""

LATER_S = 20.0
"""For so long after it came to rest, a mesh is watched for what should not happen any more."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`tell` makes the story of a run that has not begun, and says what was not as it should be."""

    faults: str
    seconds: float
    tell: Callable[[Run], list[str]]
    others: Callable[[Task], list[Pc]] = lambda task: []


def play(
    name: str, seed: int, agents: int, seconds: float | None, progress: Progress, *, strict: bool = False
) -> Figures:
    scenario = SCENARIOS[name]
    task = Task(seed, agents, scenario.faults, scenario.seconds if seconds is None else seconds, name)
    run = Run(task, progress, strict=strict, others=scenario.others(task))
    run.faults.begin()
    run.faults.last_at = run.started_at
    unmet = scenario.tell(run)
    figures = run.figures()
    figures.unmet = unmet
    return figures


# ── cold start, and a start where a fifth is lost ───────────────────────────────────────────────────────────
def _cold(run: Run) -> list[str]:
    run.go_on(run.seconds)
    return _nobody_removed(run)


def _nobody_removed(run: Run) -> list[str]:
    removed = sum(run.world.truth.removed.values())
    return [f"{removed} times somebody was removed who was there"] if removed else []


# ── ten crash at once ───────────────────────────────────────────────────────────────────────────────────────
def _crash(run: Run) -> list[str]:
    world, random = run.world, Random(f"{run.task.seed}/crash")
    run.go_on(run.started_at - world.clock.now)
    run.settle(REST_S + LATER_S)
    before, using = usable_plans(world), _using(run)
    world.truth.removed.clear()
    victims = random.sample(
        [pc for pc in world.pcs if pc.process is not None], min(CRASHES, len(world.pcs) - 1)
    )
    for number, pc in enumerate(victims):
        (world.kill if number % 2 else world.power_cut)(pc)
    run.faults.last_at, run.rest_at = world.clock.now, None
    run.go_on(run.seconds)
    return [*_just_these_removed(run, victims), *_others_kept(run, victims, before, using)]


def _using(run: Run) -> dict[Process, PlanId | None]:
    return {process: process.usable_id for process in run.world.processes}


def _just_these_removed(run: Run, victims: list[Pc]) -> list[str]:
    removed, gone = run.world.truth.removed.keys(), {pc.peer for pc in victims}
    names = sorted(run.world.by_peer[peer].name for peer in removed - gone)
    return [f"{', '.join(names)} did not crash and were removed"] if names else []


def _others_kept(
    run: Run, victims: list[Pc], before: dict[PlanId, Plan], using: dict[Process, PlanId | None]
) -> list[str]:
    """Plans that named nobody who crashed are still there, and so are those who asked under them."""
    gone = {pc.peer for pc in victims}
    untouched = {one for one, plan in before.items() if gone.isdisjoint(plan.named)}
    after = usable_plans(run.world)
    unmet = [
        f"plan {one[:8]} named nobody who crashed, and is gone" for one in sorted(untouched - after.keys())
    ]
    moved = [
        process.pc.name
        for process, plan in using.items()
        if process.alive and plan in untouched and process.usable_id != plan
    ]
    if moved:
        unmet.append(f"{', '.join(moved)} ask under another plan, though theirs named nobody who crashed")
    return unmet


# ── bystanders ──────────────────────────────────────────────────────────────────────────────────────────────
def _bystanders(task: Task) -> list[Pc]:
    return population.bystanders(Random(f"{task.seed}/bystanders"), task.agents, 2 * task.agents // 5 + 5)


def _come_and_go(run: Run) -> list[str]:
    world, random = run.world, Random(f"{run.task.seed}/come and go")
    run.go_on(run.started_at - world.clock.now)
    _rest_from_planning(run)
    plans, before = len(world.truth.accepted), usable_plans(world)
    end = world.clock.now + run.seconds
    while world.clock.now < end:
        _one_comes_or_goes(run, random)
        run.go_on(min(1.0, end - world.clock.now), look=False)
    run.faults.last_at = world.clock.now
    run.settle()
    made = len(world.truth.accepted) - plans
    unmet = [f"{made} plans were made while bystanders came and went"] if made else []
    if before.keys() != usable_plans(world).keys():
        unmet.append("the plans are not those that were there before")
    return unmet


def _rest_from_planning(run: Run) -> None:
    """Until no plan has been made for `CALM_S`."""
    world = run.world
    for _ in range(20):
        made = len(world.truth.accepted)
        run.settle(CALM_S)
        if len(world.truth.accepted) == made:
            return


def _one_comes_or_goes(run: Run, random: Random) -> None:
    world = run.world
    named = {peer for plan in usable_plans(world).values() for peer in plan.named}
    outside = [pc for pc in world.pcs if pc.process is None]
    free = [pc for pc in world.pcs if pc.process is not None and pc.peer not in named]
    if outside and (not free or random.random() < 0.5):
        world.start(random.choice(outside))
    elif free:
        pc = random.choice(free)
        random.choice((world.kill, world.power_cut, world.leave))(pc)


SCENARIOS = {
    "cold": Scenario("none", 60.0, _cold),
    "crash10": Scenario("none", 60.0, _crash),
    "bystanders": Scenario("none", 600.0, _come_and_go, _bystanders),
    "loss20": Scenario("loss20", 600.0, _cold),
}
