"""How PCs find each other and lose each other, over real sockets: who is told of whom, and what is believed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from net_support import eventually, free_ports

from meshinfer import limits
from meshinfer.agent import membership
from meshinfer.agent.config import NetworkConfig
from meshinfer.agent.links import Source
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.network import Network
from meshinfer.mesh.events import (
    AdvertsHeard,
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
from meshinfer.net import loop as clock
from meshinfer.values import Advert, Channel, Objective, PeerId, Precision
from meshinfer.wire.advert import encode_advert
from meshinfer.wire.messages import Adverts, Heartbeat, Message, Ping, SignedAdvert, Summary

HERE = "127.0.0.1"


class Node:
    """A network with just the part of the mesh that knows who is here."""

    def __init__(
        self,
        home: Path,
        *,
        incarnation: int = 1,
        host: str = HERE,
        port: int = 0,
        claims: tuple[str, ...] = (),
    ) -> None:
        """`claims` are other addresses that it says it has."""
        self.claims = claims
        self.identity = membership.load_or_create_identity(home)
        joined = membership.load_membership(home, self.identity)
        assert joined is not None
        self.me = self.identity.peer
        self.metrics = Metrics()
        self.network = Network(
            self.identity,
            joined,
            NetworkConfig(peers=(), interfaces=(host,), port=port, discovery=False),
            self.metrics,
            self.receive,
            lambda sender, adverts: self.handle(AdvertsHeard(sender, adverts)),
            self.link_changed,
        )
        self.incarnation = incarnation
        self.heard: list[tuple[PeerId, Advert]] = []
        self.received: list[tuple[PeerId, Message]] = []

    async def open(self) -> Node:
        await self.network.open()
        own = Advert(
            peer=self.me,
            name=self.me[:4],
            incarnation=self.incarnation,
            version=1,
            addresses=(*self.claims, *self.network.addresses()),
            ports=self.network.ports,
            program="0",
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
        )
        self.mesh = Membership(own, Random(1), clock.monotonic())
        self.ticking = asyncio.create_task(self.tick())
        return self

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(max(0.001, self.mesh.next_deadline() - clock.monotonic()))
            self.handle(Tick())

    def link_changed(self, peer: PeerId, channel: Channel, up: bool) -> None:
        if channel is Channel.CONTROL:
            self.handle(LinkUp(peer) if up else LinkDown(peer))

    def receive(self, sender: PeerId, message: Message) -> None:
        self.received.append((sender, message))
        match message:
            case Heartbeat():
                self.handle(HeartbeatHeard(sender, message))
            case Summary():
                self.handle(SummaryHeard(sender, message))
            case Ping():
                self.network.links.host(sender)
            case _:
                pass

    def handle(self, event: Event) -> None:
        if isinstance(event, AdvertsHeard):
            self.heard += [(event.peer, advert) for advert in event.adverts]
        effects = self.mesh.handle(event, clock.monotonic())
        own = self.mesh.view.own
        said = (self.mesh.links, self.mesh.broken, self.mesh.leaving, self.mesh.incarnation)
        if said != (own.links, own.broken, own.leaving, own.incarnation):
            new = replace(
                own,
                version=own.version + 1,
                links=said[0],
                broken=said[1],
                leaving=said[2],
                incarnation=said[3],
            )
            effects += self.mesh.publish(new, clock.monotonic())
        for effect in effects:
            match effect:
                case SendHeartbeat(peer, heartbeat):
                    self.network.send(peer, heartbeat)
                case SendSummary(peer, summary):
                    self.network.send(peer, summary)
                case SendAdverts(peers, adverts):
                    self.network.send_adverts(peers, adverts)
                case Watch(peers):
                    self.network.links.want(peers)
                case _:
                    raise AssertionError(effect)

    def knows(self, *others: Node) -> bool:
        return {advert.peer for advert in self.mesh.view.present} == {self.me, *(one.me for one in others)}

    def look_for(self, other: Node, host: str = HERE) -> None:
        self.network.links.add_place(host, other.network.ports.door, Source.CONFIGURED)

    async def close(self) -> None:
        self.ticking.cancel()
        await self.network.close()


Start = Callable[..., Node]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Callable[..., asyncio.Future[Node]]]:
    """Starts nodes of one mesh by name, and closes them all."""
    first = tmp_path / "first"
    membership.create_mesh(first, "first", now_unix=clock.wall())
    token = membership.make_token(first, clock.wall() + 3600)
    nodes: list[Node] = []

    async def start(name: str, **options: Any) -> Node:
        home = tmp_path / name
        if not membership.is_member(home):
            membership.join(home, token, name)
        nodes.append(Node(home, **options))
        return await nodes[-1].open()

    yield lambda name, **options: asyncio.ensure_future(start(name, **options))
    for one in nodes:
        if not one.ticking.cancelled():
            await one.close()


NodeFactory = Callable[..., asyncio.Future[Node]]


async def test_one_address_is_enough_for_all_to_know_all(node: NodeFactory) -> None:
    """A knows B, B knows C: the advert that B passes on brings A and C together, certificate and addresses in it."""
    ann, bob, cyd = await node("first"), await node("bob"), await node("cyd")
    ann.look_for(bob)
    bob.look_for(cyd)
    await eventually(lambda: ann.knows(bob, cyd) and bob.knows(ann, cyd) and cyd.knows(ann, bob))
    await eventually(lambda: ann.network.transport.linked(cyd.me) and cyd.network.transport.linked(ann.me))
    heard = {(sender, advert.peer) for one in (ann, cyd) for sender, advert in one.heard}
    assert heard & {(bob.me, ann.me), (bob.me, cyd.me)}


async def test_who_leaves_politely_is_gone_at_once_and_not_knocked_at(node: NodeFactory) -> None:
    ann, bob = await node("first"), await node("bob")
    ann.look_for(bob)
    await eventually(lambda: ann.knows(bob) and bob.knows(ann))
    bob.handle(Leave())
    await bob.close()
    async with asyncio.timeout(0.2):
        while not ann.knows():
            await asyncio.sleep(0.001)
    assert bob.me not in ann.network.transport.peers


async def test_a_peer_that_was_killed_is_gone_in_a_second_and_back_after_its_restart(
    node: NodeFactory,
) -> None:
    ann, bob, cyd = await node("first"), await node("bob"), await node("cyd")
    ann.look_for(bob)
    cyd.look_for(bob)
    await eventually(lambda: ann.knows(bob, cyd) and cyd.knows(ann, bob) and bob.knows(ann, cyd))
    await bob.close()  # without a word
    async with asyncio.timeout(1.2):
        while not (ann.knows(cyd) and cyd.knows(ann)):
            await asyncio.sleep(0.001)
    again = await node("bob", incarnation=2)
    again.look_for(ann)
    await eventually(lambda: ann.knows(again, cyd) and cyd.knows(ann, again) and again.knows(ann, cyd))


async def test_a_clock_that_was_ahead_before_the_restart_locks_nobody_out(node: NodeFactory) -> None:
    ann, bob = await node("first"), await node("bob", incarnation=1000)
    bob.look_for(ann)
    await eventually(lambda: ann.knows(bob) and bob.knows(ann))
    await bob.close()
    again = await node("bob", incarnation=1)
    again.look_for(ann)
    await eventually(lambda: again.mesh.incarnation > 1000)
    await eventually(lambda: ann.knows(again) and again.knows(ann))


@pytest.mark.skipif(not socket.has_ipv6, reason="needs a second loopback address")
async def test_addresses_that_others_share_or_nobody_has_are_no_harm(node: NodeFactory) -> None:
    """As docker's are: at one of bob's addresses ann meets herself, at another there is nobody."""
    ann = await node("first", port=free_ports().door)
    bob = await node("bob", host="::1", port=ann.network.ports.door, claims=(HERE, "127.0.0.9"))
    assert bob.network.ports == ann.network.ports
    cyd = await node("cyd")
    cyd.look_for(ann)
    await eventually(lambda: ann.knows(cyd) and cyd.knows(ann))
    bob.look_for(cyd)
    # From cyd they hear of each other, with all of their addresses.
    await eventually(lambda: ann.knows(bob, cyd) and bob.knows(ann, cyd) and cyd.knows(ann, bob))
    await eventually(lambda: ann.network.transport.linked(bob.me) and bob.network.transport.linked(ann.me))
    assert ann.network.links._places[HERE, ann.network.ports.door].peer == ann.me


async def test_a_peer_that_moves_is_followed(node: NodeFactory) -> None:
    """DHCP, or from the cable to Wi-Fi: the same life at another address, and its old one is let go of."""
    ann, bob = await node("first"), await node("bob")
    bob.look_for(ann)
    await eventually(lambda: ann.knows(bob) and bob.knows(ann))
    links, door = ann.network.links, bob.network.ports.door
    assert [*links._places] == [(HERE, door)]
    links.met(bob.me, ("127.0.0.3",), door)
    assert not links._places, "it is linked to, and where it was it is no more"
    bob.network.transport.disconnect(ann.me)
    ann.network.transport.disconnect(bob.me)
    links.seek(bob.me)
    assert ("127.0.0.3", door) in links._places


async def test_only_what_its_author_signed_is_believed(node: NodeFactory) -> None:
    ann, bob = await node("first"), await node("bob")
    bob.look_for(ann)
    await eventually(lambda: ann.knows(bob) and bob.knows(ann))
    own = bob.mesh.view.own
    forged = encode_advert(replace(own, version=own.version + 100, name="forged"))
    others = encode_advert(replace(own, peer=PeerId("ab" * 16)))
    certificate = bob.network._certificate
    said = [
        SignedAdvert(certificate, forged, bytes(64)),
        SignedAdvert(certificate, others, bob.identity.sign(others)),
        SignedAdvert(certificate, b"\x90", bob.identity.sign(b"\x90")),
        SignedAdvert(bytes(len(certificate)), forged, bob.identity.sign(forged)),
    ]
    heard = len(ann.heard)
    bob.network.send(ann.me, Adverts(tuple(said)))
    counts = ann.metrics.counts
    await eventually(lambda: counts["refused.advert.signature"] == 1)
    assert counts["refused.advert.author"] == 1
    assert sum(count for name, count in counts.items() if name.startswith("refused.advert")) == 4
    assert not any(advert.name == "forged" for _, advert in ann.heard[heard:])


async def test_the_same_bytes_are_verified_once_and_old_news_is_none(
    node: NodeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = await node("first"), await node("bob")
    bob.look_for(ann)
    await eventually(lambda: ann.knows(bob) and bob.knows(ann))
    checked: list[bytes] = []
    verify = ann.network.roster.verify_signature

    def counting(peer: PeerId, payload: bytes, signature: bytes) -> bool:
        checked.append(payload)
        return verify(peer, payload, signature)

    monkeypatch.setattr(ann.network.roster, "verify_signature", counting)
    own = replace(bob.mesh.view.own, version=1000)
    payload = encode_advert(own)
    signed = SignedAdvert(bob.network._certificate, payload, bob.identity.sign(payload))
    heard = len(ann.heard)
    for _ in range(5):
        bob.network.send(ann.me, Adverts((signed,)))
    await eventually(lambda: sum(advert.version == 1000 for _, advert in ann.heard[heard:]) == 5)
    assert checked.count(payload) == 1
    older = encode_advert(replace(own, version=999))
    bob.network.send(
        ann.me, Adverts((SignedAdvert(bob.network._certificate, older, bob.identity.sign(older)),))
    )
    bob.network.send(ann.me, Ping(7))
    await eventually(lambda: (bob.me, Ping(7)) in ann.received)
    assert all(advert.version != 999 for _, advert in ann.heard)


async def test_in_a_large_mesh_links_are_held_to_those_that_are_wanted(
    node: NodeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINKS_TO_ALL", 1)
    ann, bob, cyd = await node("first"), await node("bob"), await node("cyd")
    links, transport = ann.network.links, ann.network.transport
    ann.look_for(bob)
    cyd.look_for(bob)
    await eventually(lambda: ann.knows(bob, cyd) and cyd.knows(ann, bob) and bob.knows(ann, cyd))
    cyd.network.links.want(frozenset([bob.me]))
    links.want(frozenset([bob.me]))
    assert not transport.linked(cyd.me)
    await asyncio.sleep(0.3)
    assert cyd.me not in transport.peers
    links.want(frozenset([bob.me, cyd.me]))
    await eventually(lambda: transport.linked(cyd.me))
    assert transport.linked(bob.me)
    # Cyd has no need of ann, but ann of cyd's answers.
    await eventually(lambda: ann.me not in cyd.network.transport.peers)
    ann.network.send(cyd.me, Ping(0))
    await eventually(lambda: cyd.network.transport.linked(ann.me))
    monkeypatch.setattr(limits, "GUEST_S", 0.0)
    cyd.network.links.host(ann.me)
    cyd.network.keep(cyd.mesh.view.known)
    assert not cyd.network.transport.linked(ann.me)


async def test_who_the_mesh_has_forgotten_is_forgotten_here(
    node: NodeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = await node("first"), await node("bob")
    bob.look_for(ann)
    await eventually(lambda: ann.knows(bob) and bob.knows(ann))
    await bob.close()
    await eventually(ann.knows)
    ann.network.keep({ann.me})
    assert bob.me in ann.network.transport.peers, "it may only be restarting"
    monkeypatch.setattr(limits, "UNREACHED_S", 0.0)
    ann.network.keep({ann.me})
    assert bob.me not in ann.network.transport.peers
    assert not ann.network.links._places
