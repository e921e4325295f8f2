"""What goes wrong in the office, one fault after the other, and how each of them ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from meshinfer.limits import MIB
from meshinfer.values import Objective, Precision
from simulation.clock import START_S
from simulation.pc import Pc
from simulation.process import STARVED_S, Process
from simulation.profiles import Profile
from simulation.world import World

LONGEST_S = 10.0
"""Of one fault; the shortest takes a hundredth of that."""

STORM_LOSS = 0.7


class Faults:
    """Faults until `until`, when all have ended but for what the profile leaves behind."""

    def __init__(self, world: World, profile: Profile, until: float) -> None:
        self._world = world
        self._profile = profile
        self._until = until
        self._random = Random(f"{world.seed}/faults")
        self._kinds = sorted(profile.kinds)
        self._weights = [profile.kinds[kind] for kind in self._kinds]
        self.last_at = world.clock.now
        """When the last fault ended."""
        self.count = 0
        self.story: list[str] = []
        """What happened, for whoever wants to know why something failed."""

    def _tell(self, what: str) -> None:
        self.story.append(f"{self._world.clock.elapsed_s:8.3f} s: {what}")

    def begin(self) -> None:
        world, profile = self._world, self._profile
        world.network.weather = profile.weather
        world.load_failures = profile.load_failures
        world.unseen = profile.unseen
        world.clock.at(self._until, self._end)
        if profile.every_s > 0:
            self._next()

    def _end(self) -> None:
        world = self._world
        world.network.weather = self._profile.after
        world.load_failures = 0.0
        world.unseen = 0.0
        if any(pc.contact is not None for pc in world.pcs):
            self._revive_contacts()
        elif self._profile.scars:
            self._leave_scars()
        if self._profile.every_s > 0:
            self.last_at = world.clock.now

    def _next(self) -> None:
        clock = self._world.clock
        clock.after(self._random.expovariate(1.0 / self._profile.every_s), self._happen)

    def _happen(self) -> None:
        if self._world.clock.now >= self._until:
            return
        kind = self._random.choices(self._kinds, self._weights)[0]
        self.count += 1
        getattr(self, f"_{kind}")()
        self._next()

    # ── choices ─────────────────────────────────────────────────────────────────────────────────────────────
    def _lasting(self) -> float:
        """When a fault that begins now ends: most are short."""
        return min(self._world.clock.now + LONGEST_S * self._random.uniform(0.1, 1.0) ** 2, self._until)

    def _running(self) -> Pc | None:
        running = [pc for pc in self._world.pcs if pc.process is not None]
        return self._random.choice(running) if running else None

    def _two(self) -> tuple[Pc, Pc] | None:
        if len(self._world.pcs) < 2:
            return None
        one, other = self._random.sample(list(self._world.pcs), 2)
        return one, other

    def _concern(self, pcs: Sequence[Pc]) -> None:
        for pc in pcs:
            pc.faults += 1

    def _relieve(self, pcs: Sequence[Pc]) -> None:
        now = self._world.clock.now
        for pc in pcs:
            pc.faults -= 1
            pc.calm_since = now

    # ── agents that come and go ─────────────────────────────────────────────────────────────────────────────
    def _kill(self) -> None:
        pc = self._running()
        if pc is not None:
            self._tell(f"{pc.name} is killed")
            self._world.kill(pc)
            self._back_later(pc)

    def _power_cut(self) -> None:
        pc = self._running()
        if pc is not None:
            self._tell(f"{pc.name} loses power")
            self._world.power_cut(pc)
            self._back_later(pc)

    def _leave(self) -> None:
        pc = self._running()
        if pc is not None:
            self._tell(f"{pc.name} leaves")
            self._world.leave(pc)
            self._back_later(pc)

    def _back_later(self, pc: Pc) -> None:
        if self._random.random() < 0.8:
            until = self._lasting()
            self._tell(f"{pc.name} will be back at {until - START_S:.3f} s")
            self._world.clock.at(until, self._world.start, pc)

    def _restart_at_once(self) -> None:
        pc = self._running()
        if pc is not None:
            self._tell(f"{pc.name} is restarted")
            self._world.kill(pc)
            self._world.start(pc)

    def _start(self) -> None:
        asleep = [pc for pc in self._world.pcs if pc.process is None]
        if asleep:
            pc = self._random.choice(asleep)
            self._tell(f"{pc.name} starts")
            self._world.start(pc)

    # ── agents that are not run ─────────────────────────────────────────────────────────────────────────────
    def _freeze(self) -> None:
        pc = self._running()
        if pc is None or pc.process is None or pc.process.frozen:
            return
        self._concern([pc])
        until = self._lasting()
        self._tell(f"{pc.name} is frozen until {until - START_S:.3f} s")
        self._world.freeze(pc.process)
        self._world.clock.at(until, self._thaw, pc, pc.process)

    def _thaw(self, pc: Pc, process: Process) -> None:
        self._relieve([pc])
        self._world.thaw(process)

    def _starve(self) -> None:
        pc = self._running()
        if pc is None or pc.process is None or pc.process.starved:
            return
        until = self._lasting()
        self._tell(f"{pc.name} is starved until {until - START_S:.3f} s")
        pc.process.starved = True
        self._starve_on(pc.process, until)

    def _starve_on(self, process: Process, until: float) -> None:
        """It is run now and then, and its links stand meanwhile."""
        now = self._world.clock.now
        if now >= until:
            process.starved = False
        process.catch_up()
        if now < until:
            pause_s = STARVED_S * self._random.uniform(0.05, 1.0)
            self._world.clock.at(min(now + pause_s, until), self._starve_on, process, until)

    # ── the network ─────────────────────────────────────────────────────────────────────────────────────────
    def _split(self) -> None:
        sides = self._random.choice((2, 2, 3))
        self._split_until({pc.number: self._random.randrange(sides) for pc in self._world.pcs})

    def _isolate(self) -> None:
        """One PC's interface goes down."""
        pc = self._random.choice(self._world.pcs)
        self._split_until({pc.number: 1})

    def _split_until(self, sides: dict[int, int]) -> None:
        until = self._lasting()
        other = [f"pc{number}" for number, side in sides.items() if side]
        self._tell(f"{' '.join(other)} split off until {until - START_S:.3f} s")
        split = self._world.paths.split(sides)
        self._world.changed()
        self._disturb()
        self._world.clock.at(until, self._heal, split)

    def _heal(self, split: int) -> None:
        self._world.paths.heal(split)
        self._world.changed()
        self._disturb()

    def _disturb(self) -> None:
        """Where the network falls into parts, those of one part may have had only the others between them."""
        for pc in self._world.pcs:
            pc.calm_since = self._world.clock.now

    def _cut(self) -> None:
        pair = self._two()
        if pair is not None:
            self._interrupt([pair, pair[::-1]], self._lasting())

    def _one_way(self) -> None:
        pair = self._two()
        if pair is not None:
            self._interrupt([pair], self._lasting())

    def _interrupt(self, ways: Sequence[tuple[Pc, Pc]], until: float) -> None:
        for one, other in ways:
            self._tell(f"nothing goes from {one.name} to {other.name} until {until - START_S:.3f} s")
            self._world.paths.cut(one, other)
        self._world.changed()
        self._world.clock.at(until, self._mend, ways)

    def _mend(self, ways: Sequence[tuple[Pc, Pc]]) -> None:
        for one, other in ways:
            self._world.paths.mend(one, other)
        self._world.changed()

    def _flap(self) -> None:
        pair = self._two()
        if pair is not None:
            self._flap_on([pair, pair[::-1]], self._random.randint(2, 5))

    def _flap_on(self, ways: Sequence[tuple[Pc, Pc]], times: int) -> None:
        now = self._world.clock.now
        if times == 0 or now >= self._until:
            return
        self._interrupt(ways, min(now + self._random.uniform(0.2, 4.0), self._until))
        self._world.clock.after(self._random.uniform(4.0, 6.0), self._flap_on, ways, times - 1)

    def _storm(self) -> None:
        """Most messages are lost for a while: that may look like anything."""
        self._world.network.weather = replace(self._profile.weather, loss=STORM_LOSS)
        self._concern(self._world.pcs)
        until = self._lasting()
        self._tell(f"most is lost until {until - START_S:.3f} s")
        self._world.clock.at(until, self._calm)

    def _calm(self) -> None:
        self._relieve(self._world.pcs)
        if self._world.clock.now < self._until:
            self._world.network.weather = self._profile.weather

    # ── what PCs are ────────────────────────────────────────────────────────────────────────────────────────
    def _change(self) -> None:
        """A person makes room or takes it, wants another model, or sets something else."""
        pc, random = self._random.choice(self._world.pcs), self._random
        match random.randrange(6):
            case 0 | 1:
                pc.capacity_bytes = random.choice((0, 12, 25, 40, 60, 90)) * MIB
            case 2:
                pc.wants = random.choice((None, *sorted(holding.model for holding in pc.holdings)))
            case 3:
                pc.min_owners = random.choice((1, 1, 2, 3))
            case 4:
                pc.objective = random.choice(tuple(Objective))
            case _:
                pc.precision = random.choice(tuple(Precision))
                pc.decode_us = random.choice((0, 100, 400))
        self._tell(
            f"{pc.name} changes: {pc.capacity_bytes // MIB} MiB, wants {pc.wants and pc.wants[0]}, "
            f"{pc.min_owners} owners, {pc.objective.value}, {pc.precision.value}, {pc.decode_us} us"
        )
        if pc.process is not None:
            pc.process.change()

    def _turn_clock(self) -> None:
        self._random.choice(self._world.pcs).wall_s += self._random.uniform(-1e5, 1e5)

    def _lose_shard(self) -> None:
        pc = self._running()
        if pc is not None and pc.process is not None and not pc.process.frozen and pc.process.shards:
            self._tell(f"{pc.name} loses a shard")
            pc.process.lose(sorted(pc.process.shards, key=str)[0])

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────
    def _revive_contacts(self) -> None:
        """Where nobody can be found but at the places in the configurations, those who are there must run."""
        for pc in self._world.pcs:
            if pc.contact is not None:
                self._world.start(pc.contact)

    def _leave_scars(self) -> None:
        random, paths = self._random, self._world.paths
        for _ in range(random.choice((0, 0, 1, 2))):
            pair = self._two()
            if pair is not None:
                self._tell(f"{pair[0].name} and {pair[1].name} stay apart")
                paths.cut(*pair)
                if random.random() < 0.5:
                    paths.cut(*pair[::-1])
        if random.random() < 0.1:
            sides = {pc.number: random.randrange(2) for pc in self._world.pcs}
            self._tell(
                f"the office stays split: {' '.join(f'pc{number}' for number in sides if sides[number])}"
            )
            paths.split(sides)
        self._world.changed()
