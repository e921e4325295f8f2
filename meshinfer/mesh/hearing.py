"""How well one agent hears each peer that it watches, and which links it has reason not to trust."""

from __future__ import annotations

from collections import deque
from typing import Final

from meshinfer import limits
from meshinfer.values import LinkFacts, PeerId
from meshinfer.wire.messages import Heartbeat

_SENT_KEPT: Final = 32
_MOST: Final = 4_000_000_000
"""Figures in adverts have 32 bits, rounded ones too."""


class Beats:
    """When this agent's own heartbeats went out, so that an echo tells the round trip. One count serves all
    receivers: for each of them it goes up with every heartbeat."""

    def __init__(self) -> None:
        self.count = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_SENT_KEPT)

    def next(self, now: float) -> int:
        if not self._sent or self._sent[-1][1] != now:
            self.count += 1
            self._sent.append((self.count, now))
        return self.count

    def since(self, count: int, now: float) -> float | None:
        """Seconds since a heartbeat went out; None where that is too long ago to be of use, or never was."""
        back = self.count - count
        return now - self._sent[-1 - back][1] if 0 <= back < len(self._sent) else None


class Hearing:
    """What one peer's heartbeats tell. `heard` is what the own advert says; times are monotonic seconds, and negative
    for never."""

    __slots__ = (
        "_best_us",
        "_best_us_before",
        "_calm_s",
        "_echoed",
        "_samples",
        "_told",
        "_told_at",
        "count",
        "down_at",
        "heard",
        "heard_at",
        "incarnation",
        "peer",
        "up",
    )

    def __init__(self, peer: PeerId, up: bool, now: float) -> None:
        self.peer = peer
        self.up = up
        self.down_at = now
        self.heard = False
        self.heard_at = -1.0
        self.incarnation = -1
        self.count = 0
        self._echoed = 0
        # The least round trip of this half of the window, and of the half before.
        self._best_us = 0
        self._best_us_before = 0
        self._samples = 0
        self._told_at = now
        self._calm_s = limits.ROUND_TRIP_CALM_S
        self._told = LinkFacts(peer, 0, 0)

    def takes(self, beat: Heartbeat, beats: Beats, now: float) -> bool:
        """Whether a heartbeat is news of the peer: a late or doubled one proves nothing."""
        if (beat.incarnation, beat.count) <= (self.incarnation, self.count):
            return False
        if beat.incarnation != self.incarnation:
            self._echoed = 0
        self.incarnation, self.count, self.heard_at = beat.incarnation, beat.count, now
        if beat.echo > self._echoed:
            self._echoed = beat.echo
            since = beats.since(beat.echo, now)
            if since is not None:
                self._measured(round(since * 1e6) - beat.echo_age_us)
        self.heard = self.heard or self.up
        return True

    def echo(self, now: float) -> tuple[int, int]:
        """What a heartbeat to this peer says: the newest count heard from it, and how long ago, in µs."""
        if self.heard_at < 0 or now - self.heard_at > limits.SILENCE_S:
            return 0, 0
        return self.count, round((now - self.heard_at) * 1e6)

    def link_up(self, now: float) -> None:
        self.up = True
        if self.heard_at >= 0 and now - self.heard_at < 2 * limits.HEARTBEAT_S:
            self.heard = True

    def link_down(self, now: float) -> None:
        if self.up:
            self.up, self.down_at = False, now

    def until(self) -> float:
        """When this peer is no longer heard if nothing comes. With the own link down that is soon: a process that was
        killed takes its sockets with it. A starved one keeps them."""
        silent = self.heard_at + limits.SILENCE_S
        if self.up:
            return silent
        return min(silent, max(self.heard_at, self.down_at) + limits.DOWN_GRACE_S)

    def forgive(self, seconds: float) -> None:
        """This agent itself stood still for so long: that is nobody else's silence."""
        if self.heard_at >= 0:
            self.heard_at += seconds
        self.down_at += seconds

    def review(self, turn: bool, now: float) -> bool:
        """Whether there is another round trip to tell: the first after a few echoes; then at each `turn`, half a window
        after the last, what differs by a quarter; more and more rarely, and less so what is twice as much or half."""
        if self._samples < limits.ROUND_TRIP_SAMPLES or not (turn or not self._told.round_trip_us):
            return False
        told, best_us = self._told, min(self._best_us or _MOST, self._best_us_before or _MOST)
        if turn:
            self._best_us_before, self._best_us = self._best_us, 0
        if best_us < _MOST and self._is_news(best_us, now):
            self._told = LinkFacts(self.peer, coarse(best_us), told.kbit_s)
        return self._told != told

    def _is_news(self, round_trip_us: int, now: float) -> bool:
        told_us = self._told.round_trip_us
        if not _differs(round_trip_us, told_us, limits.ROUND_TRIP_STEP_US):
            return False
        if told_us:
            twofold = max(round_trip_us, told_us) >= 2 * min(round_trip_us, told_us)
            if now < self._told_at + (self._calm_s / 4 if twofold else self._calm_s):
                return False
            self._calm_s = min(2 * self._calm_s, limits.ROUND_TRIP_CALM_MOST_S)
        self._told_at = now
        return True

    def bandwidth(self, kbit_s: int) -> bool:
        """Take a measurement; whether it is another figure to tell."""
        told, figure = self._told, min(max(kbit_s, 0), _MOST)
        if _differs(figure, told.kbit_s, 0):
            self._told = LinkFacts(self.peer, told.round_trip_us, coarse(figure))
        return self._told != told

    def facts(self) -> LinkFacts:
        """What the own advert says of this link."""
        return self._told

    def _measured(self, round_trip_us: int) -> None:
        if round_trip_us < 0:
            return
        figure = min(max(round_trip_us, 1), _MOST)
        self._best_us = min(self._best_us or figure, figure)
        self._samples += 1


def coarse(number: int) -> int:
    """A number's first two digits: nobody's plans should hang on more."""
    unit: int = 10 ** max(0, len(str(number)) - 2)
    return (number + unit // 2) // unit * unit


def _differs(new: int, told: int, least: int) -> bool:
    if not new or not told:
        return new != told and new != 0
    return abs(new - told) > least and (4 * new >= 5 * told or 5 * new <= 4 * told)


class _Trouble:
    __slots__ = ("dropped_at", "drops", "times", "until")

    def __init__(self) -> None:
        self.times = 0
        self.until = 0.0
        self.drops = 0
        self.dropped_at = 0.0


class Troubles:
    """Links that failed while the peer was there: kept apart from death, and out of routes for a while.

    A peer that falls silent here is first only a suspect: most often it has died, and the others say so within
    `limits.BROKEN_AFTER_S`. If it is still present then, it is the link.
    """

    def __init__(self) -> None:
        self._suspects: dict[PeerId, float] = {}
        self._troubles: dict[PeerId, _Trouble] = {}
        self.broken: tuple[PeerId, ...] = ()

    def __contains__(self, peer: object) -> bool:
        return peer in self.broken

    def suspect(self, peer: PeerId, now: float) -> None:
        self._suspects.setdefault(peer, now)

    def clear(self, peer: PeerId) -> None:
        """It was not the link: the peer has gone, or has begun a new life."""
        self._suspects.pop(peer, None)

    def heard_again(self, peer: PeerId, now: float) -> None:
        """A suspect was heard before it was clear what had happened. Once is forgiven; more is a link that flaps."""
        if self._suspects.pop(peer, None) is None:
            return
        trouble = self._troubles.setdefault(peer, _Trouble())
        if trouble.drops and now - trouble.dropped_at < limits.FLAPS_FORGOTTEN_S:
            self.mark(peer, now)
        else:
            trouble.drops, trouble.dropped_at = 1, now

    def mark(self, peer: PeerId, now: float) -> None:
        """The link to a peer is broken for a minute, and twice as long each further time."""
        self._suspects.pop(peer, None)
        trouble = self._troubles.setdefault(peer, _Trouble())
        longest = limits.BROKEN_MOST_S
        trouble.until = now + min(longest, limits.BROKEN_S * 2 ** min(trouble.times, 16))
        trouble.times += 1
        trouble.drops, trouble.dropped_at = 1, now
        self._say(now)

    def pass_time(self, now: float) -> None:
        """Suspects whose time is up are marked, and those whose trouble is over are taken out."""
        for peer in [peer for peer, since in self._suspects.items() if since + limits.BROKEN_AFTER_S <= now]:
            self.mark(peer, now)
        over = [
            peer
            for peer, trouble in self._troubles.items()
            if max(trouble.until, trouble.dropped_at) + limits.BROKEN_MOST_S <= now
        ]
        for peer in over:
            del self._troubles[peer]
        if any(self._troubles[peer].until <= now for peer in self.broken if peer in self._troubles) or over:
            self._say(now)

    def forgive(self, seconds: float) -> None:
        for peer in self._suspects:
            self._suspects[peer] += seconds

    def forget(self, peer: PeerId, now: float) -> None:
        self._suspects.pop(peer, None)
        if self._troubles.pop(peer, None) is not None:
            self._say(now)

    def _say(self, now: float) -> None:
        lasting = [(-trouble.until, peer) for peer, trouble in self._troubles.items() if trouble.until > now]
        self.broken = tuple(sorted([peer for _, peer in sorted(lasting)[: limits.BROKEN_LINKS]]))
