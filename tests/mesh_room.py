"""A few of the mesh's real machines in one room: effects are passed on at once, time is virtual, nothing is random but
by a seed. What goes wrong, a test says step by step; the simulator in `scripts` is for all else."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from mesh_samples import COSTS, model, peer_id

from meshinfer.mesh.events import (
    AdvertsHeard,
    Effect,
    Event,
    HeartbeatHeard,
    Leave,
    LinkDown,
    LinkUp,
    Load,
    LoadDone,
    LoadFailed,
    ModelKnown,
    NeedModel,
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
from meshinfer.mesh.placement import memory_bytes
from meshinfer.mesh.plan import plan_id, shards_of
from meshinfer.values import Advert, Holding, ModelFacts, ModelId, PeerId, Plan, PlanId, Readiness, ShardKey

WAY_S = 0.002
LOAD_S = 0.2
FETCH_S = 0.1


class Seat:
    """One agent: its machine, and what a real agent does with the effects."""

    def __init__(self, room: Room, portrait: Advert) -> None:
        self.room = room
        self.portrait = portrait
        self.peer = portrait.peer
        self.alive = True
        self.frozen = False
        self.shards: dict[ShardKey, bool] = {}
        self.serving: dict[PlanId, tuple[ShardKey, ...]] = {}
        self.usable: Plan | None = None
        self.said: list[Plan | str] = []
        self.loads: list[ShardKey] = []
        self.fails = False
        self.mesh = Mesh(portrait, COSTS, Random(str(portrait.peer)), room.now)
        self._tick_at: float | None = None

    def event(self, event: Event) -> list[Effect]:
        if not self.alive or self.frozen:
            return []
        effects = self.mesh.handle(event, self.room.now)
        for effect in effects:
            self._carry_out(effect)
        self.room.check(self)
        due = self.mesh.next_deadline()
        assert due > self.room.now, "it wants to be run at once: it would spin"
        if self._tick_at is None or due < self._tick_at:
            self._tick_at = due
            self.room.at(due, self._tick)
        return effects

    def _tick(self) -> None:
        if self._tick_at is not None and self._tick_at <= self.room.now:
            self._tick_at = None
            self.event(Tick())

    @property
    def interruptions(self) -> int:
        """How often a plan that could be used could not be any more."""
        return sum(isinstance(one, Plan) and isinstance(other, str) for one, other in pairwise(self.said))

    def change(self, **fields: Any) -> None:
        self.portrait = replace(self.portrait, **fields)
        self.event(SelfChanged(self.portrait))

    def _carry_out(self, effect: Effect) -> None:
        room, me = self.room, self.peer
        match effect:
            case SendHeartbeat(peer, beat):
                room.send(me, peer, HeartbeatHeard(me, beat))
            case SendAdverts(peers, adverts):
                for peer in peers:
                    room.send(me, peer, AdvertsHeard(me, adverts))
            case SendSummary(peer, summary):
                room.send(me, peer, SummaryHeard(me, summary))
            case Load(shard):
                assert shard not in self.shards, "loads twice"
                room.check_load(self, shard)
                self.shards[shard] = False
                self.loads.append(shard)
                room.at(room.now + LOAD_S, lambda: self._loaded(shard))
            case Unload(shard):
                del self.shards[shard]
            case Serve(plan, shards):
                assert all(self.shards[shard] for shard in shards)
                self.serving[plan_id(plan)] = shards
            case Retire(plan):
                del self.serving[plan]
            case PlanUsable(plan):
                room.check_use(plan)
                self.usable = plan
                self.said.append(plan)
            case PlanUnusable(reason):
                self.usable = None
                self.said.append(reason)
            case NeedModel(model_id, _):
                room.at(room.now + FETCH_S, lambda: self.learn(room.models[model_id]))
            case Watch():
                pass

    def _loaded(self, shard: ShardKey) -> None:
        if self.shards.get(shard) is not False or not self.alive:
            return
        if self.fails:
            del self.shards[shard]
            self.event(LoadFailed(shard, "the disk is full"))
        else:
            self.shards[shard] = True
            self.event(LoadDone(shard))

    def learn(self, facts: ModelFacts) -> None:
        self.event(ModelKnown(facts))
        if not any(holding.model == facts.model for holding in self.portrait.holdings):
            holding = Holding(facts.model, facts.name, False)
            self.change(holdings=(*self.portrait.holdings, holding))


class Room:
    def __init__(self) -> None:
        self.now = 100.0
        self.models: dict[ModelId, ModelFacts] = {
            facts.model: facts for facts in (model("a"), model("b", layers=4))
        }
        self.seats: dict[PeerId, Seat] = {}
        self.cut: set[frozenset[PeerId]] = set()
        self.log: list[tuple[float, PeerId, Advert]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._rounds: dict[tuple[PeerId, int], PlanId] = {}
        self._standing: dict[PeerId, set[PlanId]] = {}
        self.accepted: dict[PlanId, set[PeerId]] = {}
        self.ready: dict[PlanId, set[PeerId]] = {}

    def at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, act))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = end

    def run_until(self, true: Callable[[], bool], most_s: float) -> float:
        """Seconds until it was true."""
        begun = self.now
        while not true():
            assert self.now < begun + most_s, f"not within {most_s} s"
            self.run(0.01)
        return self.now - begun

    # ── who is here ─────────────────────────────────────────────────────────────────────────────────────
    def start(self, *portraits: Advert) -> list[Seat]:
        seats = []
        for portrait in portraits:
            seat = self.seats[portrait.peer] = Seat(self, portrait)
            seats.append(seat)
        for seat in seats:
            for holding in seat.portrait.holdings:
                seat.event(ModelKnown(self.models[holding.model]))
            seat.event(Tick())
            for other in tuple(self.seats.values()):
                if other is not seat:
                    self._link(seat, other)
        return seats

    def _link(self, one: Seat, other: Seat) -> None:
        if one.alive and other.alive and frozenset((one.peer, other.peer)) not in self.cut:
            one.event(LinkUp(other.peer))
            other.event(LinkUp(one.peer))

    def kill(self, number: int) -> None:
        seat = self.seats[peer_id(number)]
        seat.alive = False
        for other in self.seats.values():
            other.event(LinkDown(seat.peer))

    def leave(self, number: int) -> None:
        seat = self.seats[peer_id(number)]
        seat.event(Leave())
        self.run(0.01)
        self.kill(number)

    def restart(self, number: int) -> Seat:
        before = self.seats[peer_id(number)].portrait
        return self.start(replace(before, incarnation=before.incarnation + 1))[0]

    def split(self, left: set[int], right: set[int]) -> None:
        for one in map(peer_id, left):
            for other in map(peer_id, right):
                self.cut.add(frozenset((one, other)))
                if one in self.seats and other in self.seats:
                    self.seats[one].event(LinkDown(other))
                    self.seats[other].event(LinkDown(one))

    def heal(self) -> None:
        pairs, self.cut = self.cut, set()
        for pair in sorted(map(sorted, pairs)):
            one, other = (self.seats.get(peer) for peer in pair)
            if one and other:
                self._link(one, other)

    def send(self, sender: PeerId, to: PeerId, event: Event) -> None:
        if frozenset((sender, to)) in self.cut or to not in self.seats:
            return
        seat = self.seats[to]
        self.at(self.now + WAY_S, lambda: self._deliver(seat, event))

    def _deliver(self, seat: Seat, event: Event) -> None:
        seat.event(event)

    # ── what must always be so ──────────────────────────────────────────────────────────────────────────
    def check(self, seat: Seat) -> None:
        own = seat.mesh.own
        promised = {plan_id(one.plan): one for one in own.standings if one.readiness is not Readiness.FAILED}
        for identity in promised.keys() - self._standing.get(seat.peer, set()):
            plan = promised[identity].plan
            known = self._rounds.setdefault((seat.peer, own.incarnation * 10**9 + plan.round), identity)
            assert known == identity, f"{own.name} accepts two plans of round {plan.round}"
            self.accepted.setdefault(identity, set()).add(seat.peer)
        for identity, one in promised.items():
            if one.readiness is Readiness.READY:
                self.ready.setdefault(identity, set()).add(seat.peer)
                assert identity in seat.serving
        self._standing[seat.peer] = set(promised)
        assert seat.serving.keys() <= promised.keys(), f"{own.name} serves what it does not stand by"
        shards = {
            shard for one in promised.values() for shard in shards_of(one.plan, seat.peer)
        } | seat.shards.keys()
        needed = sum(
            memory_bytes(self.models[shard.model], COSTS, [shard], own.precision)
            for shard in sorted(shards, key=repr)
        )
        assert needed <= own.capacity_bytes, f"{own.name} promises {needed} of {own.capacity_bytes} bytes"
        assert seat.mesh.usable == (seat.usable is not None)

    def check_load(self, seat: Seat, shard: ShardKey) -> None:
        """All owners have accepted. The loader's own advert is published after its effects are known."""
        held = [
            one.plan
            for one in seat.mesh.standings
            if shard in shards_of(one.plan, seat.peer)
            and self.accepted.get(plan_id(one.plan), set()) | {seat.peer} >= set(one.plan.owners)
        ]
        assert held, "loads what not all owners have accepted"

    def check_use(self, plan: Plan) -> None:
        ready = self.ready.get(plan_id(plan), set())
        missing = set(plan.owners) - ready
        for peer in missing:
            standing = next(one for one in self.seats[peer].mesh.standings if one.plan == plan)
            assert standing.readiness is Readiness.READY, "uses a plan that an owner is not ready for"

    # ── what a test asks ────────────────────────────────────────────────────────────────────────────────
    @property
    def living(self) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.alive]

    def settled(self) -> bool:
        """All stand only by held plans that they are ready for, and ask where that is possible."""
        held = {
            one.plan
            for seat in self.living
            for one in seat.mesh.standings
            if one.readiness is not Readiness.FAILED
        }
        for seat in self.living:
            if any(one.readiness not in (Readiness.READY, Readiness.FAILED) for one in seat.mesh.standings):
                return False
        for plan in held:
            owners = [self.seats[peer] for peer in plan.owners]
            if not all(
                owner.alive and plan in [one.plan for one in owner.mesh.standings] for owner in owners
            ):
                return False
        return all(seat.usable is not None for seat in self.living)
