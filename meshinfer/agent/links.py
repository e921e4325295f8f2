"""Finding the other agents of this mesh, recognising them, and holding links to them.

A place where an agent may be (configured, announced by mDNS, told by another peer, or where somebody knocked from) is
knocked at until it opens. Whoever shows a certificate of this mesh is linked to; anybody else is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from meshinfer import __version__
from meshinfer.agent.metrics import Metrics
from meshinfer.errors import DoorError, TrustError, VersionError, WireError
from meshinfer.limits import ADDRESSES, KNOCKS_AT_ONCE, PLACES, PROTOCOL_VERSION
from meshinfer.net import loop as clock
from meshinfer.net.door import knock
from meshinfer.net.transport import Transport
from meshinfer.trust.certificate import Member
from meshinfer.trust.roster import Roster
from meshinfer.values import PeerId, Ports
from meshinfer.wire import codec
from meshinfer.wire.messages import Introduction, Knock, Refused, Welcome

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
"""Between knocks at one place, doubling: a PC that wakes up is found within this; an empty address costs a SYN."""

_log = logging.getLogger(__name__)


class Source(IntEnum):
    """Who told of a place; the higher, the longer it is remembered."""

    PEER = 0
    DISCOVERY = 1
    CONFIGURED = 2


@dataclass(slots=True)
class _Place:
    source: Source
    due: float
    pause_s: float = FIRST_PAUSE_S
    peer: PeerId | None = None
    trouble: str = ""
    knocking: bool = field(default=False)


class Links:
    """Places on one side, links to peers on the other. `found` is called for each peer that a link is held to."""

    def __init__(
        self,
        roster: Roster,
        transport: Transport,
        certificate: bytes,
        me: PeerId,
        metrics: Metrics,
    ) -> None:
        self._roster = roster
        self._transport = transport
        self._certificate = certificate
        self._me = me
        self._metrics = metrics
        self._places: dict[tuple[str, int], _Place] = {}
        self._hosts: dict[PeerId, str] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seeker: asyncio.Task[None] | None = None
        self.ports = Ports(0, 0, 0, 0)
        self.addresses: Callable[[], tuple[str, ...]] = tuple

    # ── the door ────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, payload: bytes, host: str) -> bytes | None:
        """What the door says to a knock from `host`; None to an agent of another mesh, or to no agent at all."""
        try:
            message = codec.decode_door([payload])
        except VersionError as error:
            self._metrics.count("refused.door.version")
            return bytes(codec.encode(Refused(PROTOCOL_VERSION, __version__, str(error)))[0])
        except WireError as error:
            self._metrics.count(f"refused.door.{error.kind}")
            return None
        if not isinstance(message, Knock):
            self._metrics.count("refused.door.type")
            return None
        try:
            member = self._roster.admit(message.certificate, clock.wall())
        except TrustError as error:
            self._metrics.count(f"refused.door.{error.kind}")
            return None
        if member.peer != self._me:
            self._hosts.setdefault(member.peer, host)
        welcome = Welcome(PROTOCOL_VERSION, __version__, self._certificate, self.ports, self.addresses())
        return bytes(codec.encode(welcome)[0])

    # ── places ──────────────────────────────────────────────────────────────────────────────────────────────
    def add_place(self, host: str, port: int, source: Source) -> None:
        """An agent may be there. Knocks soon, also at a place that has been silent for long."""
        now = clock.monotonic()
        place = self._places.get((host, port))
        if place is None:
            self._make_room()
            self._places[host, port] = _Place(source, now)
        else:
            place.source = max(place.source, source)
            if place.trouble:
                place.due, place.pause_s = min(place.due, now), FIRST_PAUSE_S
        self._wake.set()

    def _make_room(self) -> None:
        if len(self._places) < PLACES:
            return
        # Dictionaries keep their order: of the least trusted kind, the first is the oldest.
        linked = set(self._transport.peers)
        key = min(self._places, key=lambda key: (self._places[key].peer in linked, self._places[key].source))
        del self._places[key]

    def heard_from(self, peer: PeerId, addresses: Iterable[str], door_port: int) -> None:
        """A peer that reaches this agent tells where its own door is: knock there until it is linked to as well."""
        if self._transport.linked(peer):
            return
        for host in dict.fromkeys([*filter(None, [self._hosts.get(peer)]), *addresses]):
            self.add_place(host, door_port, Source.PEER)

    def introduced(self, introduction: Introduction) -> None:
        """A peer tells of another. Its certificate is checked like anybody's."""
        try:
            member = self._roster.admit(introduction.certificate, clock.wall())
        except TrustError as error:
            self._metrics.count(f"refused.introduction.{error.kind}")
            return
        if member.peer != self._me and not self._transport.linked(member.peer):
            for host in introduction.addresses:
                self.add_place(host, introduction.door, Source.PEER)

    def introduction_of(self, peer: PeerId, addresses: Iterable[str], door_port: int) -> Introduction | None:
        """What others are told of a linked peer: first the address that this agent reached it at."""
        member = self._roster.by_peer(peer)
        if member is None:
            return None
        hosts = dict.fromkeys([*filter(None, [self._hosts.get(peer)]), *addresses])
        return Introduction(member.certificate, tuple(hosts)[:ADDRESSES], door_port)

    def forget(self, peer: PeerId) -> None:
        """A peer left politely: it will knock when it is back."""
        self._transport.disconnect(peer)
        for key in [key for key, place in self._places.items() if place.peer == peer]:
            if self._places[key].source is Source.CONFIGURED:
                self._places[key].peer = None
            else:
                del self._places[key]

    def troubles(self) -> list[dict[str, str]]:
        """Configured places that do not open, and why: for a person who wonders where a peer is."""
        return [
            {"address": f"{host}:{port}", "reason": place.trouble}
            for (host, port), place in self._places.items()
            if place.trouble and place.source is not Source.PEER
        ]

    # ── knocking ────────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        self._seeker = asyncio.create_task(self._seek(), name="links")

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._seeker] if self._seeker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _seek(self) -> None:
        while True:
            self._wake.clear()
            now = clock.monotonic()
            for key, place in list(self._places.items()):
                if len(self._tasks) >= KNOCKS_AT_ONCE:
                    break
                if place.due <= now and not place.knocking and not self._satisfied(place):
                    self._knock_soon(key, place)
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _pause_s(self) -> float:
        now = clock.monotonic()
        waits = [place.due - now for place in self._places.values() if not place.knocking]
        # A link that breaks makes a place due again without anybody waking the seeker.
        return max(0.05, min([FIRST_PAUSE_S, *(wait for wait in waits if wait > 0)]))

    def _satisfied(self, place: _Place) -> bool:
        return place.peer is not None and (place.peer == self._me or self._transport.linked(place.peer))

    def _knock_soon(self, key: tuple[str, int], place: _Place) -> None:
        place.knocking = True
        task = asyncio.create_task(self._knock(key, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _knock(self, key: tuple[str, int], place: _Place) -> None:
        host, port = key
        payload = bytes(codec.encode(Knock(PROTOCOL_VERSION, __version__, self._certificate))[0])
        try:
            reply = await knock(host, port, payload)
            member, welcome = self._recognise(reply.payload)
            place.peer, place.trouble, place.pause_s = member.peer, "", FIRST_PAUSE_S
            if member.peer != self._me:
                self._link(member, reply.host, welcome.ports)
        except (DoorError, TrustError, WireError) as error:
            if place.trouble != str(error):
                _log.info("%s:%s: %s", host, port, error)
            place.trouble = str(error)
            place.pause_s = min(2 * place.pause_s, LONGEST_PAUSE_S)
        finally:
            place.knocking = False
            place.due = clock.monotonic() + place.pause_s
            self._wake.set()

    def _recognise(self, payload: bytes) -> tuple[Member, Welcome]:
        message = codec.decode_door([payload])
        if isinstance(message, Refused):
            raise DoorError(f"the agent there (version {message.program}) refuses: {message.reason}")
        if not isinstance(message, Welcome):
            raise DoorError("the agent there gave no answer that makes sense")
        return self._roster.admit(message.certificate, clock.wall()), message

    def _link(self, member: Member, host: str, ports: Ports) -> None:
        if self._transport.linked(member.peer):
            return
        self._hosts[member.peer] = host
        self._transport.connect(member.peer, member.curve_public, host, ports)
