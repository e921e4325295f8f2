"""The agent of one PC: joins the network, the mesh's decisions, the model's files and the engine in one loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from math import inf
from pathlib import Path
from random import SystemRandom
from typing import Any, Final, assert_never

from meshinfer.agent import report, report_plan
from meshinfer.agent.asker import Asker
from meshinfer.agent.bandwidth import Bandwidth
from meshinfer.agent.bulk import Bulk
from meshinfer.agent.config import Config
from meshinfer.agent.ends import Ends
from meshinfer.agent.library import Library
from meshinfer.agent.loading import Loading
from meshinfer.agent.membership import ensure_membership, load_or_create_identity
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.needs import COSTS
from meshinfer.agent.network import Network
from meshinfer.agent.owner import Owner
from meshinfer.agent.portrait import Portrait
from meshinfer.agent.settings import address
from meshinfer.agent.speeds import Speeds
from meshinfer.agent.tasks import Tasks
from meshinfer.answer.question import Done, Question, Text
from meshinfer.engine.device import choose
from meshinfer.engine.runner import Runner
from meshinfer.errors import RouteError
from meshinfer.mesh.events import (
    AdvertsHeard,
    BandwidthMeasured,
    Effect,
    Event,
    HeartbeatHeard,
    Leave,
    LinkDown,
    LinkUp,
    Load,
    LoadDone,
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
from meshinfer.net import loop as clock
from meshinfer.net.interfaces import usable_addresses
from meshinfer.values import Channel, ModelId, PeerId, PlanId
from meshinfer.wire.messages import (
    Blob,
    Fetch,
    Free,
    Heartbeat,
    Message,
    Missing,
    Ping,
    Pong,
    Probe,
    Probed,
    Refusal,
    Result,
    Step,
    Summary,
)

LOOK_S: Final = 2.0
"""A model that another program pulled, or a new address of this PC, is noticed within this."""

IDLE_LOOK_S: Final = 0.5
"""How soon it is noticed that the last answer under a plan has ended."""

_log = logging.getLogger(__name__)


class Agent:
    """Start it once and stop it once; everything happens in the loop that started it."""

    def __init__(self, home: Path, config: Config) -> None:
        self.home = home
        self.config = config
        self.stopped = asyncio.Event()
        self.metrics = Metrics()
        self.network: Network | None = None
        self._closing = AsyncExitStack()
        self._tasks = Tasks()
        self._served: set[PlanId] = set()
        self._watched: frozenset[PeerId] = frozenset()
        self._asked: frozenset[PeerId] = frozenset()
        """The owners of the plan that questions here are asked under."""
        self._needed: frozenset[PeerId] = frozenset()
        """Whom links are needed to besides those who are watched."""
        self._events: deque[Event] = deque()
        self._handling = True
        """Until the mesh's machine is there, events wait for it."""
        self._due = asyncio.Event()
        self._wakes_at = inf

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────
    async def start(self) -> None:
        """Raises ConfigError, TokenError or ModelError where the person has something to put right."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config, engine = self.config, self.config.engine
        # A slip in a name must not open the door to every network.
        await asyncio.to_thread(usable_addresses, config.network.interfaces)
        self.identity = load_or_create_identity(self.home)
        self.me: PeerId = self.identity.peer
        self.membership = ensure_membership(self.home, self.identity, config.mesh.token, config.name)
        self.device = await asyncio.to_thread(choose, engine.device)
        speeds = Speeds(self.home)
        self._bulk = Bulk(self._send, lambda model: self.library.files(model))
        self._closing.push_async_callback(self._bulk.close)
        self.library = Library(self.home, self._bulk)
        await self.library.refresh()
        self._runner = Runner(self.device.name)
        self._closing.callback(self._runner.close)
        self.owner = Owner(
            self.me,
            self._runner,
            self._send,
            engine.precision,
            engine.threads,
            self.metrics,
            speeds,
            lambda _shard, _speed: self._review(),
        )
        incarnation = int(clock.wall() * 1000)
        # Milliseconds leave 20 bits for the questions of one run: nobody asks a thousand a second for long.
        self.asker = Asker(self.me, self._runner, self._send, self.metrics, self.name_of, incarnation << 20)
        self._closing.push_async_callback(self.asker.close)
        library, spawn = self.library, self._tasks.spawn
        self._loading = Loading(
            self.me, library, self.owner, lambda: self.mesh.view.present, self._linked, self._handle, spawn
        )
        fetch = self._loading.fetch_ends
        self._ends = Ends(self.asker, library, self._runner, engine, self.device.name, fetch, spawn)
        self._bandwidth = Bandwidth(self._send, self._busy, self._round_trip_us, self._measured)
        if self.membership is not None:
            self.network = await self._open_network()
        self._portrait = Portrait(self.me, incarnation, config, self.device, library, speeds, self.network)
        self._shown = self._portrait.draw(None)
        self._shown_model: ModelId | None = None
        self.mesh = Mesh(self._shown, COSTS, SystemRandom(), clock.monotonic())
        self._handling = False
        self._tell_models()
        for work in (self._pass_time, self._look_around, self._look_for_idle, self._measure_links):
            self._tasks.keep_doing(work)

    async def _open_network(self) -> Network:
        assert self.membership is not None
        network = Network(
            self.identity,
            self.membership,
            self.config.network,
            self.metrics,
            self._receive,
            lambda sender, adverts: self._handle(AdvertsHeard(sender, adverts)),
            self._link_changed,
        )
        self._closing.push_async_callback(network.close)
        self._closing.callback(self._handle, Leave())
        # Before the goodbye: owners are told what they may forget.
        self._closing.push_async_callback(self.asker.close)
        await network.open(_places(self.membership.addresses))
        return network

    async def stop(self) -> None:
        """Says goodbye, and gives everything back. Safe to call more than once."""
        if self.stopped.is_set():
            return
        try:
            await self._tasks.end()
            await self._closing.aclose()
            # What came in while the sockets closed may have begun more.
            await self._tasks.end()
        finally:
            self.stopped.set()

    async def _pass_time(self) -> None:
        """Wakes the mesh's machine when it wants to be."""
        while True:
            self._due.clear()
            self._wakes_at = self.mesh.next_deadline()
            try:
                async with asyncio.timeout(self._wakes_at - clock.monotonic()):
                    await self._due.wait()
            except TimeoutError:
                if self.mesh.next_deadline() <= clock.monotonic():
                    self._handle(Tick())

    async def _look_around(self) -> None:
        """What changes outside: models on the disk, this PC's addresses; and KV that nobody asked for any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.library.refresh()
            if self.network is not None:
                await self.network.refresh()
                self.network.keep(self.mesh.view.known)
                self._want_links()
                self._ask_for_links(self._needed)
            self._tell_models()
            self._runner.expire()
            self._review()
            self._ends.look_again()

    def _tell_models(self) -> None:
        for facts in self.library.facts():
            if self.mesh.facts(facts.model) is None:
                self._handle(ModelKnown(facts))

    async def _look_for_idle(self) -> None:
        """Plans without an answer under way may have been replaced, and can be let go of."""
        while True:
            await asyncio.sleep(IDLE_LOOK_S)
            for plan in [plan for plan in self._served if self.owner.idle(plan)]:
                self._handle(PlanIdle(plan))

    async def _measure_links(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._bandwidth.follow(self._probed())
            await self._bandwidth.measure()

    # ── events and effects ──────────────────────────────────────────────────────────────────────────────────
    def _handle(self, event: Event) -> None:
        """Effects may bring further events about: those wait until the effects of this one are carried out."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                for effect in self.mesh.handle(event, clock.monotonic()):
                    try:
                        self._do(effect)
                    except Exception:  # a defect, but the mesh counts on all the others
                        _log.exception("a decision was not carried out: %s", type(effect).__name__)
                # Others wait for the news that a model is here; and memory and speed are those for the mesh's model.
                if isinstance(event, ModelKnown | LoadDone) or self._model() != self._shown_model:
                    self._review()
        finally:
            self._handling = False
        self._drop_lost()
        if self.mesh.next_deadline() < self._wakes_at:
            self._due.set()

    def _review(self) -> None:
        """Tell the mesh, and through it the others, when something about this agent has changed."""
        model = self._shown_model = self._model()
        portrait = self._portrait.draw(None if model is None else self.mesh.facts(model))
        if portrait != self._shown:
            self._shown = portrait
            self._handle(SelfChanged(portrait))

    def _model(self) -> ModelId | None:
        """The one that the mesh serves or is about to."""
        plan = self.mesh.plan
        return plan.model if plan is not None else self.mesh.model or self._shown.wants

    def _do(self, effect: Effect) -> None:
        match effect:
            case SendHeartbeat(peer, heartbeat):
                self._send(peer, heartbeat)
            case SendSummary(peer, summary):
                self._send(peer, summary)
            case SendAdverts(peers, adverts):
                if self.network is not None:
                    self.network.send_adverts(peers, adverts)
            case Watch(peers):
                self._watched = peers
                self._want_links()
            case NeedModel(model, sources):
                self._loading.need(model, sources)
                self._want_links()
            case Load(shard):
                self._loading.load(shard)
                self._want_links()
            case Unload(shard):
                self._loading.unload(shard)
            case Serve(plan, shards):
                self._served.add(plan_id(plan))
                self.owner.serve(plan, shards)
            case Retire(gone):
                self._served.discard(gone)
                self.owner.retire(gone)
            case PlanUsable(plan):
                _log.info("plan %s is usable: %s", plan_id(plan)[:12], ", ".join(map(str, plan.owners)))
                facts = self.mesh.facts(plan.model)
                assert facts is not None, "a usable plan's model is known"
                self._asked = frozenset(plan.owners)
                self._want_links()
                self._ends.prepare(plan, self._portrait.why_not_ask(facts))
            case PlanUnusable(reason):
                _log.info("no plan: %s", reason)
                self._ends.drop_plan()
                self.asker.stop_using(reason, coming=self.mesh.plan is not None)
            case _:
                assert_never(effect)

    # ── who is there ────────────────────────────────────────────────────────────────────────────────────────
    def _link_changed(self, peer: PeerId, channel: Channel, up: bool) -> None:
        if channel is Channel.CONTROL:
            self._handle(LinkUp(peer) if up else LinkDown(peer))
            self._ask_for_links([peer])
        elif channel is Channel.DATA and not up:
            self.asker.lost(peer, "cannot be reached")

    def _drop_lost(self) -> None:
        """Answers do not wait for owners that are not here any more."""
        for peer in self.asker.owners:
            if not self.mesh.view.is_present(peer):
                self.asker.lost(peer, "is gone")

    def _want_links(self) -> None:
        if self.network is not None:
            needed = self._asked | self.asker.owners | self._loading.sources
            self._needed = needed - self._watched - {self.me}
            self.network.links.want(self._watched | self._needed)

    def _ask_for_links(self, peers: Iterable[PeerId]) -> None:
        """Whom this agent needs and does not watch has no reason of its own to hold a link back: a ping gives one."""
        for peer in self._needed.intersection(peers):
            self._send(peer, Ping(0))

    def _linked(self, peer: PeerId, channel: Channel = Channel.CONTROL) -> bool:
        return self.network is not None and self.network.transport.linked(peer, channel)

    def _probed(self) -> list[PeerId]:
        return [peer for peer in self._watched if self._linked(peer, Channel.BULK)]

    def _busy(self) -> bool:
        """Whether a probe would be in the way of something, or something in its."""
        idle = all(map(self.owner.idle, self._served))
        return not idle or bool(self.asker.under_way or self._loading.models)

    def _round_trip_us(self, peer: PeerId) -> int:
        return next((link.round_trip_us for link in self.mesh.view.own.links if link.peer == peer), 0)

    def _measured(self, peer: PeerId, kbit_s: int) -> None:
        _log.info("the link to %s carries %d kbit/s", self.name_of(peer), kbit_s)
        self._handle(BandwidthMeasured(peer, kbit_s))

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────
    async def ask(self, question: Question) -> AsyncIterator[Text | Done]:
        """Streams the answer; closing the iterator cancels it.

        Raises RouteError while nothing can be asked, PromptError, BusyError, or StepError where the answer fails.
        """
        await self._ends.prepared()
        reason = self.why_not_ready()
        if reason is not None:
            raise RouteError(reason)
        self._ends.check_model(question)
        async for event in self.asker.ask(question):
            yield event

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────
    def _send(self, peer: PeerId, message: Message) -> bool:
        """To a peer, or to this agent itself; False when it cannot be handed over now."""
        if peer == self.me:
            asyncio.get_running_loop().call_soon(self._receive, self.me, message)
            return True
        return self.network is not None and self.network.send(peer, message)

    def _receive(self, sender: PeerId, message: Message) -> None:
        match message:
            case Step():
                self.owner.step(sender, message)
            case Result():
                self.asker.result(sender, message)
            case Refusal():
                self.asker.refusal(sender, message)
            case Free():
                self.owner.free(sender, message)
            case Fetch() | Blob() | Missing():
                self._bulk.received(sender, message)
            case Heartbeat():
                self._handle(HeartbeatHeard(sender, message))
            case Summary():
                self._handle(SummaryHeard(sender, message))
            case Probe() | Probed():
                self._bandwidth.received(sender, message)
            case Ping(token) if self.network is not None:
                self.network.links.host(sender)
                self._send(sender, Pong(token))
            case _:
                self.metrics.count("ignored.message")

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────
    def name_of(self, peer: PeerId) -> str:
        advert = self.mesh.view.known.get(peer)
        return advert.name if advert is not None else peer[:8]

    def why_not_ready(self) -> str | None:
        """Why nothing can be asked on this PC now, in a sentence; None when it can."""
        if not self.mesh.usable:
            return self.mesh.reason
        if self._ends.trouble is not None:
            return self._ends.trouble
        if self.asker.model is None:
            return "the embedding and the head are being loaded"
        return None

    @property
    def progress(self) -> dict[str, tuple[int, int]]:
        """What is being fetched: bytes done and bytes in all."""
        return self._loading.progress

    def status(self) -> dict[str, Any]:
        return report.status(self)

    def peers(self) -> list[dict[str, Any]]:
        return report.peers(self)

    def plan(self) -> dict[str, Any]:
        return report_plan.plan(self)

    def models(self) -> list[dict[str, Any]]:
        return self.library.as_json()


def _places(addresses: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """`host:port` as a token carries them."""
    return tuple((found.host, found.port) for found in map(address, addresses))
