"""The agent of one PC: joins the network, the mesh's decisions, the model's files and the engine in one loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, assert_never

from meshinfer import __version__, limits
from meshinfer.agent import report
from meshinfer.agent.asker import Asker
from meshinfer.agent.bulk import Bulk
from meshinfer.agent.config import Config, Split
from meshinfer.agent.library import Library
from meshinfer.agent.membership import ensure_membership, load_or_create_identity
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.network import Network
from meshinfer.agent.owner import Owner
from meshinfer.agent.settings import address
from meshinfer.agent.speaker import Speaker
from meshinfer.agent.speeds import Speeds
from meshinfer.agent.threads import to_its_end
from meshinfer.answer.question import Done, Question, Text
from meshinfer.engine.blocks import kv_bytes_per_token
from meshinfer.engine.device import choose
from meshinfer.engine.memory import asker_cost_bytes, layer_cost_bytes, span_fixed_bytes
from meshinfer.engine.runner import Runner
from meshinfer.errors import CapacityError, MeshinferError, ModelError, RouteError
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
from meshinfer.mesh.placement import Costs
from meshinfer.mesh.plan import plan_id
from meshinfer.net import loop as clock
from meshinfer.net.interfaces import usable_addresses
from meshinfer.net.process import give_back
from meshinfer.values import Advert, Channel, ModelFacts, ModelId, PeerId, Plan, PlanId, Ports
from meshinfer.wire import codec
from meshinfer.wire.advert import decode_advert, encode_advert
from meshinfer.wire.messages import (
    AdvertMessage,
    Blob,
    Fetch,
    Free,
    Goodbye,
    Message,
    Missing,
    Ping,
    Pong,
    Refusal,
    Result,
    Step,
)

LOOK_S: Final = 2.0
"""A model that another program pulled, or a new address of this PC, is noticed within this."""

PREPARE_AGAIN_S: Final = 30.0
"""Embedding and head that could not be had are tried again after so long: who has them may be back, or a disk empty."""

NOWHERE: Final = Ports(1, 1, 1, 1)
"""The ports of an agent that is in no mesh: it listens nowhere, and nobody sees its advert."""

_CHANNELS: Final[dict[type[Any], Channel]] = {
    AdvertMessage: Channel.CONTROL,
    Goodbye: Channel.CONTROL,
    Ping: Channel.CONTROL,
    Pong: Channel.CONTROL,
    Step: Channel.DATA,
    Result: Channel.DATA,
    Refusal: Channel.DATA,
    Free: Channel.DATA,
    Fetch: Channel.BULK,
    Blob: Channel.BULK,
    Missing: Channel.BULK,
}

_log = logging.getLogger(__name__)


class Agent:
    """Start it once and stop it once; everything happens in the loop that started it."""

    def __init__(self, home: Path, config: Config) -> None:
        self.home = home
        self.config = config
        self.stopped = asyncio.Event()
        self.metrics = Metrics()
        self.network: Network | None = None
        self.progress: dict[str, tuple[int, int]] = {}
        """What is being fetched: bytes done and bytes in all."""
        self._closing = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[PlanId, asyncio.Task[None]] = {}
        self._fetching: set[ModelId] = set()
        self._version = 0
        self._message: tuple[Advert, AdvertMessage] | None = None
        self._incarnation = int(clock.wall() * 1000)
        self._due = asyncio.Event()
        self._speaker: Speaker | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._making = asyncio.Lock()
        self._cannot_ask: str | None = None
        """Why nobody can be answered here though there is a plan."""
        self._prepare_again_at: float | None = None

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
        self._speeds = Speeds(self.home)
        self._bulk = Bulk(self._send, lambda model: self.library.files(model))
        self._closing.push_async_callback(self._bulk.close)
        self.library = Library(self.home, self._bulk)
        await self.library.refresh()
        self._runner = Runner(self.device.name)
        self._closing.callback(self._runner.close)
        self.owner = Owner(self.me, self._runner, self._send, engine.precision, engine.threads, self.metrics)
        # Milliseconds leave 20 bits for the questions of one run: nobody asks a thousand a second for long.
        first_sequence = self._incarnation << 20
        self.asker = Asker(self.me, self._runner, self._send, self.metrics, self.name_of, first_sequence)
        self._closing.push_async_callback(self.asker.close)
        if self.membership is not None:
            self.network = Network(
                self.identity,
                self.membership,
                config.network,
                self.metrics,
                self._receive,
                lambda advert: self._handle(AdvertHeard(advert)),
                self._link_changed,
            )
            self._closing.push_async_callback(self.network.close)
            self._closing.callback(self.network.broadcast, Goodbye())
            # Before the goodbye: owners are told what they may forget.
            self._closing.push_async_callback(self.asker.close)
            await self.network.open(_places(self.membership.addresses))
        costs = Costs(kv_bytes_per_token, layer_cost_bytes, span_fixed_bytes)
        self._shown = self._portrait(None)
        self.ownership = Ownership(_as_decoded(self._shown), costs, clock.monotonic())
        for facts in self.library.facts():
            self._handle(ModelKnown(facts))
        self._spawn(self._go_on(self._beat))
        self._spawn(self._go_on(self._look_around))

    async def stop(self) -> None:
        """Says goodbye, and gives everything back. Safe to call more than once."""
        if self.stopped.is_set():
            return
        try:
            await self._end_tasks()
            await self._closing.aclose()
            # What came in while the sockets closed may have begun more.
            await self._end_tasks()
        finally:
            self.stopped.set()

    async def _end_tasks(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A defect: said loudly, and the agent goes on with what still works.
            _log.error("a task of the agent failed", exc_info=error)

    async def _beat(self) -> None:
        """The advert goes out at every heartbeat; ownership is woken when it wants to be."""
        loop = asyncio.get_running_loop()
        while True:
            beat_at = loop.time() + limits.HEARTBEAT_S
            self._advertise()
            while (left := beat_at - loop.time()) > 0:
                deadline = self.ownership.next_deadline()
                due_s = left if deadline is None else min(left, max(0.0, deadline - clock.monotonic()))
                self._due.clear()
                try:
                    async with asyncio.timeout(due_s):
                        await self._due.wait()
                except TimeoutError:
                    self._handle(Tick())

    async def _go_on(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begins `work`, which has no end, anew where something breaks it: a disk, an interface, a defect."""
        while True:
            try:
                await work()
            except Exception:
                _log.exception("the agent goes on after an error")
                await asyncio.sleep(limits.HEARTBEAT_S)

    async def _look_around(self) -> None:
        """What changes outside: models on the disk, this PC's addresses; and KV that nobody asked for any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.library.refresh()
            if self.network is not None:
                await self.network.refresh()
            for facts in self.library.facts():
                if self.ownership.facts(facts.model) is None:
                    self._handle(ModelKnown(facts))
            self._runner.expire()
            self._review()
            if self._prepare_again_at is not None and self._prepare_again_at <= clock.monotonic():
                self._prepare(self.ownership.plan if self.ownership.usable else None)

    # ── what this agent says of itself ──────────────────────────────────────────────────────────────────────
    def _portrait(self, facts: ModelFacts | None) -> Advert:
        """This agent's advert without its standing and version. `facts` are of the mesh's model."""
        network = self.network
        return Advert(
            peer=self.me,
            name=self.config.name,
            incarnation=self._incarnation,
            version=0,
            addresses=network.addresses() if network else (),
            ports=network.ports if network else NOWHERE,
            program=__version__,
            device=self.device.name,
            precision=self.config.engine.precision,
            capacity_bytes=self._capacity_bytes(facts),
            decode_us=self._decode_us(facts),
            holdings=self.library.holdings(),
            wants=self.library.wanted(self.config.model.default),
            standing=None,
            min_owners=limits.ROUTE_HOPS if self.config.placement.split is Split.ALWAYS else 1,
        )

    def _capacity_bytes(self, facts: ModelFacts | None) -> int:
        """What spans may use here: all that is shared, less what asking takes where this PC asks and has the room."""
        shared = self.config.sharing.memory_bytes
        if not self.config.sharing.lend:
            return 0
        if facts is None or self._ask_refused(facts) is not None:
            return shared
        return shared - asker_cost_bytes(facts)

    def _link_changed(self, peer: PeerId, channel: Channel, up: bool) -> None:
        """A new peer hears of this agent at once, and not at the next heartbeat."""
        if up and channel is Channel.CONTROL:
            self._send(peer, self._signed())

    def _decode_us(self, facts: ModelFacts | None) -> int:
        """What one layer of the mesh's model takes here, 0 until it was measured."""
        engine = self.config.engine
        if facts is None:
            return 0
        return self._speeds.get(facts.model, self.device.name, engine.precision, engine.threads)

    def _ask_refused(self, facts: ModelFacts) -> str | None:
        """Why nobody may ask on this PC, by its settings or its memory."""
        sharing = self.config.sharing
        if not sharing.ask:
            return "this PC only lends ([sharing] ask = false): ask on another one, or change that"
        needed = asker_cost_bytes(facts)
        if needed >= sharing.memory_bytes:
            return (
                f"asking {facts.name} takes {report.mib(needed)} here (its embedding and head), and [sharing] memory "
                f"is {report.mib(sharing.memory_bytes)}: share more, or ask on another PC"
            )
        return None

    def _facts(self) -> ModelFacts | None:
        """Of the model that the mesh serves or is about to."""
        plan, own = self.ownership.plan, self.ownership.view.own
        model = plan.model if plan is not None else self.ownership.model or own.wants
        return None if model is None else self.ownership.facts(model)

    def _review(self) -> None:
        """Tell ownership, and through it the others, when something about this agent has changed."""
        portrait = self._portrait(self._facts())
        if portrait == self._shown:
            return
        self._shown = portrait
        self._version += 1
        self._handle(SelfChanged(_as_decoded(replace(portrait, version=self._version))))
        self._advertise()

    def _advertise(self) -> None:
        """To all whose link is up."""
        if self.network is not None:
            self.network.broadcast(self._signed())

    def _signed(self) -> AdvertMessage:
        """The advert as it is now; signed once for each version."""
        own = self.ownership.view.own
        if self._message is None or self._message[0] != own:
            payload = encode_advert(own)
            self._message = (own, AdvertMessage(payload, self.identity.sign(payload)))
        return self._message[1]

    # ── events and effects ──────────────────────────────────────────────────────────────────────────────────
    def _handle(self, event: Event) -> None:
        effects = self.ownership.handle(event, clock.monotonic())
        for effect in effects:
            self._do(effect)
        if effects:
            self._review()
            self._due.set()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Publish(_):
                self._version += 1
                self.ownership.view.set_own(replace(self.ownership.view.own, version=self._version))
                self._advertise()
            case NeedModel(model, sources):
                if model not in self._fetching:
                    self._fetching.add(model)
                    self._spawn(self._get_manifest(model, sources))
            case Load():
                task = self._spawn(self._load(effect))
                self._loads[plan_id(effect.plan)] = task
            case Unload(gone):
                loading = self._loads.pop(gone, None)
                if loading is not None:
                    loading.cancel()
                self.owner.unload(gone)
            case PlanUsable(plan):
                _log.info("plan %s is usable: %s", plan_id(plan)[:12], ", ".join(map(str, plan.owners)))
                self._prepare(plan)
            case PlanUnusable(reason):
                _log.info("no plan: %s", reason)
                self._prepare(None)
                self.asker.stop_using(reason)
            case _:
                assert_never(effect)

    # ── carrying out ────────────────────────────────────────────────────────────────────────────────────────
    def _holders(self, model: ModelId) -> list[PeerId]:
        """Peers that have the model, whole ones first."""
        now = clock.monotonic()
        found = [
            (not holding.complete, advert.peer)
            for advert in self.ownership.view.peers(now)
            for holding in advert.holdings
            if holding.model == model and advert.peer != self.me
        ]
        return [peer for _, peer in sorted(found)]

    async def _get_manifest(self, model: ModelId, sources: Sequence[PeerId]) -> None:
        try:
            name = self._model_name(model)
            files = await self.library.fetch_manifest(model, name, sources)
            self._handle(ModelKnown(files.manifest.facts(files.name)))
            self._review()
        except ModelError as error:
            _log.info("the description of model %s did not come: %s", model[:12], error)
        finally:
            self._fetching.discard(model)

    def _model_name(self, model: ModelId) -> str:
        for advert in self.ownership.view.peers(clock.monotonic()):
            for holding in advert.holdings:
                if holding.model == model:
                    return holding.name
        return model[:12]

    async def _load(self, load: Load) -> None:
        plan, model = plan_id(load.plan), load.plan.model
        try:
            files = self.library.files(model)
            if files is None:
                raise ModelError(f"the description of model {model[:12]} is gone from this PC's disk")
            await self.library.fetch(
                files, load.span, False, lambda: self._holders(model), self._progress("layers")
            )
            measured_us = await self.owner.load(load.plan, load.span, load.device, load.pool_tokens, files)
            await asyncio.to_thread(give_back)
            engine = self.config.engine
            self._speeds.put(model, load.device, engine.precision, engine.threads, measured_us)
        except MeshinferError as error:
            _log.warning("layers %s of %s cannot be served: %s", load.span, model[:12], error)
            self._handle(LoadFailed(plan, str(error)))
        except Exception as error:
            # A defect, but a load without an end would keep the whole mesh waiting.
            _log.exception("layers %s of %s cannot be served", load.span, model[:12])
            self._handle(LoadFailed(plan, f"an unexpected {type(error).__name__} while loading: see its log"))
        else:
            self._handle(LoadDone(plan))
        finally:
            self.progress.pop("layers", None)
            if self._loads.get(plan) is asyncio.current_task():
                del self._loads[plan]

    def _progress(self, what: str) -> Any:
        def update(done: int, total: int) -> None:
            self.progress[what] = (done, total)

        return update

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────
    def _prepare(self, plan: Plan | None) -> None:
        """Have embedding, head and tokenizer at hand before somebody asks."""
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None
        self._cannot_ask = self._prepare_again_at = None
        if plan is None:
            return
        facts = self.ownership.facts(plan.model)
        assert facts is not None, "a usable plan's model is known"
        self._cannot_ask = self._ask_refused(facts)
        if self._cannot_ask is None:
            self._preparing = self._spawn(self._prepare_asker(plan))

    async def _prepare_asker(self, plan: Plan) -> None:
        try:
            speaker = self._speaker
            if speaker is None or speaker.model != plan.model:
                speaker = await self._make_speaker(plan.model)
            self.asker.use(plan, speaker)
        except (ModelError, CapacityError) as error:
            self._cannot_ask = str(error)
            self._prepare_again_at = clock.monotonic() + PREPARE_AGAIN_S
            _log.warning("nobody can ask here: %s", error)
        except Exception as error:
            self._cannot_ask = (
                f"an unexpected {type(error).__name__} while loading the model's ends: see the log"
            )
            _log.exception("nobody can ask here")
        finally:
            self.progress.pop("asking", None)

    async def _make_speaker(self, model: ModelId) -> Speaker:
        self._drop_speaker()
        files = self.library.files(model)
        if files is None:
            raise ModelError(f"the description of model {model[:12]} is gone from this PC's disk")
        await self.library.fetch(files, None, True, lambda: self._holders(model), self._progress("asking"))
        engine = self.config.engine
        async with self._making:
            speaker = await to_its_end(
                lambda: Speaker(files, self.device.name, engine.precision, engine.threads), Speaker.close
            )
        self._speaker = speaker
        await asyncio.to_thread(give_back)
        return speaker

    def _drop_speaker(self) -> None:
        """Memory of one model's ends is given back before another's are loaded; nobody may use them any more."""
        self.asker.stop_using("the mesh is about to serve another model")
        speaker, self._speaker = self._speaker, None
        if speaker is not None:
            self._runner.call(speaker.close, lambda _: None)

    async def ask(self, question: Question) -> AsyncIterator[Text | Done]:
        """Streams the answer; closing the iterator cancels it.

        Raises RouteError while nothing can be asked, PromptError, BusyError, or StepError where the answer fails.
        """
        if self._preparing is not None:
            await asyncio.wait([self._preparing])
        reason = self.why_not_ready()
        if reason is not None:
            raise RouteError(reason)
        self._check_model(question)
        async for event in self.asker.ask(question):
            yield event

    def _check_model(self, question: Question) -> None:
        served = self._speaker
        wanted = question.model
        if wanted is None or served is None:
            return
        if wanted != served.name and not (len(wanted) >= 6 and served.model.startswith(wanted)):
            raise ModelError(
                f"the mesh serves {served.name}, not {wanted!r}: ask without naming a model, or set [model] default"
            )

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────
    def _send(self, peer: PeerId, message: Message) -> bool:
        """To a peer, or to this agent itself; False when it cannot be handed over now."""
        if peer == self.me:
            asyncio.get_running_loop().call_soon(self._receive, self.me, message)
            return True
        if self.network is None:
            return False
        return self.network.transport.send(_CHANNELS[type(message)], peer, codec.encode(message))

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
            case Goodbye():
                self._handle(PeerLeft(sender))
                if self.network is not None:
                    self.network.leave(sender)
            case Ping(token):
                self._send(sender, Pong(token))
            case _:
                self.metrics.count("ignored.message")

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────
    def name_of(self, peer: PeerId) -> str:
        advert = self.ownership.view.get(peer)
        return advert.name if advert is not None else peer[:8]

    def why_not_ready(self) -> str | None:
        """Why nothing can be asked on this PC now, in a sentence; None when it can."""
        if not self.ownership.usable:
            return self.ownership.reason
        if self._cannot_ask is not None:
            return self._cannot_ask
        if self.asker.model is None:
            return "the embedding and the head are being loaded"
        return None

    def status(self) -> dict[str, Any]:
        return report.status(self)

    def peers(self) -> list[dict[str, Any]]:
        return report.peers(self)

    def plan(self) -> dict[str, Any]:
        return report.plan(self)

    def models(self) -> list[dict[str, Any]]:
        return self.library.as_json()


def _places(addresses: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """`host:port` as a token carries them."""
    return tuple((found.host, found.port) for found in map(address, addresses))


def _as_decoded(advert: Advert) -> Advert:
    """As others will have it: text is cleaned on the way."""
    return decode_advert(encode_advert(advert))
