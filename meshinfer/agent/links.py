"""Finding the other agents of this mesh, recognising them, and holding links to them.

A place where an agent may be (configured, announced by mDNS, told by a peer's advert, or where somebody knocked from)
is knocked at until it opens. Whoever shows a certificate of this mesh is linked to; anybody else is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Final

from meshinfer import __version__, limits
from meshinfer.agent.metrics import Metrics
from meshinfer.errors import DoorError, TrustError, VersionError, WireError
from meshinfer.net import loop as clock
from meshinfer.net.door import knock
from meshinfer.net.transport import Transport
from meshinfer.trust.certificate import Member
from meshinfer.trust.roster import Roster
from meshinfer.values import PeerId, Ports
from meshinfer.wire import codec
from meshinfer.wire.messages import Knock, Refused, Welcome

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
    """Who answered there last. Docker's addresses are the same on every PC: it may be this agent itself."""
    expected: set[PeerId] = field(default_factory=set)
    """Members that are said to be there."""
    trouble: str = ""
    knocking: bool = False


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a peer says that it is."""

    addresses: tuple[str, ...]
    door: int


class Links:
    """Places on one side, links to peers on the other.

    In a small mesh links are held to all peers; beyond `limits.LINKS_TO_ALL` to those that `want` names, those that
    `host` was called for lately, and those whose advert has not come yet.
    """

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
        self._homes: dict[PeerId, _Home] = {}
        self._knocked_from: dict[PeerId, str] = {}
        self._held: dict[PeerId, tuple[str, float]] = {}
        """Where a link is held to, and since when."""
        self._wanted: frozenset[PeerId] = frozenset()
        self._guests: dict[PeerId, float] = {}
        """Peers that asked for a link back, and until when they have one."""
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
            return bytes(codec.encode(Refused(limits.PROTOCOL_VERSION, __version__, str(error)))[0])
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
        if member.peer != self._me and not self._transport.linked(member.peer):
            self._knocked_from[member.peer] = host
        welcome = Welcome(
            limits.PROTOCOL_VERSION, __version__, self._certificate, self.ports, self.addresses()
        )
        return bytes(codec.encode(welcome)[0])

    # ── places ──────────────────────────────────────────────────────────────────────────────────────────────
    def add_place(self, host: str, port: int, source: Source, peer: PeerId | None = None) -> None:
        """An agent may be there, perhaps this `peer`. Knocks soon, also at a place that has been silent for long."""
        now = clock.monotonic()
        place = self._places.get((host, port))
        if place is None:
            self._make_room()
            place = self._places[host, port] = _Place(source, now)
        place.source = max(place.source, source)
        if peer is not None and peer not in place.expected and self._roster.by_peer(peer) is not None:
            place.expected.add(peer)
            if place.peer != peer:
                # Addresses go from one PC to another: whoever answered here may have moved.
                place.peer, place.due = None, now
        if place.trouble:
            place.due, place.pause_s = min(place.due, now), FIRST_PAUSE_S
        self._wake.set()

    def _make_room(self) -> None:
        if len(self._places) < limits.PLACES:
            return
        # Dictionaries keep their order: of the least trusted kind, the first is the oldest.
        linked = set(self._transport.peers)
        key = min(self._places, key=lambda key: (self._places[key].peer in linked, self._places[key].source))
        del self._places[key]

    def met(self, peer: PeerId, addresses: tuple[str, ...], door_port: int) -> None:
        """A member's advert tells where its door is: knock there until it is linked to."""
        home = _Home(addresses, door_port)
        known = self._homes.get(peer)
        if home != known:
            self._homes[peer] = home
            if known is not None:
                self._leave_behind(peer, known, home)
            elif len(self._homes) == limits.LINKS_TO_ALL + 1:
                self._let_go()
        self.seek(peer)

    def _leave_behind(self, peer: PeerId, old: _Home, new: _Home) -> None:
        """Where a peer is no more, it is not knocked at any more on its account."""
        here = {(host, new.door) for host in new.addresses}
        for key in [(host, old.door) for host in old.addresses]:
            place = self._places.get(key)
            if place is not None and key not in here:
                place.expected.discard(peer)
                if place.source is Source.PEER and not place.expected:
                    del self._places[key]

    def seek(self, peer: PeerId) -> None:
        """The peer has been heard of: knock where it may be, unless it is linked to or no link is wanted."""
        home = self._homes.get(peer)
        if home is None or self._transport.linked(peer):
            return
        # Where it knocked from comes first: that way packets do come.
        hosts = dict.fromkeys([*filter(None, [self._knocked_from.get(peer)]), *home.addresses])
        if self._wants(peer):
            for host in hosts:
                self.add_place(host, home.door, Source.PEER, peer)
        else:
            for host in hosts:
                place = self._places.get((host, home.door))
                if place is not None:
                    place.expected.add(peer)

    def want(self, peers: frozenset[PeerId]) -> None:
        """Hold links to these peers; to others as well while there are few."""
        new, self._wanted = peers - self._wanted, peers
        if len(self._homes) > limits.LINKS_TO_ALL:
            self._let_go()
        for peer in new:
            self.seek(peer)

    def host(self, peer: PeerId) -> None:
        """The peer needs a link back, for what it asks of this agent: hold one for a while."""
        self._guests[peer] = clock.monotonic() + limits.GUEST_S
        self.seek(peer)

    def _wants(self, peer: PeerId) -> bool:
        # Whose advert has not come may be the bridge to a part of the mesh that nobody here has met.
        return (
            len(self._homes) <= limits.LINKS_TO_ALL
            or peer in self._wanted
            or peer in self._guests
            or peer not in self._homes
        )

    def _let_go(self) -> None:
        for peer in self._transport.peers:
            if not self._wants(peer):
                self._transport.disconnect(peer)

    def moved(self) -> None:
        """This PC's own addresses have changed: where it met itself, another may be now."""
        for place in self._places.values():
            if place.peer == self._me:
                place.peer, place.due = None, clock.monotonic()
        self._wake.set()

    def forget(self, peer: PeerId) -> None:
        """A peer left politely: it will knock when it is back."""
        self._transport.disconnect(peer)
        self._homes.pop(peer, None)
        self._knocked_from.pop(peer, None)
        self._held.pop(peer, None)
        for key, place in list(self._places.items()):
            if place.peer != peer and peer not in place.expected:
                continue
            place.expected.discard(peer)
            if place.peer == peer:
                place.peer = None
            if place.source is not Source.CONFIGURED and not place.expected and place.peer is None:
                del self._places[key]

    def keep(self, known: Collection[PeerId]) -> None:
        """Forgets the peers that are not among `known` and were not reached for long either: a dead PC is not knocked
        at for ever. Where one was announced or configured, it will be met again."""
        now = clock.monotonic()
        self._guests = {peer: until for peer, until in self._guests.items() if until > now}
        if len(self._homes) > limits.LINKS_TO_ALL:
            self._let_go()
        for peer in {*self._transport.peers, *self._homes}:
            _, since = self._held.setdefault(peer, ("", now))
            if peer not in known and not self._transport.linked(peer) and now - since > limits.UNREACHED_S:
                self.forget(peer)

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
                if len(self._tasks) >= limits.KNOCKS_AT_ONCE:
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
        """Whether nobody would be found there that is missing."""
        if place.peer is not None:
            return place.peer == self._me or self._served(place.peer)
        return bool(place.expected) and all(map(self._served, place.expected))

    def _served(self, peer: PeerId) -> bool:
        return self._transport.linked(peer) or not self._wants(peer)

    def _knock_soon(self, key: tuple[str, int], place: _Place) -> None:
        place.knocking = True
        task = asyncio.create_task(self._knock(key, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _knock(self, key: tuple[str, int], place: _Place) -> None:
        host, port = key
        payload = bytes(codec.encode(Knock(limits.PROTOCOL_VERSION, __version__, self._certificate))[0])
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
        peer, now = member.peer, clock.monotonic()
        if self._served(peer):
            return
        held_to, since = self._held.get(peer, ("", -inf))
        if held_to and held_to != host and now - since < limits.HANDSHAKE_MS / 1000:
            # Of a peer's several addresses, the first that answered gets the time that a handshake may take.
            return
        self._held[peer] = (host, now)
        self._transport.connect(peer, member.curve_public, host, ports)
