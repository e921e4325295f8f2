"""The office's network: links that come up and break as libzmq's do, and messages that may go wrong on the way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from meshinfer.mesh.events import Event, LinkDown, LinkUp
from meshinfer.values import PeerId
from simulation.clock import Clock
from simulation.paths import Paths
from simulation.pc import Pc

if TYPE_CHECKING:
    from simulation.process import Process

LINK_DEAD_S = 2.0
"""After so long without a sign of life from its far end a link is down; one of a killed process is at once."""

RETRY_S = 2.0
"""A link that did not come up is tried again after so long."""

LINGER_S = 10.0
"""A link that nobody wants any more is kept for so long."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What may happen to any message: it is lost, comes twice, or comes up to `delay_s` late and so out of order."""

    loss: float = 0.0
    duplicates: float = 0.0
    delay_s: float = 0.0


class Link:
    """One agent's own connection to a PC; `target` is the agent there that it is up to."""

    __slots__ = ("bad_since", "latency_s", "owner", "pc", "target", "unwanted_since")

    def __init__(self, owner: Process, pc: Pc, latency_s: float) -> None:
        self.owner = owner
        self.pc = pc
        self.latency_s = latency_s
        self.target: Process | None = None
        self.bad_since: float | None = None
        self.unwanted_since: float | None = None


class Network:
    def __init__(self, clock: Clock, paths: Paths, random: Random, latency_s: float) -> None:
        self._clock = clock
        self._paths = paths
        self._random = random
        self._latency_s = latency_s
        self._latencies: dict[tuple[int, int], float] = {}
        self.weather = Weather()
        self.messages = 0
        self.bytes = 0

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────
    def send(self, sender: Process, to: PeerId, event: Event, size_bytes: int) -> None:
        """`event` is what the message is to its receiver. One for which no link is up is dropped."""
        link = sender.links.get(to)
        if link is None or (target := link.target) is None:
            return
        self.messages += 1
        self.bytes += size_bytes
        if not self._paths.works(sender.pc, link.pc):
            return
        weather, random = self.weather, self._random.random
        if weather.loss and random() < weather.loss:
            return
        delay_s = link.latency_s * (1.0 + 0.2 * random())
        if weather.delay_s:
            delay_s += weather.delay_s * random() ** 6
        self._clock.after(delay_s, target.take, event)
        if weather.duplicates and random() < weather.duplicates:
            self._clock.after(delay_s + link.latency_s + weather.delay_s * random() ** 2, target.take, event)

    def latency_s(self, a: Pc, b: Pc) -> float:
        """One way; the same both ways, and for as long as the world stands."""
        key = (a.number, b.number) if a.number < b.number else (b.number, a.number)
        known = self._latencies.get(key)
        if known is None:
            known = self._latencies[key] = self._latency_s * (0.2 + 1.6 * self._random.random() ** 3)
        return known

    # ── links ───────────────────────────────────────────────────────────────────────────────────────────────
    def want(self, owner: Process, peers: Collection[PeerId]) -> None:
        """Hold links to these; others are closed after a while."""
        links = owner.links
        for peer in sorted(peers - links.keys()):
            pc = owner.world.by_peer[peer]
            link = links[peer] = Link(owner, pc, self.latency_s(owner.pc, pc))
            self._clock.after(0.02 * self._random.random(), self._try, link)
        for peer, link in links.items():
            if peer in peers:
                link.unwanted_since = None
            elif link.unwanted_since is None:
                link.unwanted_since = self._clock.now
                self._clock.after(LINGER_S, self._close, link)

    def _close(self, link: Link) -> None:
        since = link.unwanted_since
        if (
            since is None
            or self._clock.now < since + LINGER_S
            or link.owner.links.get(link.pc.peer) is not link
        ):
            return
        del link.owner.links[link.pc.peer]
        if link.target is not None:
            link.target = None
            link.owner.take(LinkDown(link.pc.peer))

    def _try(self, link: Link) -> None:
        owner = link.owner
        if not owner.alive or owner.links.get(link.pc.peer) is not link or link.target is not None:
            return
        if self._reachable(link):
            handshake_s = 4 * link.latency_s + 0.01 * self._random.random()
            self._clock.after(handshake_s, self._open, link, link.pc.process)
        else:
            self._try_later(link)

    def _try_later(self, link: Link) -> None:
        if link.unwanted_since is None:
            self._clock.after(RETRY_S * (0.9 + 0.2 * self._random.random()), self._try, link)
        else:
            del link.owner.links[link.pc.peer]

    def _reachable(self, link: Link) -> bool:
        return link.pc.running and not link.owner.frozen and self._paths.joined(link.owner.pc, link.pc)

    def _open(self, link: Link, target: Process) -> None:
        owner = link.owner
        if not owner.alive or owner.links.get(link.pc.peer) is not link or link.target is not None:
            return
        if not self._reachable(link) or link.pc.process is not target:
            self._try_later(link)
            return
        link.target = target
        owner.take(LinkUp(link.pc.peer))
        target.meet(owner.pc)

    # ── breaking ────────────────────────────────────────────────────────────────────────────────────────────
    def review(self, processes: Collection[Process]) -> None:
        """Ways or agents have changed: links whose far end gives no sign of life break in a while."""
        now = self._clock.now
        for process in processes:
            for link in process.links.values():
                if link.target is None:
                    continue
                if link.target.alive and self._reachable(link):
                    link.bad_since = None
                elif link.bad_since is None:
                    link.bad_since = now
                    patience_s = LINK_DEAD_S * (1.0 + 0.1 * self._random.random())
                    self._clock.after(patience_s, self._expire, link, now)

    def _expire(self, link: Link, bad_since: float) -> None:
        if link.bad_since == bad_since and link.target is not None:
            self._break(link)

    def reset(self, processes: Collection[Process], killed: Process) -> None:
        """Where a process has ended and its PC has not, the kernel tells each far end at once."""
        peer = killed.pc.peer
        for process in processes:
            link = process.links.get(peer)
            if link is not None and link.target is killed and self._paths.works(killed.pc, process.pc):
                self._clock.after(link.latency_s * (1 + self._random.random()), self._reset, link, killed)

    def _reset(self, link: Link, killed: Process) -> None:
        if link.target is killed:
            self._break(link)

    def _break(self, link: Link) -> None:
        link.target = None
        link.bad_since = None
        owner = link.owner
        if not owner.alive or owner.links.get(link.pc.peer) is not link:
            return
        owner.take(LinkDown(link.pc.peer))
        self._try_later(link)
