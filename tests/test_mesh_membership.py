"""A PC is in the mesh exactly while it can be reached: no ghosts, no false deaths, nobody locked out, no noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from membership_net import advert, peer_id

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
    Assignment,
    LinkFacts,
    Mark,
    ModelId,
    OwnerFacts,
    PeerId,
    Plan,
    Precision,
    Readiness,
    Span,
    Standing,
)
from meshinfer.wire.messages import Heartbeat, Summary

# ── one machine ─────────────────────────────────────────────────────────────────────────────────────────────
ME, A, B, C = (peer_id(number) for number in range(4))
MODEL = ModelId("0" * 64)


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
    inputs = tuple(OwnerFacts(peer, 1, 0, 0, Precision.AUTO) for peer in sorted(peers))
    return Plan(MODEL, len(peers), 1, None, owners, (), inputs, 1, 1)


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


def test_who_comes_back_after_a_goodbye_is_watched_though_its_new_advert_was_lost() -> None:
    bench = Bench(A)
    bench.do(AdvertsHeard(A, (replace(advert(A, 1, 2), leaving=True),)))
    bench.hold(1.0)
    assert A not in bench.machine.watched
    bench.beat(A, incarnation=2, digest=b"\1" * 8)
    assert A in bench.machine.watched
    bench.effects.clear()
    for _ in range(40):
        bench.hold(0.5)
        bench.beat(A, incarnation=2, digest=b"\1" * 8)
    assert any(isinstance(effect, SendHeartbeat) and effect.peer == A for effect in bench.effects)
    assert any(isinstance(effect, SendSummary) and effect.peer == A for effect in bench.effects), "it asks"


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
