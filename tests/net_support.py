"""Transports with keys that follow from a word, for tests of the network."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import zmq
from zmq.utils import z85

from meshinfer.net.transport import Receive, Transport
from meshinfer.values import Channel, PeerId, Ports

PATIENCE_S = 20.0
Result = TypeVar("Result")
Heard = tuple[Channel, PeerId, list[bytes]]


def secret_key(seed: str) -> bytes:
    return hashlib.sha256(seed.encode()).digest()


def public_key(seed: str) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(secret_key(seed))))


def peer_id(seed: str) -> PeerId:
    return PeerId(hashlib.sha256(public_key(seed)).hexdigest()[:32])


async def within(awaitable: Awaitable[Result], seconds: float = PATIENCE_S) -> Result:
    return await asyncio.wait_for(awaitable, seconds)


async def eventually(holds: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """For what announces itself to nobody, such as a counter."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


def free_ports() -> Ports:
    """Four ports that were free a moment ago."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three, socket.socket() as four:
        sockets = (one, two, three, four)
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


class Side:
    """One agent's transport, what it heard, and how its links changed."""

    def __init__(self, seed: str, roster: list[str], receive: Receive | None = None) -> None:
        self.seed = seed
        self.peer = peer_id(seed)
        self.heard: asyncio.Queue[Heard] = asyncio.Queue()
        self.changes: asyncio.Queue[tuple[PeerId, Channel, bool]] = asyncio.Queue()
        self.roster = {public_key(each): peer_id(each) for each in roster}
        self.ports = Ports(0, 0, 0, 0)
        self.transport = Transport(
            secret_key(seed),
            self.roster.get,
            receive or self._hear,
            lambda *change: self.changes.put_nowait(change),
        )

    @staticmethod
    def name(seed: str) -> PeerId:
        return peer_id(seed)

    def _hear(self, channel: Channel, peer: PeerId, frames: list[memoryview]) -> None:
        self.heard.put_nowait((channel, peer, [bytes(frame) for frame in frames]))

    def bind(self, ports: Ports | None = None, host: str = "127.0.0.1") -> None:
        wanted = (ports.control, ports.data, ports.bulk) if ports else (0, 0, 0)
        self.ports = Ports(0, *self.transport.bind([host], wanted))

    def connect(self, other: Side, host: str = "127.0.0.1") -> None:
        self.transport.connect(other.peer, public_key(other.seed), host, other.ports)

    async def linked(self, peer: PeerId, up: bool = True, channels: int = 3) -> None:
        """Until so many links to `peer` went up (or down)."""
        seen: set[Channel] = set()
        while len(seen) < channels:
            changed, channel, is_up = await within(self.changes.get())
            if changed == peer and is_up == up:
                seen.add(channel)

    async def next(self) -> Heard:
        return await within(self.heard.get())


def start_child(seed: str, other: Side, ports: Ports) -> subprocess.Popen[str]:
    """An echoing process; returns when it listens."""
    theirs = ",".join(str(port) for port in (0, other.ports.control, other.ports.data, other.ports.bulk))
    ours = ",".join(str(port) for port in (0, ports.control, ports.data, ports.bulk))
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, str(here / "net_child.py"), seed, other.seed, theirs, ours],
        cwd=here.parent,
        env=_environment(here),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "listening\n"
    return child


def _environment(here: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
