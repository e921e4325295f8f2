"""Agents on one network find each other, whatever happens to the network and whoever shouts into it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from net_support import PATIENCE_S, eventually, within
from zeroconf import DNSOutgoing, DNSPointer, ServiceInfo, const
from zeroconf.asyncio import AsyncZeroconf

from meshinfer import limits
from meshinfer.net.discovery import SERVICE, Announcement, Discovery, Sighting
from meshinfer.values import PeerId

HERE = Path(__file__).parent
MULTICAST = ("224.0.0.251", 5353)


def peer(number: int) -> PeerId:
    return PeerId(f"{number:032x}")


class Ear:
    """A discovery on loopback, and what it told."""

    def __init__(self, number: int, mesh: str) -> None:
        self.found: asyncio.Queue[Sighting] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.discovery = Discovery(
            Announcement(limits.PROTOCOL_VERSION, mesh, peer(number), 5000 + number),
            ["127.0.0.1"],
            self.found.put_nowait,
            self.lost.put_nowait,
        )

    async def open(self) -> None:
        await self.discovery.open()
        await eventually(lambda: self.discovery.problem is None)


@pytest.fixture
def mesh() -> str:
    """Its own for each test, so that none hears another's."""
    return secrets.token_hex(8)


@pytest.fixture
async def ear(mesh: str) -> AsyncIterator[Ear]:
    ear = Ear(1, mesh)
    await ear.open()
    yield ear
    await within(ear.discovery.close())


class Announcer:
    """A process that announces, and says whom it finds."""

    def __init__(self, number: int, mesh: str, *interfaces: str, namespace: str | None = None) -> None:
        program = [sys.executable, str(HERE / "net_announcer.py"), str(number), mesh, *interfaces]
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self.process = subprocess.Popen(
            [*inside, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )

    async def next(self) -> list[object]:
        assert self.process.stdout is not None
        line = await within(asyncio.to_thread(self.process.stdout.readline))
        said = json.loads(line)
        assert isinstance(said, list)
        return said

    async def finds(self, number: int) -> list[object]:
        """The addresses of that peer, once it is found."""
        while (said := await self.next())[:2] != ["found", peer(number)]:
            pass
        assert said[2] == 5000 + number
        assert isinstance(said[3], list)
        return said[3]

    async def stop(self) -> None:
        await asyncio.to_thread(self.process.communicate, "\n", PATIENCE_S)
        assert self.process.returncode == 0


async def test_processes_on_one_pc_find_each_other_and_take_their_leave(mesh: str) -> None:
    agents = [Announcer(number, mesh, "127.0.0.1") for number in (1, 2, 3)]
    begun = time.monotonic()
    for number, agent in enumerate(agents, 1):
        seen = {str((await agent.next())[1]) for _ in range(2)}
        assert seen == {peer(other) for other in (1, 2, 3) if other != number}
    assert time.monotonic() - begun < 10
    await agents[0].stop()
    for agent in agents[1:]:
        assert await agent.next() == ["lost", f"{peer(1)}.{SERVICE}"]
        await agent.stop()


async def test_a_restarted_agent_is_found_at_its_new_door(ear: Ear, mesh: str) -> None:
    agent = Announcer(2, mesh, "127.0.0.1")
    first = await within(ear.found.get())
    agent.process.kill()  # no goodbye
    agent.process.communicate()
    again = Ear(2, mesh)
    again.discovery._announcement = Announcement(limits.PROTOCOL_VERSION, mesh, peer(2), 6002)
    await again.open()
    second = await within(ear.found.get())
    assert (first.announcement.door, second.announcement.door) == (5002, 6002)
    assert first.name == second.name
    await again.discovery.close()
    assert await within(ear.lost.get()) == second.name
    assert ear.discovery.sightings == ()


async def test_other_meshes_are_ignored(ear: Ear) -> None:
    stranger = Ear(2, "another")
    await stranger.open()
    await eventually(lambda: ear.discovery.counters["ignored"] > 0)
    assert ear.discovery.sightings == stranger.discovery.sightings == ()
    await stranger.discovery.close()


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ({}, 5000),
        ({"p": "one", "m": "x", "i": peer(9)}, 5000),
        ({"p": "²", "m": "x", "i": peer(9)}, 5000),
        ({"p": "1", "m": "x", "i": peer(9).upper() + "\n"}, 5000),
        ({"p": "1", "m": "x" * 65, "i": peer(9)}, 5000),
        ({"p": b"\xff\xfe", "m": b"\xff", "i": b"\x00"}, 5000),
        ({"p": "1", "m": "x", "i": peer(9)}, 0),
    ],
)
async def test_garbled_announcements_are_counted_and_no_more(
    ear: Ear, mesh: str, text: dict[str, str | bytes], port: int
) -> None:
    stranger = AsyncZeroconf(interfaces=["127.0.0.1"])
    info = ServiceInfo(
        SERVICE,
        f"stranger.{SERVICE}",
        port=port,
        properties=text,
        parsed_addresses=["127.0.0.1"],
        server="s.local.",
    )
    await (await stranger.async_register_service(info, cooperating_responders=True))
    await eventually(lambda: ear.discovery.counters["garbled"] > 0)
    known = Ear(2, mesh)
    await known.open()
    assert (await within(ear.found.get())).announcement.peer == peer(2)
    await known.discovery.close()
    await stranger.async_close()


async def test_a_hundred_thousand_spoofed_names_cost_little_and_known_peers_stay(ear: Ear, mesh: str) -> None:
    known = Ear(2, mesh)
    await known.open()
    before = await within(ear.found.get())
    memory = psutil.Process().memory_info().rss
    await _shout(100_000)
    await eventually(lambda: ear.discovery.counters["overflow"] > 10_000)
    assert len(ear.discovery._waiting) <= limits.DISCOVERED_NAMES
    assert len(ear.discovery._lookups) <= limits.DISCOVERY_LOOKUPS
    assert psutil.Process().memory_info().rss - memory < 100 * limits.MIB
    assert ear.discovery.sightings == (before,)
    newcomer = Ear(3, mesh)
    await newcomer.open()
    assert (await within(ear.found.get())).announcement.peer == peer(3)
    await newcomer.discovery.close()
    await known.discovery.close()


async def _shout(names: int) -> None:
    """Announce so many names that do not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as shouting:
        shouting.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        for first in range(0, names, 25):
            out = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
            for number in range(first, first + 25):
                pointer = DNSPointer(
                    SERVICE, const._TYPE_PTR, const._CLASS_IN, 4500, f"spoof{number}.{SERVICE}"
                )
                out.add_answer_at_time(pointer, 0)
            for packet in out.packets():
                shouting.sendto(packet, MULTICAST)
            await asyncio.sleep(0)


async def test_without_an_interface_it_says_so_and_ends_cleanly(mesh: str) -> None:
    said = Announcement(limits.PROTOCOL_VERSION, mesh, peer(1), 5001)
    discovery = Discovery(said, ["unplugged0"], lambda sighting: None, lambda name: None)
    await discovery.open()
    await eventually(lambda: discovery.problem == "no interface has a usable address")
    await within(discovery.close())


async def test_closing_before_it_began_is_clean(mesh: str) -> None:
    ear = Ear(1, mesh)
    await ear.discovery.open()
    await within(ear.discovery.close())
    never_opened = Ear(2, mesh)
    await within(never_opened.discovery.close())


# ── several hosts ─────────────────────────────────────────────────────────────────────────────────────────
def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2, each at `cable`."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs Linux's network namespaces, and root")
    names = (f"mi-{secrets.token_hex(3)}", f"mi-{secrets.token_hex(3)}")
    made = []
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr}")
            made.append(name)
        _ip(
            "-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1]
        )
        for number, name in enumerate(names, 1):
            _plug_in(name, f"10.77.0.{number}/24")
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _plug_in(namespace: str, address: str) -> None:
    _ip("-n", namespace, "addr", "add", address, "dev", "cable")
    _ip("-n", namespace, "link", "set", "cable", "up")
    _ip("-n", namespace, "route", "add", "224.0.0.0/4", "dev", "cable")


async def test_hosts_find_each_other_and_again_when_a_cable_returns_with_another_address(
    hosts: tuple[str, str], mesh: str
) -> None:
    left, right = (Announcer(number, mesh, namespace=name) for number, name in enumerate(hosts, 1))
    assert await left.finds(2) == ["10.77.0.2"]
    assert await right.finds(1) == ["10.77.0.1"]
    _ip("-n", hosts[1], "link", "set", "cable", "down")
    _ip("-n", hosts[1], "addr", "flush", "dev", "cable")
    await asyncio.sleep(2 * limits.INTERFACE_CHECK_S)  # long enough for the outage to be noticed
    _plug_in(hosts[1], "10.77.0.9/24")
    returned = time.monotonic()
    assert "10.77.0.9" in await left.finds(2)
    assert time.monotonic() - returned < 5.0
    await right.stop()
    assert await left.next() == ["lost", f"{peer(2)}.{SERVICE}"]
    await left.stop()


async def test_an_agent_started_without_a_network_is_found_when_the_network_comes(
    hosts: tuple[str, str], mesh: str
) -> None:
    _ip("-n", hosts[1], "link", "set", "cable", "down")
    _ip("-n", hosts[1], "addr", "flush", "dev", "cable")
    left, right = (Announcer(number, mesh, namespace=name) for number, name in enumerate(hosts, 1))
    await asyncio.sleep(limits.INTERFACE_CHECK_S)
    _plug_in(hosts[1], "10.77.0.2/24")
    assert await left.finds(2) == ["10.77.0.2"]
    assert await right.finds(1) == ["10.77.0.1"]
    await left.stop()
    await right.stop()
