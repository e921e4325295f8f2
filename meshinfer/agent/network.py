"""One agent's place on the network: its door, its sockets, what announces it and what finds the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from meshinfer.agent.config import NetworkConfig
from meshinfer.agent.links import Links, Source
from meshinfer.agent.metrics import Metrics
from meshinfer.errors import TrustError, WireError
from meshinfer.limits import ADDRESSES, PROTOCOL_VERSION, SIGNED_ADVERTS
from meshinfer.net import loop as clock
from meshinfer.net.discovery import Announcement, Discovery, Sighting
from meshinfer.net.door import Door
from meshinfer.net.interfaces import current_addresses, listening_hosts
from meshinfer.net.ports import open_ports
from meshinfer.net.transport import Transport
from meshinfer.trust.identity import Identity
from meshinfer.trust.roster import Roster
from meshinfer.trust.token import Membership
from meshinfer.values import Advert, Channel, PeerId, Ports
from meshinfer.wire import codec
from meshinfer.wire.advert import decode_advert, encode_advert
from meshinfer.wire.control import pack_adverts
from meshinfer.wire.messages import (
    Adverts,
    Blob,
    Fetch,
    Free,
    Heartbeat,
    Message,
    Missing,
    Ping,
    Pong,
    Probe,
    Probed,
    Refusal,
    Result,
    SignedAdvert,
    Step,
    Summary,
)

_CHANNELS: Final[dict[type[Any], Channel]] = {
    **dict.fromkeys((Adverts, Heartbeat, Summary, Ping, Pong), Channel.CONTROL),
    **dict.fromkeys((Step, Result, Refusal, Free), Channel.DATA),
    **dict.fromkeys((Fetch, Blob, Missing, Probe, Probed), Channel.BULK),
}

_log = logging.getLogger(__name__)


class Network:
    """Opens everything, and turns what comes in into messages of members.

    Args:
        receive: called with each message of a member, but for adverts.
        heard: called with who sent adverts, and those of them whose authors are members and whose signatures hold.
        link_changed: called when a link to a peer comes up or goes down.
    """

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        config: NetworkConfig,
        metrics: Metrics,
        receive: Callable[[PeerId, Message], None],
        heard: Callable[[PeerId, tuple[Advert, ...]], None],
        link_changed: Callable[[PeerId, Channel, bool], None],
    ) -> None:
        self._identity = identity
        self._certificate = membership.certificate
        self._config = config
        self._metrics = metrics
        self._receive = receive
        self._heard = heard
        self._link_changed = link_changed
        self.roster = Roster(membership.mesh_public)
        self.roster.admit(membership.certificate, clock.wall())
        self.transport = Transport(identity.curve_secret, self._admit, self._take, self._on_link)
        self.links = Links(self.roster, self.transport, membership.certificate, identity.peer, metrics)
        self._door = Door(self.links.answer)
        self._discovery: Discovery | None = None
        self._mesh = membership.mesh
        self._signed: dict[PeerId, tuple[Advert, SignedAdvert]] = {}
        """The newest advert of each author as it was signed, this agent's own included."""
        self._addresses: tuple[str, ...] = ()
        self.ports = Ports(0, 0, 0, 0)

    async def open(self, known_places: tuple[tuple[str, int], ...] = ()) -> None:
        """Raises ConfigError where no port is free or an interface does not exist."""
        await self.refresh()
        hosts = listening_hosts(self._config.interfaces)
        self.ports = await open_ports(self._door, self.transport, hosts, self._config.port)
        self.links.ports = self.ports
        self.links.addresses = self.addresses
        for address in self._config.peers:
            self.links.add_place(address.host, address.port, Source.CONFIGURED)
        for host, port in known_places:
            self.links.add_place(host, port, Source.CONFIGURED)
        if self._config.discovery:
            announcement = Announcement(PROTOCOL_VERSION, self._mesh, self._identity.peer, self.ports.door)
            self._discovery = Discovery(announcement, self._config.interfaces, self._sighted, _lost)
            await self._discovery.open()
        self.links.start()

    async def close(self) -> None:
        if self._discovery is not None:
            await self._discovery.close()
        await self.links.close()
        await self._door.close()
        await self.transport.close()

    def addresses(self) -> tuple[str, ...]:
        """Where others may reach this PC, as of the last `refresh`."""
        return self._addresses

    async def refresh(self) -> None:
        """Read this PC's addresses anew: they change with DHCP and cables."""
        found = await asyncio.to_thread(current_addresses, self._config.interfaces)
        addresses = tuple(address.host for address in found[:ADDRESSES])
        if addresses != self._addresses:
            self._addresses = addresses
            self.links.moved()

    def keep(self, known: Collection[PeerId]) -> None:
        """Forgets what was kept of peers that the mesh has forgotten."""
        for peer in [peer for peer in self._signed if peer not in known]:
            del self._signed[peer]
        self.links.keep(known)

    def problems(self) -> list[str]:
        """Sentences for a person who wonders where the others are."""
        problems = [f"{row['address']}: {row['reason']}" for row in self.links.troubles()]
        if self._discovery is not None and self._discovery.problem:
            problems.append(f"discovery: {self._discovery.problem}")
        return problems

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────
    def send(self, peer: PeerId, message: Message) -> bool:
        """False when the message cannot be handed over now."""
        return self.transport.send(_CHANNELS[type(message)], peer, codec.encode(message))

    def send_adverts(self, peers: Iterable[PeerId], adverts: Sequence[Advert]) -> None:
        """As their authors signed them, in as few messages as hold them. What a peer cannot take now it gets later: it
        misses it in a summary."""
        signed = [one for one in map(self._signed_by_author, adverts) if one is not None]
        messages = [codec.encode(message) for message in pack_adverts(signed)]
        for peer in peers:
            for frames in messages:
                self.transport.send(Channel.CONTROL, peer, frames)

    def _signed_by_author(self, advert: Advert) -> SignedAdvert | None:
        known = self._signed.get(advert.peer)
        if advert.peer == self._identity.peer and (known is None or known[0] != advert):
            payload = encode_advert(advert)
            signed = SignedAdvert(self._certificate, payload, self._identity.sign(payload))
            self._signed[advert.peer] = (advert, signed)
            return signed
        if known is None:
            self._metrics.count("unsent.advert.forgotten")
            return None
        return known[1]

    # ── receiving ───────────────────────────────────────────────────────────────────────────────────────────
    def _admit(self, curve_public: bytes) -> PeerId | None:
        member = self.roster.by_curve(curve_public)
        return member.peer if member is not None and member.peer != self._identity.peer else None

    def _take(self, channel: Channel, peer: PeerId, frames: list[memoryview]) -> None:
        try:
            message = codec.decode(channel, frames)
        except WireError as error:
            self._metrics.count(f"refused.{channel.name.lower()}.{error.kind}")
            return
        if isinstance(message, Adverts):
            self._take_adverts(peer, message)
            return
        if isinstance(message, Heartbeat | Summary):
            # Who reaches this agent is to be reached by it.
            self.links.seek(peer)
        self._receive(peer, message)

    def _take_adverts(self, sender: PeerId, message: Adverts) -> None:
        checked = (self._checked(sender, signed) for signed in message.adverts)
        adverts = tuple(advert for advert in checked if advert is not None)
        others = [advert for advert in adverts if advert.peer != self._identity.peer]
        for advert in others:
            if not advert.leaving:
                self.links.met(advert.peer, advert.addresses, advert.ports.door)
        if adverts:
            self._heard(sender, adverts)
        for advert in others:
            if advert.leaving:
                self.links.forget(advert.peer)

    def _checked(self, sender: PeerId, signed: SignedAdvert) -> Advert | None:
        """The advert, if a member signed it and nothing newer of that member is known; None otherwise."""
        try:
            author = self.roster.admit(signed.certificate, clock.wall()).peer
        except TrustError as error:
            self._metrics.count(f"refused.advert.{error.kind}")
            return None
        known = self._signed.get(author)
        if known is not None and known[1].payload == signed.payload:
            # Each comes from several neighbours: the same bytes need no second signature check.
            return known[0]
        advert = self._verified(author, signed)
        if advert is None:
            return None
        if known is not None and _age(advert) <= _age(known[0]):
            if sender == author:
                # Its clock was ahead before it started anew: nobody believes it, but it can be reached, and told.
                self.links.met(author, advert.addresses, advert.ports.door)
            return None
        if author == self._identity.peer:
            # Of a former life, under a clock that was ahead: the mesh must hear of it, but nobody from here.
            return advert
        if known is None and len(self._signed) >= SIGNED_ADVERTS:
            self._metrics.count("refused.advert.full")
            return None
        self._signed[author] = (advert, signed)
        return advert

    def _verified(self, author: PeerId, signed: SignedAdvert) -> Advert | None:
        if not self.roster.verify_signature(author, signed.payload, signed.signature):
            self._metrics.count("refused.advert.signature")
            return None
        try:
            advert = decode_advert(signed.payload)
        except WireError as error:
            self._metrics.count(f"refused.advert.{error.kind}")
            return None
        if advert.peer != author:
            self._metrics.count("refused.advert.author")
            return None
        return advert

    # ── who is where ────────────────────────────────────────────────────────────────────────────────────────
    def _sighted(self, sighting: Sighting) -> None:
        said = sighting.announcement
        for host in sighting.addresses:
            self.links.add_place(host, said.door, Source.DISCOVERY, said.peer)

    def _on_link(self, peer: PeerId, channel: Channel, up: bool) -> None:
        _log.info("%s link to %s is %s", channel.name.lower(), peer[:8], "up" if up else "down")
        self._link_changed(peer, channel, up)


def _age(advert: Advert) -> tuple[int, int]:
    return advert.incarnation, advert.version


def _lost(_name: str) -> None:
    """An announcement that ran out proves nothing: the links themselves tell who is gone."""
