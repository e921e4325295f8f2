"""The simulated office: clock, network, PCs, and what really happened there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from meshinfer.values import ModelFacts, ModelId, PeerId
from simulation import population
from simulation.clock import Clock
from simulation.network import Network
from simulation.paths import Paths
from simulation.pc import Pc
from simulation.process import Process
from simulation.sizes import Sizes
from simulation.truth import Truth

LAST_WORDS_S = 0.1
"""An agent that leaves ends so long after it said so."""

SEEN_AFTER_S = ((0.05, 0.4), (0.9, 1.2), (3.0, 4.0), (9.0, 11.0))
"""mDNS: an agent that starts announces itself, and asks who is there, several times."""

SEEN_EACH_S = 20.0
"""And ever after, in a small office: that is when the others' browsers ask again."""

SMALL_OFFICE = 64


class World:
    def __init__(
        self, seed: int, pcs: Sequence[Pc], *, latency_s: float = 0.001, strict: bool = False
    ) -> None:
        self.seed = seed
        self.pcs = pcs
        self.by_peer: dict[PeerId, Pc] = {pc.peer: pc for pc in pcs}
        self.models: dict[ModelId, ModelFacts] = population.MODELS
        self.costs = population.COSTS
        self.load_failures = 0.0
        """How likely a load fails by itself."""
        self.unseen = 0.0
        """How likely an mDNS announcement is not heard."""
        self.clock = Clock()
        self.paths = Paths(self.clock, pcs)
        self.network = Network(self.clock, self.paths, Random(f"{seed}/network"), latency_s)
        self.truth = Truth(self, strict)
        self.sizes = Sizes(lambda what: self.truth.violated(None, what))
        self.lived_s = 0.0
        """Of all agents that have ended."""
        self.plan_changes = 0
        """Of all agents that have ended."""
        self._random = Random(f"{seed}/office")

    @property
    def processes(self) -> list[Process]:
        return [pc.process for pc in self.pcs if pc.process is not None]

    def all_lives(self) -> Iterator[tuple[float, int]]:
        """Seconds lived and changes of the usable plan: ended agents in one, then each that runs."""
        yield self.lived_s, self.plan_changes
        for process in self.processes:
            yield self.clock.now - process.started_at, process.plan_changes

    # ── coming and going ────────────────────────────────────────────────────────────────────────────────────
    def start(self, pc: Pc) -> None:
        if pc.process is not None:
            return
        process = pc.process = Process(self, pc)
        self.paths.changed()  # no link breaks by that
        process.start()
        if pc.contact is None:
            for begin, end in SEEN_AFTER_S[: None if len(self.pcs) <= SMALL_OFFICE else 3]:
                self.clock.after(self._random.uniform(begin, end), self._announce, process, False)
            if len(self.pcs) <= SMALL_OFFICE:
                self.clock.after(SEEN_EACH_S, self._announce, process, True)

    def _announce(self, process: Process, again: bool) -> None:
        if not process.alive:
            return
        if again:
            self.clock.after(SEEN_EACH_S, self._announce, process, True)
        if process.frozen:
            return
        pc, random = process.pc, self._random.random
        for other in self.processes:
            if other is process or other.frozen or other.pc.contact is not None:
                continue
            if random() >= self.unseen and self.paths.works(pc, other.pc):
                other.see(pc)
            if random() >= self.unseen and self.paths.works(other.pc, pc):
                process.see(other.pc)

    def leave(self, pc: Pc) -> None:
        """Politely."""
        process = pc.process
        if process is not None:
            process.leave()
            self.clock.after(LAST_WORDS_S, self.kill, pc, process)

    def kill(self, pc: Pc, process: Process | None = None) -> None:
        """The process ends, and the kernel closes its connections."""
        if pc.process is not None and process in (None, pc.process):
            ended = self._end(pc)
            self.network.reset(self.processes, ended)
            self.changed()

    def power_cut(self, pc: Pc) -> None:
        """Nobody is told."""
        if pc.process is not None:
            self._end(pc)
            self.changed()

    def _end(self, pc: Pc) -> Process:
        process = pc.process
        assert process is not None
        process.alive = False
        self.lived_s += self.clock.now - process.started_at
        self.plan_changes += process.plan_changes
        pc.process = None
        return process

    def changed(self) -> None:
        """A way, or an agent, came or went."""
        self.paths.changed()
        self.network.review(self.processes)

    # ── being run ───────────────────────────────────────────────────────────────────────────────────────────
    def freeze(self, process: Process) -> None:
        """It is not run, and neither are its links' threads: the PC sleeps, or the process was stopped."""
        process.frozen = True
        self.changed()

    def thaw(self, process: Process) -> None:
        process.frozen = False
        if process.alive:
            self.changed()
            process.catch_up()
