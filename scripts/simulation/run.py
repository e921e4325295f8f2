"""One run: an office, a while of faults, and then the time until the mesh has come to rest."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from simulation import figures, population
from simulation.faults import Faults
from simulation.figures import Figures
from simulation.goal import unrest
from simulation.pc import Pc
from simulation.profiles import PROFILES, varied
from simulation.world import World

REST_S = 3.0
"""The mesh has come to rest if it looks so, and still does after this."""

WITHIN_S = 240.0
"""By then after the last fault it must have: those who waited in vain or could not load are tried again after
30 s, then 60 s, and then the plan must be made and loaded."""

LOOK_S = 0.25
LOOK_AT_MANY_S = 1.0
MANY = 100
"""How often it is looked at; looking at many takes long."""

MOST_AGENTS = 20
FEW_AGENTS = 5
LONG_EACH = 10
LONG_S = 90.0

Progress = Callable[[float, float], None]
"""Called with virtual seconds done, and all of them."""


@dataclass(frozen=True, slots=True)
class Task:
    """`seconds` is how long faults go on; None for as long as the profile says."""

    seed: int
    agents: int
    faults: str
    seconds: float | None = None
    scenario: str | None = None

    @property
    def command(self) -> str:
        """What runs it again."""
        what = f"--faults {self.faults}" if self.scenario is None else f"--scenario {self.scenario}"
        command = f"python scripts/simulate.py --seed {self.seed} --agents {self.agents} {what}"
        return command if self.seconds is None else f"{command} --seconds {self.seconds:g}"


def harsh(seed: int) -> Task:
    """One of many: 2 to 20 agents, more often few than many, under all that may go wrong. Every tenth has few agents
    and goes on for long: plans are only improved, and old ones let go of, after a minute."""
    share = Random(seed).random() ** 5
    if seed % LONG_EACH == 0:
        return Task(seed, 2 + int((FEW_AGENTS - 1) * share), "harsh", LONG_S)
    return Task(seed, 2 + int((MOST_AGENTS - 1) * share), "harsh")


def run(task: Task, progress: Progress = lambda done, total: None, *, strict: bool = False) -> Figures:
    """Everything follows from the task. With `strict` the first violation is raised."""
    return Run(task, progress, strict=strict).to_its_end()


class Run:
    """`world` may be looked at, and changed, before `to_its_end` and after. `others` are PCs on which no agent starts
    by itself."""

    def __init__(
        self,
        task: Task,
        progress: Progress = lambda done, total: None,
        *,
        strict: bool = False,
        others: Sequence[Pc] = (),
    ) -> None:
        self.task = task
        self._progress = progress
        random = Random(f"{task.seed}/{task.agents}/{task.faults}")
        self.profile = varied(PROFILES[task.faults], random)
        self.seconds = self.profile.seconds if task.seconds is None else task.seconds
        multicast = random.random() >= self.profile.contacts_only
        pcs = population.office(random, task.agents, defects=self.profile.defects, multicast=multicast)
        self.world = World(task.seed, [*pcs, *others], latency_s=self.profile.latency_s, strict=strict)
        self.faults = Faults(self.world, self.profile, self.world.clock.now + self.seconds)
        self._start_agents(random, pcs)
        self.rest_at: float | None = None
        """Since when the mesh is at rest."""
        self.reason: str | None = "it was not looked at"
        """Why it is not."""
        self._real = _Real()

    def _start_agents(self, random: Random, pcs: Sequence[Pc]) -> None:
        world, within_s = self.world, self.profile.start_within_s
        self.started_at = world.clock.now
        for pc in pcs:
            at = world.clock.now + random.uniform(0.0, within_s)
            if self.profile.every_s > 0 and random.random() < 0.2:
                at = world.clock.now + random.uniform(0.0, max(within_s, 0.8 * self.seconds))
            self.started_at = max(self.started_at, at)
            world.clock.at(at, world.start, pc)

    def to_its_end(self) -> Figures:
        self.faults.begin()
        self.faults.last_at = self.started_at
        if self.profile.every_s > 0:
            self.go_on(self.seconds, look=False)
            self.settle()
        else:
            self.go_on(self.seconds)
        return self.figures()

    def go_on(self, seconds: float, *, look: bool = True) -> None:
        clock = self.world.clock
        begin, end = clock.now, clock.now + seconds
        with tuned():
            while clock.now < end:
                clock.run(min(end, clock.now + self._look_s))
                self._progress(clock.now - begin, seconds)
                if look and clock.now > self.started_at:
                    self.look()

    def settle(self, rest_s: float = REST_S) -> None:
        """Until the mesh has been at rest for so long, or should have been."""
        clock = self.world.clock
        latest = max(clock.now, self.faults.last_at) + WITHIN_S
        with tuned():
            self.look()
            while clock.now < latest and (self.rest_at is None or clock.now < self.rest_at + rest_s):
                clock.run(clock.now + self._look_s)
                self._progress(self.seconds, self.seconds)
                self.look()

    def look(self) -> None:
        """Note whether the mesh is at rest now."""
        self.reason = unrest(self.world)
        if self.reason is not None:
            self.rest_at = None
        elif self.rest_at is None:
            self.rest_at = self.world.clock.now

    @property
    def _look_s(self) -> float:
        return LOOK_S if len(self.world.pcs) < MANY else LOOK_AT_MANY_S

    def figures(self) -> Figures:
        return figures.collect(self, self._real.real_s, self._real.cpu_s)


class _Real:
    """How long it takes outside."""

    def __init__(self) -> None:
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    @property
    def real_s(self) -> float:
        return time.perf_counter() - self._began_s

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._began_cpu_s


class tuned:  # noqa: N801 - used like a function
    """The collector looks rarely: nearly all that a run makes is freed by counting."""

    def __enter__(self) -> None:
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(200_000, 50, 1000)

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._before)
        gc.unfreeze()
