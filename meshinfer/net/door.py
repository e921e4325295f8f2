"""The one port that strangers may speak to: one short question, one short answer, in the clear.

Plain TCP and not ZeroMQ: asyncio can bound how many strangers are connected and for how long; libzmq cannot.
A message is its length in 4 bytes, big-endian, and then its bytes, at most `DOOR_BYTES`. The connection ends
after the answer.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from meshinfer import limits
from meshinfer.errors import DoorError
from meshinfer.net.rate import Rate
from meshinfer.net.sockets import WILDCARD, checked_address

_LENGTH: Final = struct.Struct(">I")
_LOCALHOST: Final = ("127.0.0.1", "::1")
_NO_IPV6: Final = {
    errno.EAFNOSUPPORT,
    errno.EADDRNOTAVAIL,
    getattr(errno, "WSAEAFNOSUPPORT", errno.EAFNOSUPPORT),
}

Handler = Callable[[bytes, str], bytes | None]


@dataclass(frozen=True, slots=True)
class Reply:
    """What an agent answered, and the IP address that it was reached at: what `Transport.connect` needs."""

    payload: bytes
    host: str


class _GarbledError(Exception):
    """What came is no message."""


async def knock(host: str, port: int, payload: bytes, timeout_s: float = limits.KNOCK_TIMEOUT_S) -> Reply:
    """Ask the agent at `host` (a name or an address) one question. A name's addresses are all tried.

    Raises:
        DoorError: the name does not resolve, nobody listens, no answer came in time, or what listens is no
        agent.
    """
    # "localhost" is this PC by definition (RFC 6761), whatever half of it the resolver knows.
    hosts = _LOCALHOST if host == "localhost" else (host,)
    reasons: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            for candidate in hosts:
                try:
                    return await _knock_once(candidate, port, payload)
                except OSError as error:
                    reasons.append(error.strerror or str(error))
    except TimeoutError:
        reasons.append(f"no answer within {timeout_s:g} s")
    except asyncio.IncompleteReadError:
        reasons.append("it hung up without an answer")
    except _GarbledError:
        reasons.append("what listens there is no agent")
    raise DoorError(f"cannot reach an agent at {host}, port {port}: {reasons[-1]}")


async def _knock_once(host: str, port: int, payload: bytes) -> Reply:
    reader, writer = await asyncio.open_connection(
        host, port, limit=limits.DOOR_BYTES, happy_eyeballs_delay=0.25
    )
    try:
        reached = str(writer.get_extra_info("peername")[0])
        _write(writer, payload)
        return Reply(await _read(reader), reached)
    finally:
        writer.close()


async def _read(reader: StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limits.DOOR_BYTES:
        raise _GarbledError
    return await reader.readexactly(length)


def _write(writer: StreamWriter, payload: bytes) -> None:
    if len(payload) > limits.DOOR_BYTES:
        raise ValueError(f"{len(payload)} bytes are too many for a door")
    writer.write(_LENGTH.pack(len(payload)) + payload)


class Door:
    """Listens for knocks, and answers each with what `handle(payload, host)` returns; None turns it away in
    silence.

    `counters`: `knocks` that were handled, and those turned away: `crowded` (too many at once), `hasty` (too
    many from one host), `garbled` (no message, or none in time).
    """

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self.counters: Counter[str] = Counter()
        self._rate = Rate()
        self._guests: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def open(self, hosts: Sequence[str], port: int) -> int:
        """Listen on `hosts` (addresses, or `*`); 0 lets the system choose the port. Returns the port.

        Raises:
            OSError: the port is taken, or an address is not this PC's; then nothing is bound.
        """
        sockets: list[socket.socket] = []
        try:
            for host in hosts:
                for listening in _listen(host, port):
                    sockets.append(listening)
                    port = int(listening.getsockname()[1])
        except OSError:
            for listening in sockets:
                listening.close()
            raise
        self._servers = [
            await asyncio.start_server(self._greet, sock=one, limit=limits.DOOR_BYTES) for one in sockets
        ]
        return port

    async def close(self) -> None:
        """Stop listening, and hang up on everyone."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    def _greet(self, reader: StreamReader, writer: StreamWriter) -> None:
        host = str((writer.get_extra_info("peername") or ("gone",))[0])
        reason = self._turned_away(host)
        if reason is not None:
            self.counters[reason] += 1
            writer.transport.abort()
            return
        self._guests[host] += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer, host))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._leave(done, host))

    def _turned_away(self, host: str) -> str | None:
        if len(self._tasks) >= limits.DOOR_CONNECTIONS:
            return "crowded"
        if self._guests[host] >= limits.DOOR_CONNECTIONS_PER_HOST:
            return "crowded"
        return None if self._rate.allow(host, asyncio.get_running_loop().time()) else "hasty"

    def _leave(self, task: asyncio.Task[None], host: str) -> None:
        self._tasks.discard(task)
        self._guests[host] -= 1
        if not self._guests[host]:
            del self._guests[host]
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a knock could not be handled", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    async def _serve(self, reader: StreamReader, writer: StreamWriter, host: str) -> None:
        try:
            payload = await self._hear(reader)
            if payload is not None and (answer := self._handle(payload, host)) is not None:
                _write(writer, answer)
        finally:
            writer.close()

    async def _hear(self, reader: StreamReader) -> bytes | None:
        try:
            async with asyncio.timeout(limits.KNOCK_TIMEOUT_S):
                payload = await _read(reader)
        except (OSError, EOFError, _GarbledError):  # TimeoutError is an OSError
            self.counters["garbled"] += 1
            return None
        self.counters["knocks"] += 1
        return payload


def _listen(host: str, port: int) -> list[socket.socket]:
    if host != WILDCARD:
        return [_bound(checked_address(host), port)]
    sockets = [_bound("0.0.0.0", port)]  # noqa: S104 - what the wildcard asks for
    try:
        sockets.append(_bound("::", int(sockets[0].getsockname()[1])))
    except OSError as error:
        if error.errno not in _NO_IPV6:
            sockets[0].close()
            raise
    return sockets


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            # Without it Windows lets another program bind the same port, and either may get the connections.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            # A port whose last connections are still fading is free to listen on; one that is listened on is
            # not.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        listening.listen()
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
