"""Links between agents: how they come, go and return, and that nothing of them stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator

import psutil
import pytest
from net_support import PATIENCE_S, Side, eventually, free_ports, public_key, start_child, within

from meshinfer import limits
from meshinfer.values import Channel, Ports


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    """Two agents that trust each other and are linked both ways."""
    left, right = Side("left", ["right"]), Side("right", ["left"])
    left.bind()
    right.bind()
    left.connect(right)
    right.connect(left)
    await asyncio.gather(left.linked(right.peer), right.linked(left.peer))
    yield left, right
    await left.transport.close()
    await right.transport.close()


# ── links ─────────────────────────────────────────────────────────────────────────────────────────────────
async def test_to_a_peer_that_is_not_there_nothing_is_sent(sides: tuple[Side, Side]) -> None:
    left, _ = sides
    nobody = Side.name("nobody")
    assert not left.transport.send(Channel.DATA, nobody, [b"hello"])
    left.transport.connect(nobody, public_key("nobody"), "127.0.0.1", free_ports())
    assert not left.transport.send(Channel.DATA, nobody, [b"hello"])
    assert left.transport.counters["unsent"] == 2


async def test_connecting_twice_changes_nothing_and_a_new_address_is_followed(
    sides: tuple[Side, Side],
) -> None:
    left, right = sides
    left.connect(right)
    assert left.changes.empty()
    assert left.transport.linked(right.peer)
    moved = Side("right", ["left"])
    moved.bind()
    left.connect(moved)
    await left.linked(right.peer, up=False)
    await left.linked(right.peer, up=True)
    assert left.transport.send(Channel.DATA, right.peer, [b"moved"])
    assert (await moved.next())[2] == [b"moved"]
    await moved.transport.close()


async def test_disconnecting_drops_the_links(sides: tuple[Side, Side]) -> None:
    left, right = sides
    left.transport.disconnect(right.peer)
    await left.linked(right.peer, up=False)
    assert left.transport.peers == ()
    assert not left.transport.send(Channel.DATA, right.peer, [b"hello"])
    left.transport.disconnect(right.peer)


@pytest.mark.parametrize("host", ["localhost", "peer.example", "127.0.0.1:80", ""])
async def test_names_are_not_looked_up_on_the_thread_that_carries_the_traffic(host: str) -> None:
    side = Side("left", [])
    with pytest.raises(ValueError):
        side.transport.connect(Side.name("right"), public_key("right"), host, Ports(1, 2, 3, 4))
    await side.transport.close()


async def test_a_killed_peer_is_noticed_at_once_and_again_when_it_returns() -> None:
    side, ports = Side("parent", ["child"]), free_ports()
    side.bind()
    child = start_child("child", side, ports)
    name = Side.name("child")
    side.transport.connect(name, public_key("child"), "127.0.0.1", ports)
    await side.linked(name)
    child.kill()
    killed = time.monotonic()
    await side.linked(name, up=False)
    assert time.monotonic() - killed < 1.0
    assert not side.transport.send(Channel.DATA, name, [b"anybody there?"])
    child.wait()
    child = start_child("child", side, ports)
    await side.linked(name)

    async def echoed() -> None:
        while side.heard.empty():  # until the child has linked back, its echo has no way
            side.transport.send(Channel.DATA, name, [b"welcome back"])
            await asyncio.sleep(0.02)

    await within(echoed())
    assert await side.next() == (Channel.DATA, name, [b"welcome back"])
    child.terminate()
    assert child.wait(PATIENCE_S) == 0
    await side.transport.close()


@pytest.mark.skipif(sys.platform == "win32", reason="a process is frozen by SIGSTOP")
async def test_a_frozen_peer_blocks_no_sender_and_is_down_within_seconds_until_it_thaws() -> None:
    side, ports = Side("parent", ["child"]), free_ports()
    side.bind()
    child = start_child("child", side, ports)
    name = Side.name("child")
    side.transport.connect(name, public_key("child"), "127.0.0.1", ports)
    await side.linked(name)
    os.kill(child.pid, signal.SIGSTOP)
    frozen = time.monotonic()
    body = memoryview(bytes(1024 * 1024))
    accepted, slowest = 0, 0.0
    for _ in range(4 * limits.DATA_QUEUE_MESSAGES):
        before = time.monotonic()
        accepted += side.transport.send(Channel.DATA, name, [b"step", body])
        slowest = max(slowest, time.monotonic() - before)
    assert accepted < 2 * limits.DATA_QUEUE_MESSAGES
    assert slowest < 0.5
    # All three: what waits in a data link's socket would only come out long after the way is open again.
    await side.linked(name, up=False)
    slowest_s = limits.CONTROL_DEAD_MS / 1000 + limits.RECONNECTED_S + limits.HANDSHAKEN_S
    assert time.monotonic() - frozen < slowest_s + 1
    assert not any(side.transport.linked(name, channel) for channel in Channel)
    os.kill(child.pid, signal.SIGCONT)
    await side.linked(name)
    child.kill()
    child.wait()
    await side.transport.close()


@pytest.mark.skipif(sys.platform == "win32", reason="a process is frozen by SIGSTOP")
async def test_a_peer_that_was_starved_for_a_moment_is_not_told_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control connection breaks and stands again; what is to be sent meanwhile is refused, not lost."""
    monkeypatch.setattr(limits, "HANDSHAKEN_S", PATIENCE_S)
    side, ports = Side("parent", ["child"]), free_ports()
    side.bind()
    child = start_child("child", side, ports)
    name = Side.name("child")
    side.transport.connect(name, public_key("child"), "127.0.0.1", ports)
    await side.linked(name)
    os.kill(child.pid, signal.SIGSTOP)
    await eventually(lambda: not side.transport.send(Channel.CONTROL, name, [b"anybody there?"]))
    os.kill(child.pid, signal.SIGCONT)
    await eventually(lambda: side.transport.send(Channel.CONTROL, name, [b"back"]))
    assert side.changes.empty()
    assert side.transport.linked(name)
    child.kill()
    await side.linked(name, up=False)
    child.wait()
    await side.transport.close()


# ── closing ───────────────────────────────────────────────────────────────────────────────────────────────
async def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    async def cycle() -> None:
        left, right = Side("left", ["right"]), Side("right", ["left"])
        left.bind()
        right.bind()
        left.connect(right)
        right.connect(left)
        left.transport.connect(Side.name("nobody"), public_key("nobody"), "127.0.0.1", free_ports())
        await asyncio.gather(left.linked(right.peer), right.linked(left.peer))
        for _ in range(100):
            left.transport.send(Channel.DATA, right.peer, [bytes(10_000)])
        await within(left.transport.close())
        await within(right.transport.close())
        await left.transport.close()  # once more is harmless

    await cycle()
    gc.collect()
    process = psutil.Process()
    threads, descriptors = process.num_threads(), _descriptors(process)
    for _ in range(5):
        await cycle()
    gc.collect()
    assert process.num_threads() <= threads + 1  # asyncio's own pool may have grown by one
    assert _descriptors(process) <= descriptors
    assert all(not thread.name.startswith("zmq") for thread in threading.enumerate())


def _descriptors(process: psutil.Process) -> int:
    return int(process.num_handles() if sys.platform == "win32" else process.num_fds())


async def test_a_taken_port_is_an_error_and_leaves_nothing_bound() -> None:
    first, second = Side("first", []), Side("second", [])
    first.bind()
    taken = first.ports
    free = free_ports()
    with pytest.raises(OSError, match="cannot listen"):
        second.bind(Ports(0, free.control, free.data, taken.bulk))

    def binds() -> bool:  # libzmq lets go of a port in its own thread
        with contextlib.suppress(OSError):
            second.bind(free)
        return second.ports.data == free.data

    await eventually(binds)
    await first.transport.close()
    await second.transport.close()
