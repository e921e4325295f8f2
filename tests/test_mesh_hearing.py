"""A busy PC is not taken for dead, a killed one is noticed at once, and a bad link costs neither of its ends."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_net import peer_id

from meshinfer import limits
from meshinfer.mesh.hearing import Beats, Hearing, Troubles, coarse
from meshinfer.wire.messages import Heartbeat

PEER = peer_id(1)
DIGEST = bytes(8)


def beat(count: int, incarnation: int = 1, echo: int = 0, echo_age_us: int = 0) -> Heartbeat:
    return Heartbeat(incarnation, count, echo, echo_age_us, DIGEST)


def hearing_with(round_trips_ms: list[float], every_s: float = 0.5) -> tuple[Hearing, float]:
    """One that has had an echo after each of these times."""
    beats, hearing, now = Beats(), Hearing(PEER, True, 0.0), 0.0
    for number, round_trip_ms in enumerate(round_trips_ms):
        now += every_s
        sent = beats.next(now)
        hearing.takes(beat(number + 1, echo=sent), beats, now + round_trip_ms / 1000)
    return hearing, now


# ── heard or not ────────────────────────────────────────────────────────────────────────────────────────────
def test_heard_from_the_first_heartbeat_until_silence() -> None:
    hearing = Hearing(PEER, True, 0.0)
    assert not hearing.heard
    assert hearing.takes(beat(1), Beats(), 1.0)
    assert hearing.heard
    assert hearing.until() == 1.0 + limits.SILENCE_S


def test_a_late_or_doubled_heartbeat_proves_nothing() -> None:
    hearing = Hearing(PEER, True, 0.0)
    hearing.takes(beat(5), Beats(), 1.0)
    assert not hearing.takes(beat(5), Beats(), 2.0)
    assert not hearing.takes(beat(4), Beats(), 2.0)
    assert not hearing.takes(beat(9, incarnation=0), Beats(), 2.0), "a former life is over"
    assert hearing.until() == 1.0 + limits.SILENCE_S
    assert hearing.takes(beat(1, incarnation=2), Beats(), 3.0), "a new one counts from the beginning"


def test_a_broken_link_leaves_a_short_grace_and_a_starved_peer_keeps_its_link() -> None:
    hearing = Hearing(PEER, True, 0.0)
    hearing.takes(beat(1), Beats(), 1.0)
    hearing.link_down(1.2)
    assert hearing.until() == pytest.approx(1.2 + limits.DOWN_GRACE_S)
    hearing.link_up(1.4)
    assert hearing.until() == 1.0 + limits.SILENCE_S, "a link that was replaced within the grace is no death"


def test_heartbeats_over_the_peers_own_link_count_while_ours_is_down() -> None:
    hearing = Hearing(PEER, True, 0.0)
    hearing.takes(beat(1), Beats(), 1.0)
    hearing.link_down(1.1)
    hearing.takes(beat(2), Beats(), 1.5)
    assert hearing.until() == pytest.approx(1.5 + limits.DOWN_GRACE_S)


def test_a_peer_is_first_heard_when_both_ways_are_open() -> None:
    hearing = Hearing(PEER, False, 0.0)
    hearing.takes(beat(1), Beats(), 1.0)
    assert not hearing.heard, "what we say does not reach it yet"
    hearing.link_up(1.3)
    assert hearing.heard, "no need to wait for the next heartbeat"
    late = Hearing(PEER, False, 0.0)
    late.takes(beat(1), Beats(), 1.0)
    late.link_up(4.0)
    assert not late.heard


def test_time_in_which_this_agent_stood_still_is_nobodys_silence() -> None:
    hearing = Hearing(PEER, True, 0.0)
    hearing.takes(beat(1), Beats(), 1.0)
    hearing.forgive(60.0)
    assert hearing.until() == 61.0 + limits.SILENCE_S


# ── round trip and bandwidth ────────────────────────────────────────────────────────────────────────────────
def test_a_round_trip_is_the_least_of_several_without_the_time_that_the_echo_waited() -> None:
    beats, hearing = Beats(), Hearing(PEER, True, 0.0)
    for number in range(1, 6):
        sent = beats.next(number / 2)
        arrived = number / 2 + 0.4 + 0.0071 + number / 1000
        hearing.takes(beat(number, echo=sent, echo_age_us=400_000), beats, arrived)
    assert hearing.review(False, 3.0)
    assert hearing.facts().round_trip_us == 8100


def test_one_echo_is_no_measurement_and_an_echo_of_nothing_none_at_all() -> None:
    hearing, now = hearing_with([3.0])
    assert not hearing.review(True, now)
    beats = Beats()
    for number in range(1, 9):
        hearing.takes(beat(number + 10, echo=number + 50), beats, now + number)
    assert not hearing.review(True, now + 20)
    assert hearing.facts().round_trip_us == 0


def test_an_echo_older_than_itself_is_not_believed() -> None:
    beats, hearing = Beats(), Hearing(PEER, True, 0.0)
    for number in range(1, 9):
        hearing.takes(beat(number, echo=beats.next(number), echo_age_us=10_000_000), beats, number + 0.001)
    assert not hearing.review(True, 9.0)


def test_small_changes_are_not_told_and_great_ones_are_once_the_window_has_passed() -> None:
    beats, hearing = Beats(), Hearing(PEER, True, 0.0)
    told: list[tuple[float, int]] = []
    for number in range(1, 400):
        now = number * 0.5
        slower = 0.010 if now < 60 else 0.0115 if now < 120 else 0.030
        hearing.takes(beat(number, echo=beats.next(now)), beats, now + slower)
        if hearing.review(number % 30 == 0, now + slower):
            told.append((now, hearing.facts().round_trip_us))
    assert [figure for _, figure in told] == [10_000, 30_000]
    assert told[0][0] < 3
    assert 120 < told[1][0] < 120 + 2 * limits.ROUND_TRIP_WINDOW_S


def test_a_link_that_jitters_is_told_of_more_and_more_rarely() -> None:
    beats, hearing, random = Beats(), Hearing(PEER, True, 0.0), Random(1)
    told = []
    for number in range(1, 14_400):
        now = number * 0.5
        hearing.takes(beat(number, echo=beats.next(now)), beats, now + 0.002 + 0.03 * random.random() ** 0.5)
        if hearing.review(number % 30 == 0, now + 0.1):
            told.append(now)
    assert len(told) < 40, "two hours, 480 looks at it"


def test_jitter_of_a_fast_link_is_no_news() -> None:
    hearing, now = hearing_with([0.2, 0.1, 0.12, 0.15])
    assert hearing.review(False, now)
    beats = Beats()
    for number in range(5, 200):
        later = number * 0.5
        hearing.takes(beat(number, echo=beats.next(later) + 0), beats, later + 0.00005 + (number % 7) / 1e5)
        assert not hearing.review(number % 30 == 0, later)


def test_bandwidth_is_told_when_it_differs_by_a_quarter() -> None:
    hearing = Hearing(PEER, True, 0.0)
    assert hearing.bandwidth(943_211)
    assert hearing.facts().kbit_s == 940_000
    assert not hearing.bandwidth(1_100_000)
    assert hearing.bandwidth(1_300_000)
    assert hearing.bandwidth(2**40), "no figure is beyond what an advert can say"
    assert hearing.facts().kbit_s < 2**32


@given(st.integers(0, 4_000_000_000))
def test_two_digits_are_near_and_say_themselves_again(number: int) -> None:
    rounded = coarse(number)
    assert abs(rounded - number) * 20 <= max(number, 1)
    assert coarse(rounded) == rounded


def test_our_heartbeats_are_counted_once_a_moment() -> None:
    beats = Beats()
    assert [beats.next(1.0), beats.next(1.0), beats.next(1.5)] == [1, 1, 2]
    assert beats.since(1, 2.0) == 1.0
    for number in range(100):
        beats.next(2.0 + number)
    assert beats.since(1, 200.0) is None, "an echo of long ago measures nothing"


# ── links not to be trusted ─────────────────────────────────────────────────────────────────────────────────
def test_a_suspect_that_others_vouch_for_has_a_broken_link_for_a_minute() -> None:
    troubles = Troubles()
    troubles.suspect(PEER, 10.0)
    troubles.pass_time(10.0 + limits.BROKEN_AFTER_S - 0.1)
    assert troubles.broken == ()
    marked = 10.0 + limits.BROKEN_AFTER_S
    troubles.pass_time(marked)
    assert troubles.broken == (PEER,)
    troubles.heard_again(PEER, marked + 1)
    assert troubles.broken == (PEER,), "heard again does not make it sound"
    troubles.pass_time(marked + limits.BROKEN_S - 0.1)
    assert troubles.broken == (PEER,)
    troubles.pass_time(marked + limits.BROKEN_S)
    assert troubles.broken == ()


def test_a_suspect_that_turns_out_dead_leaves_no_broken_link_behind() -> None:
    troubles = Troubles()
    troubles.suspect(PEER, 10.0)
    troubles.clear(PEER)
    troubles.pass_time(60.0)
    assert troubles.broken == ()


def test_one_short_silence_is_forgiven_and_a_second_is_a_link_that_flaps() -> None:
    troubles = Troubles()
    troubles.suspect(PEER, 10.0)
    troubles.heard_again(PEER, 11.0)
    assert troubles.broken == ()
    troubles.suspect(PEER, 30.0)
    troubles.heard_again(PEER, 31.0)
    assert troubles.broken == (PEER,)


def test_short_silences_far_apart_are_not_a_flapping_link() -> None:
    troubles = Troubles()
    for hour in range(5):
        troubles.suspect(PEER, hour * 3600.0)
        troubles.heard_again(PEER, hour * 3600.0 + 1)
    assert troubles.broken == ()


def test_each_further_time_is_twice_as_long_up_to_half_an_hour() -> None:
    troubles, now, lasted = Troubles(), 0.0, []
    for _ in range(8):
        troubles.mark(PEER, now)
        begun = now
        while troubles.broken:
            now += 1.0
            troubles.pass_time(now)
        lasted.append(now - begun)
    assert lasted == [60, 120, 240, 480, 960, 1800, 1800, 1800]


def test_after_long_calm_it_begins_anew() -> None:
    troubles = Troubles()
    troubles.mark(PEER, 0.0)
    troubles.pass_time(limits.BROKEN_S + limits.BROKEN_MOST_S)
    troubles.mark(PEER, 10_000.0)
    troubles.pass_time(10_000.0 + limits.BROKEN_S)
    assert troubles.broken == ()


def test_no_more_are_told_than_an_advert_can_say() -> None:
    troubles = Troubles()
    for number in range(2 * limits.BROKEN_LINKS):
        troubles.mark(peer_id(number), number / 10)
    assert len(troubles.broken) == limits.BROKEN_LINKS
    assert list(troubles.broken) == sorted(troubles.broken)
    newest = peer_id(2 * limits.BROKEN_LINKS - 1)
    assert newest in troubles
    troubles.forget(newest, 20.0)
    assert newest not in troubles
