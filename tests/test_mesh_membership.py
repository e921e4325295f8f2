"""A PC is in the mesh exactly while it can be reached: no ghosts, no false deaths, nobody locked out, no noise."""

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
    BandwidthMeasured,
    Effect,
    Event,
    HeartbeatHeard,
    Leave,
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
    Assignment,
    LinkFacts,
    Mark,
    ModelId,
    Objective,
    OwnerFacts,
    PeerId,
    Plan,
    Ports,
    Precision,
    Readiness,
    Span,
    Standing,
)
from meshinfer.wire.messages import Heartbeat, Summary

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


# ── one machine ─────────────────────────────────────────────────────────────────────────────────────────────
ME, A, B, C = (peer_id(number) for number in range(4))
DIGEST = bytes(8)


class Bench:
    """One machine and a clock; peers are played by hand. `hold` keeps it alive and run on time."""

    def __init__(self, *peers: PeerId) -> None:
        self.now = 100.0
        self.machine = Membership(advert(ME), Random(1), self.now)
        self.counts: Counter[PeerId] = Counter()
        self.effects: list[Effect] = []
        for peer in peers:
            self.join(peer, peers)

    def join(self, peer: PeerId, peers: Iterable[PeerId], incarnation: int = 1) -> None:
        self.do(LinkUp(peer))
        self.do(AdvertsHeard(peer, (advert(peer, incarnation, 1, {ME, *peers} - {peer}),)))
        self.beat(peer, incarnation)

    def do(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        assert self.machine.next_deadline() > self.now
        self.effects += effects
        return effects

    def beat(self, peer: PeerId, incarnation: int = 1, digest: bytes | None = None) -> list[Effect]:
        self.counts[peer] += 1
        beat = Heartbeat(incarnation, self.counts[peer], 0, 0, digest or self.machine.view.digest)
        return self.do(HeartbeatHeard(peer, beat))

    def hold(self, seconds: float, *beating: PeerId, run: bool = True) -> None:
        """Time passes; these peers' heartbeats come."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.1)
            if run and self.machine.next_deadline() <= self.now:
                self.do(Tick())
            if round(self.now * 10) % 5 == 0:
                for peer in beating:
                    self.beat(peer)

    @property
    def heard(self) -> set[PeerId]:
        return {link.peer for link in self.machine.links}

    @property
    def present(self) -> set[PeerId]:
        return {one.peer for one in self.machine.view.present}


def test_a_met_peer_is_told_of_this_agent_at_once() -> None:
    bench = Bench()
    effects = bench.do(LinkUp(A))
    assert SendAdverts((A,), (bench.machine.view.own,)) in effects
    assert any(isinstance(effect, SendSummary) for effect in effects)
    assert any(isinstance(effect, SendHeartbeat) for effect in effects)
    assert Watch(frozenset({A})) in effects


def test_present_when_each_hears_the_other() -> None:
    bench = Bench()
    bench.do(LinkUp(A))
    bench.beat(A)
    assert bench.heard == {A}
    assert bench.present == {ME}, "it has not said that it hears this agent"
    bench.do(AdvertsHeard(A, (advert(A, links=[ME]),)))
    assert bench.present == {ME, A}
    assert bench.machine.take_changes() == {A}
    assert bench.machine.take_changes() == frozenset()


def test_whoever_speaks_is_answered_without_having_been_looked_for() -> None:
    bench = Bench()
    bench.beat(A)
    assert Watch(frozenset({A})) in bench.effects, "its announcement may never reach this agent"
    effects = bench.do(LinkUp(A))
    asks = [effect.summary.reply for effect in effects if isinstance(effect, SendSummary)]
    assert asks == [True], "what it said while there was no link here could not be answered"
    assert bench.heard == {A}


def test_heartbeats_go_out_twice_a_second_while_the_link_is_up() -> None:
    bench = Bench(A, B)
    bench.do(LinkDown(B))
    bench.effects.clear()
    bench.hold(10.0, A, B)
    to = Counter(effect.peer for effect in bench.effects if isinstance(effect, SendHeartbeat))
    assert 19 <= to[A] <= 21
    assert to[B] == 0
    counts = [effect.heartbeat.count for effect in bench.effects if isinstance(effect, SendHeartbeat)]
    assert counts == sorted(set(counts))


def test_a_heartbeat_echoes_what_was_heard_last() -> None:
    bench = Bench(A)
    bench.hold(2.0, A)
    beats = [effect.heartbeat for effect in bench.effects if isinstance(effect, SendHeartbeat)]
    assert beats[-1].echo == bench.counts[A] or beats[-1].echo == bench.counts[A] - 1
    assert 0 <= beats[-1].echo_age_us <= 500_000


def test_a_silent_peer_is_no_longer_heard_after_the_bound_and_not_before() -> None:
    bench = Bench(A, B)
    bench.hold(limits.SILENCE_S - 0.2, B)
    assert bench.heard == {A, B}
    bench.hold(0.8, B)
    assert bench.heard == {B}


def test_a_killed_process_is_noticed_within_the_grace() -> None:
    bench = Bench(A, B)
    bench.hold(3.0, A, B)
    bench.do(LinkDown(A))
    bench.hold(limits.DOWN_GRACE_S - 0.2, B)
    assert A in bench.heard
    bench.hold(0.3, B)
    assert A not in bench.heard


def test_a_link_that_is_back_within_the_grace_was_nothing() -> None:
    bench = Bench(A, B)
    bench.hold(3.0, A, B)
    bench.do(LinkDown(A))
    bench.hold(0.4, B)
    bench.do(LinkUp(A))
    bench.hold(3.0, A, B)
    assert bench.heard == {A, B}
    assert bench.machine.broken == ()


def test_gone_when_the_others_do_not_hear_it_either_and_no_link_is_to_blame() -> None:
    bench = Bench(A, B, C)
    bench.hold(3.0, A, B, C)
    bench.do(LinkDown(C))
    bench.hold(1.0, A, B)
    assert bench.present == {ME, A, B, C}, "others hear it"
    for other in (A, B):
        bench.do(AdvertsHeard(other, (advert(other, 1, 2, [ME, A if other == B else B]),)))
    assert bench.present == {ME, A, B}
    bench.hold(20.0, A, B)
    assert bench.machine.broken == ()


def test_one_bad_link_is_told_of_and_removes_nobody() -> None:
    bench = Bench(A, B, C)
    bench.hold(3.0, A, B, C)
    bench.hold(limits.SILENCE_S + limits.BROKEN_AFTER_S + 1.0, A, B)
    assert bench.present == {ME, A, B, C}
    assert bench.machine.broken == (C,)
    bench.hold(limits.BROKEN_S - 10, A, B, C)
    assert bench.heard == {A, B, C}
    assert bench.machine.broken == (C,), "heard again does not make it sound"
    bench.hold(20.0, A, B, C)
    assert bench.machine.broken == ()


def test_a_neighbour_that_has_stopped_watching_this_agent_has_no_bad_link() -> None:
    bench = Bench(A, B, C)
    bench.do(AdvertsHeard(C, (advert(C, 1, 2, [A, B]),)))
    bench.hold(60.0, A, B)
    assert bench.present == {ME, A, B, C}
    assert bench.machine.broken == ()


def test_a_link_that_a_plan_needs_and_that_does_not_come_up_is_broken() -> None:
    bench = Bench(A, B)
    bench.do(AdvertsHeard(A, (advert(A, 1, 2, [ME, B, C]), advert(C, links=[A, B]))))
    assert bench.present == {ME, A, B, C}
    bench.machine.want(frozenset({C}))
    bench.do(Tick())
    bench.hold(limits.BROKEN_AFTER_S - 0.2, A, B)
    assert bench.machine.broken == ()
    bench.hold(1.0, A, B)
    assert bench.machine.broken == (C,)


def plan_of(*peers: PeerId) -> Plan:
    owners = tuple(Assignment(peer, Span(at, at + 1), "CPU", 32) for at, peer in enumerate(peers))
    inputs = tuple(OwnerFacts(peer, 1, 0, 0, 0, Precision.AUTO) for peer in sorted(peers))
    return Plan(ModelIdOf, len(peers), 1, None, owners, (), inputs, 1, 1)


ModelIdOf = ModelId("0" * 64)


def test_whoever_has_not_accepted_the_plan_yet_need_not_be_heard() -> None:
    bench = Bench(A, B)
    bench.do(AdvertsHeard(A, (advert(A, 1, 2, [ME, B, C]), advert(C, links=[A, B]))))
    bench.machine.want(frozenset({C}))
    bench.do(LinkUp(C))
    bench.hold(10.0, A, B)
    assert bench.machine.broken == (), "the connection stands; it does not watch this agent"
    accepted = Standing(plan_of(ME, C), Readiness.ACCEPTED)
    bench.do(AdvertsHeard(A, (replace(advert(C, 1, 2, [A, B]), standings=(accepted,)),)))
    bench.hold(limits.BROKEN_AFTER_S + 1.0, A, B)
    assert bench.machine.broken == (C,), "now it ought to be heard"


def test_want_is_due_at_once_and_watched() -> None:
    bench = Bench(A)
    bench.machine.want(frozenset({C, ME}))
    assert bench.machine.next_deadline() <= bench.now
    assert Watch(frozenset({A, C})) in bench.do(Tick())
    bench.machine.want(frozenset({C}))
    assert bench.machine.next_deadline() > bench.now


def test_a_starved_observer_accuses_nobody() -> None:
    bench = Bench(A, B)
    bench.hold(3.0, A, B)
    for _ in range(10):
        bench.hold(8.0, run=False)
        bench.do(Tick())
        assert bench.heard == {A, B}
        bench.hold(2.0)
        assert bench.heard == {A, B}
        bench.hold(0.5, A, B)
    assert bench.machine.broken == ()
    assert bench.present == {ME, A, B}


def test_after_a_stall_true_silence_is_noticed_as_late_as_ever() -> None:
    bench = Bench(A, B)
    bench.hold(3.0, A, B)
    bench.hold(60.0, run=False)
    bench.do(Tick())
    bench.hold(limits.SILENCE_S + 1.0, B)
    assert bench.heard == {B}


def test_a_new_life_is_another_peer_and_its_former_ones_heartbeats_prove_nothing() -> None:
    bench = Bench(A, B)
    bench.do(AdvertsHeard(B, (advert(B, 1, 2, [ME]),)))
    bench.beat(A, incarnation=2)
    assert bench.present == {ME, B}, "who began a new life has ended the old one"
    bench.do(AdvertsHeard(A, (advert(A, 2, 1, [ME]),)))
    assert bench.present == {ME, A, B}
    bench.hold(limits.SILENCE_S + 1.0, A, B)
    assert bench.heard == {B}, "these were the former one's"


def test_leaving_is_believed_at_once_and_its_last_heartbeats_are_ignored() -> None:
    bench = Bench(A, B)
    bench.do(AdvertsHeard(A, (replace(advert(A, 1, 2, [ME, B]), leaving=True),)))
    assert bench.present == {ME, B}
    bench.beat(A)
    assert bench.heard == {B}
    bench.hold(0.2, B)
    news = [
        effect for effect in bench.effects if isinstance(effect, SendAdverts) and effect.adverts[0].leaving
    ]
    assert [effect.peers for effect in news] == [(B,)]
    assert A not in bench.machine.watched
    bench.hold(10.0, B)
    assert bench.machine.broken == ()


def test_one_who_leaves_says_so_and_falls_silent() -> None:
    bench = Bench(A, B)
    bench.do(Leave())
    assert bench.machine.leaving
    own = replace(bench.machine.view.own, leaving=True, version=2)
    assert bench.machine.publish(own, bench.now) == [SendAdverts((A, B), (own,))]
    bench.effects.clear()
    bench.hold(2.0, A, B)
    assert not [effect for effect in bench.effects if isinstance(effect, SendHeartbeat)]


def test_what_others_say_of_this_agent_changes_nothing_but_cannot_lock_it_out() -> None:
    bench = Bench(A)
    assert bench.machine.incarnation == 1
    bench.do(AdvertsHeard(A, (advert(ME, 1, 1),)))
    assert bench.machine.incarnation == 1, "its own echo"
    bench.do(AdvertsHeard(A, (advert(ME, 900, 4, [B]),)))
    assert bench.machine.view.own == advert(ME)
    assert bench.machine.incarnation == 901, "its clock was ahead once; now this life is the newer one again"
    bench.hold(1.0, A)
    beats = [effect.heartbeat for effect in bench.effects if isinstance(effect, SendHeartbeat)]
    assert beats[-1].incarnation == 901


def test_a_summary_tells_of_a_former_life_too() -> None:
    bench = Bench(A)
    bench.do(SummaryHeard(A, Summary((Mark(ME, 50, 7),), False)))
    assert bench.machine.incarnation == 51


def test_two_agents_of_one_key_do_not_race_each_other() -> None:
    bench = Bench(A)
    for number in range(1, 101):
        bench.do(AdvertsHeard(A, (advert(ME, 1000 * number),)))
        bench.now += 0.01
    assert bench.machine.incarnation == 1001


def test_bandwidth_is_told_of_links_that_are_heard() -> None:
    bench = Bench(A)
    bench.do(BandwidthMeasured(A, 912_345))
    bench.do(BandwidthMeasured(B, 5))
    bench.hold(limits.LINKS_LATER_S + 1, A)
    assert bench.machine.links == (LinkFacts(A, 0, 910_000),)


def test_seconds_since_each_was_heard() -> None:
    bench = Bench(A)
    bench.now += 0.25
    assert bench.machine.view.heard_s(A, bench.now) == pytest.approx(0.25)
    assert bench.machine.view.heard_s(ME, bench.now) == 0.0
    assert bench.machine.view.heard_s(C, bench.now) is None


def test_ten_thousand_strangers_cost_no_more_than_the_bounds() -> None:
    bench = Bench(A)
    for number in range(100, 10_100):
        bench.do(AdvertsHeard(A, (advert(peer_id(number), links=[peer_id(number + 1)]),)))
    assert len(bench.machine.view.known) <= limits.ROSTER_MEMBERS
    bench.hold(5.0, A)
    assert len(bench.machine.watched) < 32
    assert bench.present == {ME, A}
    assert len(bench.machine.links) <= limits.LINKS


# ── many machines ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("size", [2, 5, 12])
def test_all_who_start_at_once_see_each_other_within_two_seconds(size: int) -> None:
    net = mesh(size, seed=size, settle=False)
    assert net.run_until(net.agrees, 2.0) < 2.0
    assert not net.removed


def test_one_known_place_is_enough_for_all_and_the_mesh_does_not_hang_by_it() -> None:
    net = mesh(30, seed=4)
    net.run(limits.LINGER_S + 10)
    most = max(len(machine.view.joined(peer)) for peer, machine in net.machines.items())
    assert most <= 16, "whoever was asked first watches no more than others in the end"
    net.allowed_removals = lambda _seen_by, peer: peer == peer_id(0)
    net.crash(peer_id(0))
    net.run_until(net.agrees, 3.0)


def test_a_killed_one_is_gone_everywhere_within_a_second_and_a_half() -> None:
    net = mesh(5, seed=1)
    net.run(20.0)
    net.allowed_removals = lambda _seen_by, peer: peer == peer_id(2)
    net.crash(peer_id(2))
    assert net.run_until(net.agrees, 1.5) > 0.3
    net.run(30.0)
    assert all(machine.broken == () for machine in net.machines.values())


def test_a_vanished_one_is_gone_by_deadline_and_no_link_is_blamed() -> None:
    net = mesh(20, seed=1)
    net.run(20.0)
    net.allowed_removals = lambda _seen_by, peer: peer == peer_id(2)
    net.crash(peer_id(2), silently=True)
    net.run_until(net.agrees, 5.0)
    net.run(30.0)
    assert all(machine.broken == () for machine in net.machines.values())


def test_a_restart_supersedes_the_former_self() -> None:
    net = mesh(6, seed=2)
    net.run(5.0)
    net.allowed_removals = lambda seen_by, peer: peer_id(3) in (seen_by, peer)
    for _ in range(10):
        net.crash(peer_id(3))
        net.run(0.3)
        net.start(peer_id(3), [peer_id(0)])
        net.run(3.0)
    net.run_until(net.agrees, 3.0)
    assert net.machines[peer_id(0)].view.known[peer_id(3)].incarnation == 11


def test_a_restart_with_the_clock_set_back_is_not_locked_out() -> None:
    net = mesh(6, seed=2)
    net.run(5.0)
    net.allowed_removals = lambda seen_by, peer: peer_id(3) in (seen_by, peer)
    for incarnation in (5000, 20):
        net.crash(peer_id(3))
        net.run(0.2)
        net.start(peer_id(3), [peer_id(0)], incarnation=incarnation)
        net.run_until(net.agrees, 8.0)
    assert net.machines[peer_id(3)].view.own.incarnation == 5001


def test_a_frozen_one_is_dropped_and_rejoins_cleanly_a_minute_later() -> None:
    net = mesh(6, seed=3)
    net.run(10.0)
    net.allowed_removals = lambda seen_by, peer: peer_id(1) in (seen_by, peer)
    net.freeze(peer_id(1))
    net.run_until(net.agrees, 8.0)
    net.run(60.0)
    net.thaw(peer_id(1))
    net.run_until(net.agrees, 6.0)
    net.run(10.0)
    assert all(machine.broken == () for machine in net.machines.values())


def test_a_starved_one_whose_links_stand_is_not_dropped() -> None:
    net = mesh(6, seed=3)
    net.run(10.0)
    for _ in range(5):
        net.frozen[peer_id(1)] = []
        net.run(3.0)
        net.thaw(peer_id(1))
        net.run(2.0)
    assert net.agrees()
    assert not [pair for pair in net.removed if pair[0] > 10]


@pytest.mark.parametrize("split", [(3, 2), (12, 12), (1, 4)])
def test_a_split_gives_each_side_its_own_view_and_healing_joins_them(split: tuple[int, int]) -> None:
    net = mesh(sum(split), seed=5)
    net.run(5.0)
    here = {peer_id(number) for number in range(split[0])}
    there = set(net.machines) - here
    net.allowed_removals = lambda seen_by, peer: (seen_by in here) != (peer in here)
    net.wall(here, there)
    net.run_until(net.agrees, 6.0)
    net.run(60.0)
    assert all(machine.broken == () for machine in net.machines.values())
    net.heal()
    net.run_until(net.agrees, 3.0)


def test_a_one_way_link_removes_nobody_and_is_told_of() -> None:
    net = mesh(6, seed=6)
    net.run(10.0)
    net.deaf = {(peer_id(0), peer_id(1))}
    net.run(limits.SILENCE_S + limits.BROKEN_AFTER_S + 2)
    assert net.agrees()
    assert net.machines[peer_id(1)].broken == (peer_id(0),)
    assert net.machines[peer_id(0)].broken == ()


def test_one_who_hears_all_and_is_heard_by_nobody_is_out_and_comes_back() -> None:
    net = mesh(6, seed=6)
    net.run(10.0)
    mute = peer_id(0)
    net.allowed_removals = lambda seen_by, peer: mute in (seen_by, peer)
    net.deaf = {(mute, other) for other in net.machines}
    net.run_until(net.agrees, 9.0)
    net.run(20.0)
    net.deaf.clear()
    net.run_until(net.agrees, 3.0)


def test_a_flapping_link_is_kept_out_for_longer_each_time() -> None:
    net = mesh(6, seed=7)
    net.run(10.0)
    pair = {peer_id(0)}, {peer_id(1)}
    broken = 0.0
    for _ in range(30):
        net.wall(*pair)
        net.run(6.0)
        net.heal()
        net.run(14.0)
        broken += 20.0 * any(net.machines[peer_id(n)].broken for n in (0, 1))
    assert net.agrees()
    assert broken > 540, "its plans would flap with it"


def test_one_who_leaves_is_gone_at_once_everywhere() -> None:
    net = mesh(20, seed=8)
    net.run(5.0)
    gone = peer_id(4)
    net.allowed_removals = lambda _seen_by, peer: peer == gone
    net._handle(gone, Leave())
    net.run(0.6)
    assert all(not m.view.is_present(gone) for peer, m in net.machines.items() if peer != gone)


# ── noise ───────────────────────────────────────────────────────────────────────────────────────────────────
def quiet_mesh() -> Net:
    """One that has been up for a while, on wires that do not jitter."""
    net = mesh(40, seed=9, jitter_s=0.0005)
    net.run(limits.LINGER_S + 30)
    net.sent.clear()
    return net


def test_an_idle_large_mesh_says_heartbeats_and_nothing_else() -> None:
    net = quiet_mesh()
    net.run(10.0)
    assert net.sent["HeartbeatHeard"] <= 40 * 10 * 2 * 8
    assert net.sent["SummaryHeard"] == 0
    assert net.sent["AdvertsHeard"] * 10 < net.sent["HeartbeatHeard"], "now and then a figure changes"


def test_a_lone_change_goes_over_each_link_once() -> None:
    net = quiet_mesh()
    edges = sum(len(machine.watched) for machine in net.machines.values()) // 2
    machine = net.machines[peer_id(7)]
    own = machine.view.own
    net._act(peer_id(7), machine.publish(replace(own, version=own.version + 1, capacity_bytes=77), net.now))
    net.run(1.0)
    assert net.agrees()
    assert net.sent["AdvertsHeard"] <= 1.3 * edges
    assert net.sent["SummaryHeard"] == 0


def test_a_bystander_that_comes_or_goes_costs_each_other_a_few_messages() -> None:
    net = quiet_mesh()
    bystander = peer_id(999)
    net.allowed_removals = lambda seen_by, peer: bystander in (seen_by, peer)
    net.start(bystander, [peer_id(0)])
    net.run_until(net.agrees, 4.0)
    net.run(10.0)
    assert net.sent["AdvertsHeard"] / 40 < 60
    assert net.sent["SummaryHeard"] / 40 < 5


# ── anything at all ─────────────────────────────────────────────────────────────────────────────────────────
def test_twenty_per_cent_loss_for_ten_minutes_removes_nobody() -> None:
    net = mesh(6, seed=20, loss=0.2)
    net.run(600.0)
    net.run_until(net.agrees, 10.0)
    assert all(machine.broken == () for machine in net.machines.values())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_views_come_to_be_the_truth(seed: int) -> None:
    """Crashes, silent ones, freezes, splits, deaf links, restarts, at 20 % loss: nobody is dropped by whom it could
    reach without any of that, and when it has ended all views are equal and true."""
    random = Random(seed)
    net = mesh(random.randint(8, 18), seed, loss=0.2)
    net.run(5.0)
    everybody = sorted(net.machines)
    spared = set(everybody[:3])
    net.allowed_removals = lambda seen_by, peer: not {seen_by, peer} <= spared
    for _ in range(12):
        trouble(net, random, [peer for peer in everybody if peer not in spared])
        net.run(random.choice([0.2, 1.0, 4.0, 9.0]))
    net.heal()
    net.deaf.clear()
    for peer in sorted(net.frozen):
        net.thaw(peer)
    net.run_until(net.agrees, 20.0)
    print(f"seed {seed}: {net.sizes()}")


def trouble(net: Net, random: Random, victims: list[PeerId]) -> None:
    peer = random.choice(victims)
    kind = random.choice(["crash", "vanish", "start", "start", "freeze", "thaw", "wall", "heal", "deaf"])
    if kind in ("crash", "vanish") and peer in net.machines:
        net.crash(peer, kind == "vanish")
    elif kind == "start" and peer not in net.machines:
        net.start(peer)
    elif kind == "freeze" and peer in net.machines and peer not in net.frozen:
        net.freeze(peer)
    elif kind == "thaw" and peer in net.frozen:
        net.thaw(peer)
    elif kind == "wall":
        cut = random.sample(victims, random.randint(1, len(victims)))
        net.wall(cut, set(net.machines) - set(cut))
    elif kind == "heal":
        net.heal()
    elif kind == "deaf":
        net.deaf = {(random.choice(victims), other) for other in random.sample(victims, 2)}
