"""A small network for membership machines alone: virtual time, links that lose, delay and break, PCs that stop."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from meshinfer import limits
from meshinfer.mesh.events import (
    AdvertsHeard,
    Effect,
    Event,
    HeartbeatHeard,
    LinkDown,
    LinkUp,
    SendAdverts,
    SendHeartbeat,
    SendSummary,
    SummaryHeard,
    Tick,
    Watch,
)
from meshinfer.mesh.membership import Membership
from meshinfer.values import (
    Advert,
    LinkFacts,
    Objective,
    PeerId,
    Ports,
    Precision,
)

Pair = tuple[PeerId, PeerId]


def peer_id(number: int) -> PeerId:
    return PeerId(hashlib.sha256(number.to_bytes(4, "big")).hexdigest()[:32])


def advert(peer: PeerId, incarnation: int = 1, version: int = 1, links: Iterable[PeerId] = ()) -> Advert:
    return Advert(
        peer=peer,
        name=f"pc-{peer[:4]}",
        incarnation=incarnation,
        version=version,
        addresses=("192.0.2.1",),
        ports=Ports(1, 2, 3, 4),
        program="1",
        rules=1,
        device="CPU",
        precision=Precision.AUTO,
        capacity_bytes=0,
        allocation_bytes=0,
        decode_us=0,
        prefill_us=0,
        holdings=(),
        wants=None,
        min_owners=1,
        objective=Objective.LATENCY,
        links=tuple(LinkFacts(other, 0, 0) for other in sorted(links)),
    )


# ── a small network ─────────────────────────────────────────────────────────────────────────────────────────
class Net:
    """Membership machines, joined by links that lose, delay and break: TCP's, so both ways must be open for one to
    stand. Time is virtual. What the facade does with the own advert is done here by the same rules."""

    RECONNECT_S = 0.2
    DEAD_S = 2.0

    def __init__(self, seed: int, loss: float = 0.0) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.loss = loss
        self.jitter_s = 0.004
        self.now = 0.0
        self.machines: dict[PeerId, Membership] = {}
        self.frozen: dict[PeerId, list[Event]] = {}
        self.up: set[Pair] = set()
        self.dialling: set[Pair] = set()
        self.deaf: set[Pair] = set()
        """Pairs of which messages from the first do not reach the second, though their links stand."""
        self.walls: set[Pair] = set()
        self.sent: Counter[str] = Counter()
        self.sent_by: Counter[PeerId] = Counter()
        self.removed: list[tuple[float, PeerId, PeerId]] = []
        self.allowed_removals: Callable[[PeerId, PeerId], bool] = lambda _seen_by, _peer: False
        self._known_places: dict[PeerId, set[PeerId]] = defaultdict(set)
        self._thawing: PeerId | None = None
        self._watched: dict[PeerId, frozenset[PeerId]] = defaultdict(frozenset)
        self._published: dict[PeerId, float] = {}
        self._incarnations: Counter[PeerId] = Counter()
        self._ticks: dict[PeerId, float] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    # what a test does to it
    def start(self, peer: PeerId, knows: Iterable[PeerId] = (), incarnation: int | None = None) -> None:
        self._incarnations[peer] = incarnation or self._incarnations[peer] + 1
        machine = Membership(advert(peer, self._incarnations[peer]), self.random, self.now)
        self.machines[peer] = machine
        self._published[peer] = -1.0
        self._ticks.pop(peer, None)
        self._known_places[peer] |= set(knows)
        self._schedule(peer)
        for other in sorted(self._known_places[peer]):
            self._dial(peer, other)

    def crash(self, peer: PeerId, silently: bool = False) -> None:
        """The process ends, and the others' sockets break at once; or the PC vanishes, and they break later."""
        del self.machines[peer]
        self.frozen.pop(peer, None)
        self._break([pair for pair in self.up if peer in pair], self.DEAD_S if silently else 0.01)

    def freeze(self, peer: PeerId) -> None:
        self.frozen[peer] = []
        self._break([pair for pair in self.up if peer in pair], self.DEAD_S)

    def thaw(self, peer: PeerId) -> None:
        """What came meanwhile is read now; that links have broken is among it, and not always first."""
        self._thawing = peer
        for event in self.frozen.pop(peer):
            self._handle(peer, event)
        self._thawing = None
        self._schedule(peer)

    def wall(self, one: Iterable[PeerId], other: Iterable[PeerId]) -> None:
        others = tuple(other)
        cut = {pair for a in one for b in others for pair in ((a, b), (b, a))}
        self.walls |= cut
        self._break([pair for pair in self.up if pair in cut], self.DEAD_S)

    def heal(self) -> None:
        self.walls.clear()

    def discover(self, peers: Iterable[PeerId]) -> None:
        """Announcements reach all of these."""
        for one in sorted(peers):
            for other in sorted(peers):
                if one != other:
                    self._known_places[one].add(other)
                    self._dial(one, other)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def run_until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Until the condition holds: how long that took."""
        begin = self.now
        while not condition():
            if self.now - begin > seconds:
                pytest.fail(f"seed {self.seed}: not within {seconds} s: {self.sizes()}")
            self.run(0.05)
        return self.now - begin

    # what a test asks of it
    def sizes(self) -> list[int]:
        return [len(machine.view) for _, machine in sorted(self.machines.items())]

    def components(self) -> list[set[PeerId]]:
        """Who can truly reach whom, hop by hop, over links that carry both ways."""
        rest, parts = {peer for peer in self.machines if peer not in self.frozen}, []
        while rest:
            front = {min(rest)}
            part: set[PeerId] = set()
            while front:
                part |= front
                front = {b for a in front for b in rest - part if self._carries(a, b)}
            rest -= part
            parts.append(part)
        return parts

    def agrees(self) -> bool:
        """Whether all views are the truth, and equal to the version."""
        for part in self.components():
            views = [self.machines[peer].view for peer in part]
            if any({one.peer for one in view.present} != part for view in views):
                return False
            if len({view.digest for view in views}) != 1:
                return False
        return True

    # inside
    def _carries(self, a: PeerId, b: PeerId) -> bool:
        pairs = {(a, b), (b, a)}
        return not pairs & self.walls and not pairs & self.deaf

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), action))

    def _alive(self, peer: PeerId) -> bool:
        return peer in self.machines and peer not in self.frozen

    def _schedule(self, peer: PeerId) -> None:
        machine = self.machines[peer]
        due = machine.next_deadline()
        if self._ticks.get(peer, -1.0) >= self.now and self._ticks[peer] <= due:
            return
        self._ticks[peer] = due

        def tick() -> None:
            if self._ticks.get(peer) == due:
                self._ticks[peer] = -1.0
            if self.machines.get(peer) is machine and peer not in self.frozen:
                if machine.next_deadline() <= self.now:
                    self._handle(peer, Tick())
                self._schedule(peer)

        self._at(max(0.0, due - self.now), tick)

    def _handle(self, peer: PeerId, event: Event) -> None:
        if peer in self.frozen:
            self.frozen[peer].append(event)
            return
        machine = self.machines.get(peer)
        if machine is None:
            return
        before = machine.view.present
        effects = machine.handle(event, self.now)
        assert machine.next_deadline() > self.now, "the agent would spin"
        if machine.view.present is not before:
            self._note_removals(peer, machine, before)
        self._act(peer, effects)
        own = machine.view.own
        said = (machine.links, machine.broken, machine.leaving, machine.incarnation)
        if said != (own.links, own.broken, own.leaving, own.incarnation):
            self._compose(peer, machine)
        self._schedule(peer)

    def _note_removals(self, peer: PeerId, machine: Membership, before: tuple[Advert, ...]) -> None:
        for one in before:
            if not machine.view.is_present(one.peer):
                self.removed.append((self.now, peer, one.peer))
                assert self.allowed_removals(peer, one.peer), (
                    f"seed {self.seed}: {peer} dropped {one.peer} at {self.now}"
                )

    def _compose(self, peer: PeerId, machine: Membership) -> None:
        wait = self._published[peer] + limits.HEARTBEAT_S - self.now
        if wait > 0 and not machine.leaving:
            return
        self._published[peer] = self.now
        own = machine.view.own
        effects = machine.publish(
            replace(
                own,
                links=machine.links,
                broken=machine.broken,
                leaving=machine.leaving,
                incarnation=machine.incarnation,
                version=own.version + 1,
            ),
            self.now,
        )
        self._act(peer, effects)

    def _act(self, peer: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Watch(peers):
                    self._watch(peer, peers)
                case SendAdverts(peers, adverts):
                    for other in peers:
                        self._send(peer, other, AdvertsHeard(peer, adverts))
                case SendSummary(other, summary):
                    self._send(peer, other, SummaryHeard(peer, summary))
                case SendHeartbeat(other, heartbeat):
                    self._send(peer, other, HeartbeatHeard(peer, heartbeat))
                case _:
                    raise AssertionError(effect)

    def _send(self, source: PeerId, target: PeerId, event: Event) -> None:
        if (source, target) not in self.up:
            assert source == self._thawing, "sent over a link that is not reported up"
            return
        self.sent[type(event).__name__] += 1
        self.sent_by[source] += 1
        if (
            (source, target) in self.deaf
            or (source, target) in self.walls
            or self.random.random() < self.loss
        ):
            return
        self._at(0.001 + self.jitter_s * self.random.random(), lambda: self._handle(target, event))

    def _watch(self, peer: PeerId, peers: frozenset[PeerId]) -> None:
        for other in sorted(peers):
            self._dial(peer, other)
        idle = self._watched[peer] - peers - self._known_places[peer]
        self._watched[peer] = peers
        self._break([(peer, other) for other in idle], 0.0)

    def _dial(self, peer: PeerId, other: PeerId) -> None:
        """Connections are tried again for as long as they are wanted."""
        pair = (peer, other)
        if pair in self.dialling or pair in self.up:
            return
        self.dialling.add(pair)

        def attempt() -> None:
            machine = self.machines.get(peer)
            wanted = machine is not None and (other in machine.watched or other in self._known_places[peer])
            if not wanted:
                self.dialling.discard(pair)
            elif self._alive(peer) and self._alive(other) and pair not in self.walls:
                self.dialling.discard(pair)
                self.up.add(pair)
                self._handle(peer, LinkUp(other))
            else:
                self._at(self.RECONNECT_S + 0.1 * self.random.random(), attempt)

        self._at(0.02 + 0.03 * self.random.random(), attempt)

    def _break(self, pairs: Iterable[Pair], after: float) -> None:
        for pair in sorted(pairs):

            def breaks(pair: Pair = pair) -> None:
                if pair not in self.up:
                    return
                healthy = self._alive(pair[0]) and self._alive(pair[1]) and pair not in self.walls
                machine = self.machines.get(pair[0])
                if healthy and machine is not None and pair[1] in machine.watched:
                    return
                self.up.discard(pair)
                self._handle(pair[0], LinkDown(pair[1]))
                self._dial(*pair)

            self._at(after * (0.8 + 0.4 * self.random.random()), breaks)


def mesh(size: int, seed: int, loss: float = 0.0, settle: bool = True, jitter_s: float = 0.004) -> Net:
    """So many agents, each of which knows the place of one that started before it."""
    net = Net(seed, loss)
    net.jitter_s = jitter_s
    peers = [peer_id(number) for number in range(size)]
    for number, peer in enumerate(peers):
        net.start(peer, [peers[net.random.randrange(number)]] if number else [])
    if settle:
        net.allowed_removals = lambda _seen_by, _peer: True
        net.run_until(net.agrees, 15.0)
        net.allowed_removals = lambda _seen_by, _peer: False
    return net
