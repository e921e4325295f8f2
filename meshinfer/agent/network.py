"""One agent's place on the network: its door, its sockets, what announces it and what finds the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from meshinfer.agent.config import NetworkConfig
from meshinfer.agent.links import Links, Source
from meshinfer.agent.metrics import Metrics
from meshinfer.errors import WireError
from meshinfer.limits import ADDRESSES, PROTOCOL_VERSION
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
from meshinfer.wire.advert import decode_advert
from meshinfer.wire.messages import AdvertMessage, Introduction, Message

_log = logging.getLogger(__name__)


class Network:
    """Opens everything, and turns what comes in into messages of members.

    Args:
        receive: called with each message of a member, but for adverts and introductions.
        heard: called with each advert whose author it came from and whose signature holds.
        link_changed: called when a link to a peer comes up or goes down.
    """

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        config: NetworkConfig,
        metrics: Metrics,
        receive: Callable[[PeerId, Message], None],
        heard: Callable[[Advert], None],
        link_changed: Callable[[PeerId, Channel, bool], None],
    ) -> None:
        self._identity = identity
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
        self._adverts: dict[PeerId, tuple[bytes, Advert]] = {}
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
        self._addresses = tuple(address.host for address in found[:ADDRESSES])

    def problems(self) -> list[str]:
        """Sentences for a person who wonders where the others are."""
        problems = [f"{row['address']}: {row['reason']}" for row in self.links.troubles()]
        if self._discovery is not None and self._discovery.problem:
            problems.append(f"discovery: {self._discovery.problem}")
        return problems

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────
    def broadcast(self, message: Message) -> None:
        """To every peer whose link is up. One that is not hears the next one."""
        frames = codec.encode(message)
        for peer in self.transport.peers:
            if self.transport.linked(peer):
                self.transport.send(Channel.CONTROL, peer, frames)

    def leave(self, peer: PeerId) -> None:
        """A peer said goodbye."""
        self._adverts.pop(peer, None)
        self.links.forget(peer)

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
        if isinstance(message, AdvertMessage):
            self._take_advert(peer, message)
        elif isinstance(message, Introduction):
            self.links.introduced(message)
        else:
            self._receive(peer, message)

    def _take_advert(self, peer: PeerId, message: AdvertMessage) -> None:
        known = self._adverts.get(peer)
        if known is not None and known[0] == message.payload:
            # Most are heartbeats: the same bytes need no second signature check.
            advert = known[1]
        else:
            checked = self._checked_advert(peer, message)
            if checked is None:
                return
            advert = checked
            self._adverts[peer] = (message.payload, advert)
            if known is None:
                for other in self._linked_besides(peer):
                    self._introduce(peer, other)
        self.links.heard_from(peer, advert.addresses, advert.ports.door)
        self._heard(advert)

    def _checked_advert(self, peer: PeerId, message: AdvertMessage) -> Advert | None:
        if not self.roster.verify_signature(peer, message.payload, message.signature):
            self._metrics.count("refused.advert.signature")
            return None
        try:
            advert = decode_advert(message.payload)
        except WireError as error:
            self._metrics.count(f"refused.advert.{error.kind}")
            return None
        if advert.peer != peer:
            self._metrics.count("refused.advert.author")
            return None
        return advert

    # ── who is where ────────────────────────────────────────────────────────────────────────────────────────
    def _sighted(self, sighting: Sighting) -> None:
        for host in sighting.addresses:
            self.links.add_place(host, sighting.announcement.door, Source.DISCOVERY)

    def _on_link(self, peer: PeerId, channel: Channel, up: bool) -> None:
        _log.info("%s link to %s is %s", channel.name.lower(), peer[:8], "up" if up else "down")
        if up and channel is Channel.CONTROL:
            for other in self._linked_besides(peer):
                self._introduce(other, peer)
        self._link_changed(peer, channel, up)

    def _linked_besides(self, peer: PeerId) -> list[PeerId]:
        return [other for other in self.transport.peers if other != peer and self.transport.linked(other)]

    def _introduce(self, who: PeerId, to: PeerId) -> None:
        """Tell `to` where `who` may be: an agent that knows one peer soon knows all."""
        known = self._adverts.get(who)
        if known is None:
            return
        introduction = self.links.introduction_of(who, known[1].addresses, known[1].ports.door)
        if introduction is not None:
            self.transport.send(Channel.CONTROL, to, codec.encode(introduction))


def _lost(_name: str) -> None:
    """An announcement that ran out proves nothing: the links themselves tell who is gone."""
