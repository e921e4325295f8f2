"""How much the links to watched peers carry: measured now and then, while nothing else is going on."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from meshinfer import limits
from meshinfer.net import loop as clock
from meshinfer.net.rate import Rate
from meshinfer.values import PeerId
from meshinfer.wire.messages import Message, Probe, Probed

_NOTHING: Final = bytes(limits.PROBE_BYTES)
_EACH: Final = 3
"""Probes in a row, of which the fastest counts: TCP begins slowly on a link that was idle, and a loop may be late."""

_ROUNDS: Final = 3
"""Rounds of which the best counts: other work on a PC only ever makes its links seem slower."""


@dataclass(slots=True)
class _Link:
    due: float
    figures: deque[int] = field(default_factory=lambda: deque(maxlen=_ROUNDS))


@dataclass(slots=True)
class _Wait:
    peer: PeerId
    token: int
    came: asyncio.Future[float]


class Bandwidth:
    """Sends probes to others, one at a time, and answers theirs.

    Args:
        send: to a peer, on the bulk channel; False when that cannot be.
        busy: whether answers or transfers are under way here, which a probe would delay and be delayed by.
        round_trip_us: to a peer, as its heartbeats tell; 0 while unknown.
        measured: called with a peer and kbit/s.
    """

    def __init__(
        self,
        send: Callable[[PeerId, Message], bool],
        busy: Callable[[], bool],
        round_trip_us: Callable[[PeerId], int],
        measured: Callable[[PeerId, int], None],
    ) -> None:
        self._send = send
        self._busy = busy
        self._round_trip_us = round_trip_us
        self._measured = measured
        self._tokens = itertools.count(1)
        self._links: dict[PeerId, _Link] = {}
        self._waiting: _Wait | None = None
        self._answered = Rate(limits.PROBES_PER_S, limits.PROBES_BURST)

    def follow(self, peers: Iterable[PeerId]) -> None:
        """Measure the links to these peers, and to no others."""
        now = clock.monotonic()
        self._links = {peer: self._links.get(peer) or _Link(now + _spread_s(peer)) for peer in peers}

    async def measure(self) -> None:
        """One round: every link that is due, as long as nothing else is going on."""
        now = clock.monotonic()
        due = sorted((link.due, peer) for peer, link in self._links.items() if link.due <= now)
        for _, peer in due:
            link = self._links.get(peer)
            if link is None:
                continue
            if self._busy() or await _is_late():
                return
            kbit_s = await self._try(peer)
            if kbit_s:
                link.figures.append(kbit_s)
                self._measured(peer, max(link.figures))
            rare = len(link.figures) == _ROUNDS
            link.due = clock.monotonic() + (limits.PROBE_AGAIN_S if rare else limits.PROBE_RETRY_S)

    async def _try(self, peer: PeerId) -> int:
        """kbit/s of the fastest of some probes; 0 where one did not come back, or something came in between."""
        best = 0
        for _ in range(_EACH):
            took_s = await self._probe(peer)
            if took_s is None or self._busy():
                return 0
            way_s = max(took_s - self._round_trip_us(peer) / 1e6, took_s / 4)
            best = max(best, round(8 * limits.PROBE_BYTES / way_s / 1000))
        return best

    async def _probe(self, peer: PeerId) -> float | None:
        wait = self._waiting = _Wait(peer, next(self._tokens), asyncio.get_running_loop().create_future())
        sent_at = clock.monotonic()
        try:
            if not self._send(peer, Probe(wait.token, _NOTHING)):
                return None
            async with asyncio.timeout(limits.PROBE_TIMEOUT_S):
                return await wait.came - sent_at
        except TimeoutError:
            return None
        finally:
            self._waiting = None

    def received(self, peer: PeerId, message: Probe | Probed) -> None:
        """Somebody's probe, or the answer to one. Who is busy answers none: the figure would be wrong."""
        now = clock.monotonic()
        if isinstance(message, Probe):
            if not self._busy() and self._answered.allow(peer, now):
                self._send(peer, Probed(message.token))
            return
        wait = self._waiting
        if wait is not None and (wait.peer, wait.token) == (peer, message.token) and not wait.came.done():
            wait.came.set_result(now)


async def _is_late() -> bool:
    """Whether this PC is too busy to measure anything: a short sleep of its loop takes much longer than asked for."""
    begun_at = clock.monotonic()
    await asyncio.sleep(limits.PROBE_LATE_S)
    return clock.monotonic() - begun_at > 2 * limits.PROBE_LATE_S


def _spread_s(peer: PeerId) -> float:
    """A few seconds after a link has come up, for each peer at another moment: not all at once after a cold start."""
    share = int.from_bytes(blake2b(peer.encode(), digest_size=2).digest(), "big") / 65_536
    return limits.PROBE_FIRST_S * (1 + share)
