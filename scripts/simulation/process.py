"""One life of an agent: the real machine, and what the real agent does with its effects, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import filterfalse
from random import Random
from typing import TYPE_CHECKING, Any

from meshinfer.mesh.events import (
    AdvertsHeard,
    Event,
    HeartbeatHeard,
    Leave,
    Load,
    LoadDone,
    LoadFailed,
    ModelKnown,
    NeedModel,
    PlanIdle,
    PlanUnusable,
    PlanUsable,
    Retire,
    SelfChanged,
    SendAdverts,
    SendHeartbeat,
    SendSummary,
    Serve,
    SummaryHeard,
    Tick,
    Unload,
    Watch,
)
from meshinfer.mesh.mesh import Mesh
from meshinfer.mesh.plan import plan_id
from meshinfer.values import Advert, ModelId, PeerId, Plan, PlanId, ShardKey, Standing
from simulation import sizes
from simulation.network import Link
from simulation.onlooker import Forger, Machine, Onlooker
from simulation.pc import Pc

if TYPE_CHECKING:
    from simulation.world import World

TICK_LATE_S = 0.002
"""An idle agent is run so late at most."""

STARVED_S = 4.0
"""An agent that is not run for longer may be taken for dead: no other peer can tell the difference."""

LOOK_S = 1.0
SEEN_DIALLED = 8
"""Every so often an agent dials some of those whom it has seen on the network but who are not in its view."""

IDLE_S = 3.0
"""The longest answer: after so long, nothing is under way under a plan that is not used any more."""


class Process:
    """`shards` are those that it loads (False) or has loaded (True); `serving` the plans that it serves, and how."""

    __slots__ = (
        "_acts",
        "_fetching",
        "_inbox",
        "_random",
        "_tick_at",
        "alive",
        "frozen",
        "leaving",
        "links",
        "machine",
        "me",
        "pc",
        "plan_changes",
        "reason",
        "seen",
        "seen_standings",
        "serving",
        "shards",
        "started_at",
        "starved",
        "starved_until",
        "touched",
        "usable",
        "usable_id",
        "watched",
        "world",
    )

    def __init__(self, world: World, pc: Pc) -> None:
        self.world = world
        self.pc = pc
        self.me: PeerId = pc.peer
        self.alive = True
        self.frozen = False
        self.starved = False
        self.starved_until = float("-inf")
        self.leaving = False
        self.started_at = world.clock.now
        self.links: dict[PeerId, Link] = {}
        self.watched: frozenset[PeerId] = frozenset()
        self.seen: set[PeerId] = set()
        self.shards: dict[ShardKey, bool] = {}
        self.touched = False
        """Whether shards or what is served have changed since that was last checked."""
        self.serving: dict[PlanId, tuple[Plan, tuple[ShardKey, ...]]] = {}
        self.usable: Plan | None = None
        self.usable_id: PlanId | None = None
        self.reason = ""
        self.plan_changes = 0
        self._inbox: list[Event] = []
        self._tick_at: float | None = None
        self._fetching: set[ModelId] = set()
        pc.next_incarnation(world.clock.elapsed_s)
        self._random = Random(f"{world.seed}/{pc.number}/{pc.incarnation}")
        self._acts: dict[type, Callable[[Any], None]] = {
            SendHeartbeat: self._send_heartbeat,
            SendAdverts: self._send_adverts,
            SendSummary: self._send_summary,
            Watch: self._watch,
            NeedModel: self._need_model,
            Load: self._load,
            Unload: self._unload,
            Serve: self._serve,
            Retire: self._retire,
            PlanUsable: self._plan_usable,
            PlanUnusable: self._plan_unusable,
        }
        self.seen_standings: tuple[Standing, ...] | None = None
        self.machine = self._machine()

    def _machine(self) -> Machine:
        random, now = Random(self._random.random()), self.world.clock.now
        if self.pc.forging:
            return Forger(self.pc.portrait(), random, now, self.world.models, self.world.truth.forged)
        if self.pc.stubborn:
            return Onlooker(self.pc.portrait(), random, now)
        return Mesh(self.pc.portrait(), self.world.costs, random, now)

    def start(self) -> None:
        for holding in self.pc.holdings:
            self._handle(ModelKnown(self.world.models[holding.model]))
        self._handle(Tick())
        if self.pc.contact is not None:
            self.see(self.pc.contact)
        self._look()

    # ── being run ───────────────────────────────────────────────────────────────────────────────────────────
    def take(self, event: Event) -> None:
        if not self.alive:
            return
        if self.frozen or self.starved:
            self._inbox.append(event)
        else:
            self._handle(event)

    def catch_up(self) -> None:
        """It is run after a while in which it was not: all that came meanwhile, and its timers, in either order."""
        if not self.alive or self.frozen:
            return
        self.starved_until = self.world.clock.now
        inbox, self._inbox = self._inbox, []
        if self._random.random() < 0.5:
            inbox.insert(0, Tick())
        else:
            inbox.append(Tick())
        for event in inbox:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if not self.alive or (isinstance(event, LoadDone | LoadFailed) and not self._load_ends(event)):
            return
        world = self.world
        now = world.clock.now
        acts = self._acts
        for effect in self.machine.handle(event, now):
            acts[type(effect)](effect)
        due = self.machine.next_deadline()
        world.truth.check(self, due)
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            world.clock.at(due + TICK_LATE_S * self._random.random(), self._wake, due)

    def _wake(self, at: float) -> None:
        if at != self._tick_at:
            return
        self._tick_at = None
        if not self.alive or self.frozen or self.starved:
            return
        due = self.machine.next_deadline()
        if due is None:
            return
        if due <= self.world.clock.now:
            self._handle(Tick())
        else:
            self._tick_at = due
            self.world.clock.at(due + TICK_LATE_S * self._random.random(), self._wake, due)

    def leave(self) -> None:
        """Politely: its last words are sent, then it ends."""
        self.leaving = True
        self.take(Leave())

    def change(self) -> None:
        """What the PC is has changed."""
        self.take(SelfChanged(self.pc.portrait()))

    # ── the network ─────────────────────────────────────────────────────────────────────────────────────────
    def _send_heartbeat(self, effect: SendHeartbeat) -> None:
        event = HeartbeatHeard(self.me, effect.heartbeat)
        self.world.network.send(self, effect.peer, event, sizes.HEARTBEAT_BYTES)

    def _send_adverts(self, effect: SendAdverts) -> None:
        size = 0
        for advert in effect.adverts:
            size += self.world.sizes.advert(advert)
            if advert.peer == self.me:
                self.world.truth.published(self, advert)
        event = AdvertsHeard(self.me, effect.adverts)
        for peer in effect.peers:
            self.world.network.send(self, peer, event, sizes.ADVERTS_BYTES + size)

    def _send_summary(self, effect: SendSummary) -> None:
        event = SummaryHeard(self.me, effect.summary)
        self.world.network.send(self, effect.peer, event, sizes.summary(len(effect.summary.marks)))

    def _watch(self, effect: Watch) -> None:
        self.watched = effect.peers
        self._dial(frozenset())

    def see(self, pc: Pc) -> None:
        """mDNS, the configuration, or a knock says that an agent is there."""
        if self.alive and pc.peer != self.me:
            self.seen.add(pc.peer)
            if len(self.links) - len(self.watched) < SEEN_DIALLED:
                self._dial(frozenset() if self.machine.view.is_present(pc.peer) else frozenset((pc.peer,)))

    def meet(self, pc: Pc) -> None:
        """An agent has linked to this one: so this one knows where that is."""
        self.see(pc)

    def _look(self) -> None:
        if not self.alive:
            return
        some = sorted(filterfalse(self.machine.view.is_present, self.seen))
        if len(some) > SEEN_DIALLED:
            some = self._random.sample(some, SEEN_DIALLED)
        self._dial(frozenset(some))
        self.world.clock.after(LOOK_S * (0.9 + 0.2 * self._random.random()), self._look)

    def _dial(self, others: frozenset[PeerId]) -> None:
        self.world.network.want(self, self.watched | others)

    # ── models and shards ───────────────────────────────────────────────────────────────────────────────────
    def _need_model(self, effect: NeedModel) -> None:
        if effect.model in self._fetching or not effect.sources:
            return
        self._fetching.add(effect.model)
        source = self.world.by_peer[effect.sources[0]]
        self.world.clock.after(self._random.uniform(0.05, 0.6), self._fetched, effect.model, source)

    def _fetched(self, model: ModelId, source: Pc) -> None:
        self._fetching.discard(model)
        holds = any(holding.model == model for holding in source.holdings)
        if not self.alive or not holds or not source.running or not self.world.paths.joined(self.pc, source):
            return
        facts = self.world.models[model]
        self.pc.hold(model, facts.name)
        self.take(ModelKnown(facts))
        self.change()

    def _load(self, effect: Load) -> None:
        shard = effect.shard
        self.world.truth.loads(self, shard)
        self.shards[shard] = False
        self.touched = True
        took_s = len(shard.span) * self.pc.load_s * self._random.uniform(0.8, 1.2)
        self.world.clock.after(took_s, self._loaded, shard)

    def _loaded(self, shard: ShardKey) -> None:
        if not self.alive or self.shards.get(shard) is not False:
            return
        if self.pc.disk_full or self._random.random() < self.world.load_failures:
            self.take(LoadFailed(shard, "the disk is full"))
            return
        self.take(LoadDone(shard))
        if self.pc.decode_us == 0:
            self.pc.decode_us = self.pc.true_decode_us
            self.change()

    def lose(self, shard: ShardKey) -> None:
        """A shard that was loaded runs no more."""
        if self.shards.get(shard):
            self.take(LoadFailed(shard, "the device was lost"))

    def _load_ends(self, event: LoadDone | LoadFailed) -> bool:
        """False for a load that was called off meanwhile."""
        shard = event.shard
        if shard not in self.shards or (isinstance(event, LoadDone) and self.shards[shard]):
            return False
        self.touched = True
        if isinstance(event, LoadDone):
            self.shards[shard] = True
        else:
            del self.shards[shard]
        return True

    def _unload(self, effect: Unload) -> None:
        self.world.truth.unloads(self, effect.shard)
        self.shards.pop(effect.shard, None)
        self.touched = True

    def _serve(self, effect: Serve) -> None:
        self.serving[plan_id(effect.plan)] = (effect.plan, effect.shards)
        self.touched = True
        self._go_idle()

    def _retire(self, effect: Retire) -> None:
        self.serving.pop(effect.plan, None)
        self.touched = True

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────
    def _plan_usable(self, effect: PlanUsable) -> None:
        self.plan_changes += self.usable is not None and effect.plan != self.usable
        self.usable, self.usable_id, self.reason = effect.plan, plan_id(effect.plan), ""
        self.world.truth.uses(self, effect.plan)
        self._go_idle()

    def _plan_unusable(self, effect: PlanUnusable) -> None:
        self.plan_changes += self.usable is not None
        self.usable, self.usable_id, self.reason = None, None, effect.reason

    def _go_idle(self) -> None:
        """Answers under plans that this agent serves and does not use come to their end."""
        for plan in self.serving:
            if plan != self.usable_id:
                self.world.clock.after(IDLE_S * self._random.random(), self._idle, plan)

    def _idle(self, plan: PlanId) -> None:
        if plan in self.serving and plan != self.usable_id:
            self.take(PlanIdle(plan))

    @property
    def deaf(self) -> bool:
        """Whether it knows nothing of plans."""
        return isinstance(self.machine, Onlooker)

    @property
    def own(self) -> Advert:
        """Its newest advert."""
        return self.machine.own
