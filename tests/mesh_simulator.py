"""A mesh of real ownership machines in one process with virtual time, replayable by its seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from meshinfer.limits import MIB
from meshinfer.mesh.events import (
    AdvertHeard,
    Effect,
    Event,
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
from meshinfer.mesh.ownership import Ownership
from meshinfer.mesh.placement import Costs, memory_bytes
from meshinfer.mesh.plan import assignment_of, plan_id
from meshinfer.values import (
    Advert,
    Holding,
    KvShape,
    ModelFacts,
    ModelId,
    PeerId,
    Plan,
    PlanId,
    Ports,
    Precision,
    Readiness,
    Standing,
)

COSTS = Costs(
    kv_bytes=lambda kv, precision, device: (
        kv.heads * (kv.key + kv.value) * (4 if precision is Precision.EXACT else 2)
    ),
    layer_bytes=lambda weights: weights + weights // 8,
    span_bytes=lambda hidden: 1024 * hidden,
)


def model(letter: str = "a", layers: int = 6, layer_mib: int = 10) -> ModelFacts:
    """A model of equal layers; with the least KV (256 tokens of 256 bytes a layer) a layer takes 11.3 MiB."""
    return ModelFacts(
        model=ModelId(letter * 64),
        name=f"model-{letter}",
        layer_bytes=(layer_mib * MIB,) * layers,
        kv=(KvShape(1, 64, 64),) * layers,
        embedding_bytes=MIB,
        head_bytes=MIB,
        hidden=64,
        context=256,
        vocabulary=1000,
    )


def peer_id(number: int) -> PeerId:
    return PeerId(f"{number:032x}")


def advert(
    number: int,
    capacity_mib: int = 40,
    *,
    whole: ModelId | None = None,
    partial: ModelId | None = None,
    wants: ModelId | None = None,
    incarnation: int = 1,
    version: int = 1,
    decode_us: int = 0,
    min_owners: int = 1,
    standing: Standing | None = None,
) -> Advert:
    holdings = [Holding(whole, "m", True)] if whole else []
    holdings += [Holding(partial, "m", False)] if partial else []
    return Advert(
        peer=peer_id(number),
        name=f"pc{number}",
        incarnation=incarnation,
        version=version,
        addresses=(),
        ports=Ports(1, 2, 3, 4),
        program="test",
        device="CPU",
        precision=Precision.AUTO,
        capacity_bytes=capacity_mib * MIB,
        decode_us=decode_us,
        holdings=tuple(holdings),
        wants=wants,
        standing=standing,
        min_owners=min_owners,
    )


@dataclass
class Faults:
    """What goes wrong until `World.faults_end`."""

    loss: float = 0.2
    delay_s: float = 1.5
    crashes: int = 2
    leaves: int = 1
    partitions: int = 1
    load_failures: float = 0.1


@dataclass
class SimAgent:
    """What an agent does with the effects, in virtual time."""

    world: World
    own: Advert
    ownership: Ownership = field(init=False)
    known: set[ModelId] = field(default_factory=set)
    loaded: PlanId | None = None
    usable: Plan | None = None
    reason: str = ""
    alive: bool = True
    tick_at: float | None = None
    plan_changes: int = 0

    def __post_init__(self) -> None:
        self.ownership = Ownership(self.own, COSTS, self.world.now)
        for holding in self.own.holdings:
            self.event(ModelKnown(self.world.models[holding.model]))
        self.event(Tick())
        self.beat()

    def event(self, event: Event) -> None:
        if not self.alive:
            return
        for effect in self.ownership.handle(event, self.world.now):
            self._carry_out(effect)
        self.world.check(self)
        due = self.ownership.next_deadline()
        if due is not None and (self.tick_at is None or due < self.tick_at):
            self.tick_at = due
            self.world.at(due, self._tick)

    def beat(self) -> None:
        if self.alive:
            self.world.broadcast(self)
            self.world.at(self.world.now + self.world.random.uniform(0.8, 1.2), self.beat)

    def change(self, **fields: object) -> None:
        """A new version of the own advert."""
        self.own = replace(self.own, version=self.own.version + 1, **fields)  # type: ignore[arg-type]
        self.event(SelfChanged(self.own))
        self.world.broadcast(self)

    def _tick(self) -> None:
        if self.tick_at is not None and self.tick_at <= self.world.now:
            self.tick_at = None
            self.event(Tick())

    def _carry_out(self, effect: Effect) -> None:
        world = self.world
        match effect:
            case Publish(standing):
                self.own = replace(self.own, version=self.own.version + 1, standing=standing)
                world.record(self)
                world.broadcast(self)
            case Load(plan, _, _, _):
                world.check_load(self, plan)
                self.loaded = plan_id(plan)
                world.loads.append((self.own.peer, self.loaded))
                world.at(world.now + world.random.uniform(0.05, 1.5), lambda: self._loaded(plan_id(plan)))
            case Unload(plan_hash):
                assert self.loaded == plan_hash, "unloads what was not loaded"
                self.loaded = None
            case NeedModel(wanted, sources):
                source = world.agents.get(world.random.choice(sources))
                if source is not None and source.alive:
                    world.at(world.now + world.random.uniform(0.05, 0.5), lambda: self._manifest(wanted))
            case PlanUsable(plan):
                world.check_usable(self, plan)
                self.plan_changes += plan != self.usable
                self.usable, self.reason = plan, ""
            case PlanUnusable(reason):
                self.plan_changes += self.usable is not None
                self.usable, self.reason = None, reason

    def _loaded(self, plan_hash: PlanId) -> None:
        if self.loaded != plan_hash:
            return
        if self.world.faulty and self.world.random.random() < self.world.faults.load_failures:
            self.event(LoadFailed(plan_hash, "the disk is full"))
        else:
            self.event(LoadDone(plan_hash))

    def _manifest(self, wanted: ModelId) -> None:
        if wanted not in self.known and self.alive:
            self.known.add(wanted)
            self.event(ModelKnown(self.world.models[wanted]))
            self.change(holdings=(*self.own.holdings, Holding(wanted, "m", False)))


class World:
    """The network, the clock and the invariants. Every choice comes from the seed."""

    def __init__(self, seed: int, faults: Faults, faults_end: float) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.faults_end = faults_end
        self.now = 100.0
        self.started_at = self.now
        self.models = {facts.model: facts for facts in (model("a"), model("b", layers=4))}
        self.agents: dict[PeerId, SimAgent] = {}
        self.events = 0
        self.loads: list[tuple[PeerId, PlanId]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._side: dict[PeerId, int] = {}
        self._accepted: set[tuple[PeerId, int, PlanId]] = set()
        self._ready: set[tuple[PeerId, int, PlanId]] = set()

    @property
    def faulty(self) -> bool:
        return self.now < self.started_at + self.faults_end

    def at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, act))

    def run(self, until: float) -> None:
        """Until so many seconds after the start."""
        end = self.started_at + until
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            self.events += 1
            act()
        self.now = end

    # ── agents come and go ──────────────────────────────────────────────────────────────────────────────
    def start(self, own: Advert) -> None:
        known = {holding.model for holding in own.holdings}
        self.agents[own.peer] = SimAgent(self, own, known=known)

    def crash(self, peer: PeerId) -> None:
        self.agents[peer].alive = False

    def leave(self, peer: PeerId) -> None:
        agent = self.agents[peer]
        if agent.alive:
            agent.alive = False
            for other in self.agents:
                self._send(peer, other, PeerLeft(peer))

    def restart(self, peer: PeerId) -> None:
        agent = self.agents[peer]
        if not agent.alive:
            self.start(replace(agent.own, incarnation=agent.own.incarnation + 1, version=1, standing=None))

    def split(self) -> None:
        self._side = {peer: self.random.randrange(2) for peer in self.agents}

    def heal(self) -> None:
        self._side = {}

    # ── the network ─────────────────────────────────────────────────────────────────────────────────────
    def broadcast(self, agent: SimAgent) -> None:
        heard = AdvertHeard(agent.own)
        for peer in self.agents:
            if peer != agent.own.peer:
                self._send(agent.own.peer, peer, heard)

    def _send(self, sender: PeerId, to: PeerId, event: Event) -> None:
        if self._side.get(sender) != self._side.get(to):
            return
        delay = 0.02 * self.random.random()
        if self.faulty:
            if self.random.random() < self.faults.loss:
                return
            delay = self.faults.delay_s * self.random.random() ** 3
        self.at(self.now + delay, lambda: self._deliver(to, event))

    def _deliver(self, to: PeerId, event: Event) -> None:
        agent = self.agents.get(to)
        if agent is not None:
            agent.event(event)

    # ── invariants ──────────────────────────────────────────────────────────────────────────────────────
    def record(self, agent: SimAgent) -> None:
        standing = agent.own.standing
        if standing is None or standing.readiness is Readiness.FAILED:
            return
        key = (agent.own.peer, agent.own.incarnation, plan_id(standing.plan))
        self._accepted.add(key)
        if standing.readiness is Readiness.READY:
            self._ready.add(key)

    def check_usable(self, agent: SimAgent, plan: Plan) -> None:
        for facts in plan.inputs:
            key = (facts.peer, facts.incarnation, plan_id(plan))
            known = key in self._ready or facts.peer == agent.own.peer
            assert known, f"{agent.own.name} uses a plan before {facts.peer} was ready"

    def check_load(self, agent: SimAgent, plan: Plan) -> None:
        assert agent.loaded is None, f"{agent.own.name} promises its memory twice"
        mine = assignment_of(plan, agent.own.peer)
        assert mine is not None
        needed = memory_bytes(self.models[plan.model], COSTS, mine, agent.own.precision)
        assert needed <= agent.own.capacity_bytes, f"{agent.own.name} promises more memory than it has"
        for facts in plan.inputs:
            key = (facts.peer, facts.incarnation, plan_id(plan))
            accepted = key in self._accepted or facts.peer == agent.own.peer
            assert accepted, f"{agent.own.name} loads before {facts.peer} accepted"

    def check(self, agent: SimAgent) -> None:
        machine, peer = agent.ownership, agent.own.peer
        due = machine.next_deadline()
        assert due is None or due > self.now, "a deadline that has passed: the agent would spin"
        assert machine.usable == (agent.usable is not None)
        standing = machine.standing
        if agent.usable is not None:
            assert machine.plan == agent.usable
            if peer in agent.usable.owners:
                assert standing == Standing(agent.usable, Readiness.READY)
        holds = standing is not None and standing.readiness in (Readiness.LOADING, Readiness.READY)
        assert holds == (agent.loaded is not None), "what is loaded is not what is promised"
        if holds and standing is not None:
            assert agent.loaded == plan_id(standing.plan)

    def disagreement(self) -> str | None:
        """Why the living agents that can hear each other are not of one mind; None when they are."""
        living = [agent for agent in self.agents.values() if agent.alive]
        plans = {agent.usable for agent in living}
        if len(plans) > 1:
            opinions = [(a.own.name, a.usable and plan_id(a.usable)[:6], a.reason) for a in living]
            return f"{len(plans)} opinions: {opinions}"
        plan = next(iter(plans), None)
        if plan is None:
            model_here = any(agent.own.holdings for agent in living)
            stuck = [agent.reason for agent in living if model_here and agent.ownership.shortfall is None]
            return f"no plan, and no reason: {stuck}" if stuck else None
        for facts in plan.inputs:
            owner = self.agents[facts.peer]
            if not owner.alive or owner.own.standing != Standing(plan, Readiness.READY):
                return f"{owner.own.name} does not hold the plan in use"
        holders = [a.own.name for a in living if a.loaded and a.own.peer not in plan.owners]
        return f"{holders} hold memory for another plan" if holders else None


def harsh(seed: int, faults: Faults | None = None, until: float = 12.0) -> World:
    """2 to 7 agents that start, crash, leave, come back and are split from each other until the faults
    end."""
    world = World(seed, faults or Faults(), until)
    random, count = world.random, world.random.randint(2, 7)
    ids = sorted(world.models)
    wanted = [ids[0]] if random.random() < 0.7 else ids
    for number in range(count):
        first = number == 0 or random.random() < 0.2
        choice = random.choice(wanted)
        own = advert(
            number,
            random.choice((0, 8, 20, 30, 30, 40, 80)) + (30 if first else 0),
            whole=choice if first else None,
            wants=choice if first or random.random() < 0.2 else None,
            decode_us=random.choice((0, 100, 100, 300)),
            min_owners=2 if seed % 5 == 0 and number == 1 else 1,
        )
        world.at(world.now + random.uniform(0, 3), lambda own=own: world.start(own))  # type: ignore[misc]
    for _ in range(random.randint(0, world.faults.crashes)):
        _outage(world, random, until, World.crash)
    for _ in range(random.randint(0, world.faults.leaves)):
        _outage(world, random, until, World.leave)
    for _ in range(random.randint(0, world.faults.partitions)):
        begin = random.uniform(3, until - 1)
        world.at(world.now + begin, world.split)
        world.at(world.now + random.uniform(begin, until), world.heal)
    return world


def _outage(world: World, random: Random, until: float, how: Callable[[World, PeerId], None]) -> None:
    begin, again = random.uniform(3, until), random.random() < 0.7

    def go() -> None:
        peer = random.choice(sorted(world.agents))
        how(world, peer)
        if again:
            world.at(world.now + random.uniform(0.1, until - begin + 0.2), lambda: world.restart(peer))

    world.at(world.now + begin, go)
