"""Encrypted messages between agents: a socket per channel receives, one per peer and channel sends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils import z85

from meshinfer import limits
from meshinfer.net.link import Link
from meshinfer.net.sockets import (
    WILDCARD,
    Context,
    Frame,
    Socket,
    checked_address,
    endpoint,
    receiving_socket,
)
from meshinfer.net.watch import Watch
from meshinfer.net.zap import Zap
from meshinfer.values import Channel, PeerId, Ports

Receive = Callable[[Channel, PeerId, list[memoryview]], None]
OnLink = Callable[[PeerId, Channel, bool], None]

KEY_BYTES: Final = 32
_NOBLOCK: Final = int(zmq.NOBLOCK)  # a plain number is a microsecond faster than the enumeration
_MAX_SOCKETS: Final = 65_536  # a peer takes nine, monitors included; libzmq's own default is 1,023


@dataclass(frozen=True, slots=True)
class _Target:
    """Where and as whom a peer is reached; a change of it means new connections."""

    curve_public: bytes
    host: str
    ports: Ports


class Transport:
    """Everything that one agent sends to and receives from the peers it trusts. Belongs to one event loop.

    A message's sender is the holder of the CURVE key that opened the connection it came by, whatever its
    frames say.

    Args:
        curve_secret: raw X25519 key, 32 bytes.
        admit: who holds a raw public key, None for a stranger. Asked for every connection and for every
            message, so that a peer taken off the roster is not heard any more, whatever connections it has.
        receive: called in the loop with each message; the views own their memory, and are writable.
        on_link: called in the loop when the link to a connected peer comes up or goes down. A killed process
            shows within a millisecond; a vanished PC within 2 s.

    `counters` counts since the start: `received`, `received_bytes`, `sent`, `sent_bytes`, `unsent` (queue
    full or link down), `refused_keys` (strangers' handshakes), `dropped` (messages of peers no longer
    admitted, or of too many frames).
    """

    def __init__(
        self,
        curve_secret: bytes,
        admit: Callable[[bytes], PeerId | None],
        receive: Receive,
        on_link: OnLink | None = None,
    ) -> None:
        if len(curve_secret) != KEY_BYTES:
            raise ValueError("a CURVE key has 32 bytes")
        self._secret = curve_secret
        self._public: bytes = z85.decode(zmq.curve_public(z85.encode(curve_secret)))
        self._admit = admit
        self._receive = receive
        self._on_link = on_link
        self.counters: Counter[str] = Counter()
        self._context: Context | None = None
        self._zap: Zap | None = None
        self._inboxes: dict[Channel, tuple[Socket, Watch]] = {}
        self._targets: dict[PeerId, _Target] = {}
        self._links: dict[tuple[PeerId, Channel], Link] = {}

    # ── open and close ──────────────────────────────────────────────────────────────────────────────────────
    def bind(self, hosts: Sequence[str], ports: Sequence[int]) -> tuple[int, int, int]:
        """Listen on `hosts` (addresses, or `*`) at three ports (control, data, bulk; 0: any).

        Returns the ports bound. After an error nothing stays bound, and `bind` may be called again.

        Raises:
            OSError: a port is taken (`EADDRINUSE`, `EACCES`), or an address is not this PC's.
        """
        if self._inboxes:
            raise RuntimeError("this transport is already bound")
        self._start()
        sockets: dict[Channel, Socket] = {}
        try:
            bound = [self._bind_channel(sockets, channel, hosts, ports[channel]) for channel in Channel]
        except zmq.ZMQError as error:
            for socket in sockets.values():
                socket.close(0)
            raise OSError(error.errno, f"cannot listen: {error}") from error
        loop = asyncio.get_running_loop()
        for channel, socket in sockets.items():
            self._inboxes[channel] = (socket, Watch(loop, socket, self._taker(channel, socket)))
        return bound[0], bound[1], bound[2]

    def _start(self) -> None:
        if self._context is not None:
            return
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._zap = Zap(
            asyncio.get_running_loop(),
            self._context,
            lambda key: self._admit(key) is not None,
            lambda: self._count("refused_keys"),
        )

    def _bind_channel(
        self, sockets: dict[Channel, Socket], channel: Channel, hosts: Sequence[str], port: int
    ) -> int:
        assert self._context is not None
        socket = sockets[channel] = receiving_socket(self._context, channel, self._secret)
        for host in hosts:
            socket.bind(endpoint(host if host == WILDCARD else checked_address(host), port or "*"))
            if port == 0:
                port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return port

    async def close(self) -> None:
        """Close every socket, and return when libzmq's threads have ended; what is unsent is dropped."""
        for peer in tuple(self._targets):
            self.disconnect(peer)
        for socket, watch in self._inboxes.values():
            watch.close()
            socket.close(0)
        self._inboxes.clear()
        if self._zap is not None:
            self._zap.close()
            self._zap = None
        if self._context is not None:
            context, self._context = self._context, None
            await asyncio.to_thread(context.term)

    # ── receive ─────────────────────────────────────────────────────────────────────────────────────────────
    def _taker(self, channel: Channel, socket: Socket) -> Callable[[], None]:
        def take() -> None:
            routing = socket.recv(_NOBLOCK, copy=False)
            frames: list[memoryview] = []
            size = 0
            more = routing.more
            while more:
                frame = socket.recv(_NOBLOCK, copy=False)
                more = frame.more
                size += len(frame)
                if len(frames) <= limits.MESSAGE_FRAMES:
                    frames.append(frame.buffer)
            peer = self._sender(routing)
            if peer is None or len(frames) > limits.MESSAGE_FRAMES:
                self._count("dropped")
                return
            self.counters["received"] += 1
            self.counters["received_bytes"] += size
            self._receive(channel, peer, frames)

        return take

    def _sender(self, routing: zmq.Frame) -> PeerId | None:
        # The user id is what our own ZAP handler made of the key; a connection that bypassed it would have
        # none.
        try:
            user = routing.get("User-Id")
        except zmq.ZMQError:
            return None
        return self._admit(bytes.fromhex(str(user)))

    def _count(self, what: str) -> None:
        self.counters[what] += 1

    # ── send ────────────────────────────────────────────────────────────────────────────────────────────────
    def connect(self, peer: PeerId, curve_public: bytes, host: str, ports: Ports) -> None:
        """Hold links to `peer` at an IP address, from now until `disconnect`. Idempotent; follows changes.

        Raises:
            ValueError: `host` is not an IP address (resolve names with `door.knock`, which says what it
                reached), or the key has not 32 bytes.
        """
        target = _Target(curve_public, checked_address(host), ports)
        if len(curve_public) != KEY_BYTES:
            raise ValueError("a CURVE key has 32 bytes")
        if self._targets.get(peer) == target:
            return
        self.disconnect(peer)
        self._start()
        self._targets[peer] = target
        for channel in Channel:
            self._links[peer, channel] = self._link(peer, channel, target)

    def _link(self, peer: PeerId, channel: Channel, target: _Target) -> Link:
        assert self._context is not None

        def changed(up: bool) -> None:
            if self._on_link is not None:
                self._on_link(peer, channel, up)
            if not up and self._targets.get(peer) is target:
                self._broken(peer, channel, target)

        return Link(
            asyncio.get_running_loop(),
            self._context,
            channel,
            (self._secret, self._public, target.curve_public),
            endpoint(target.host, target.ports.of(channel)),
            changed,
            lambda: channel is Channel.CONTROL and self._carries_bodies(peer),
        )

    def _carries_bodies(self, peer: PeerId) -> bool:
        return all(self.linked(peer, channel) for channel in (Channel.DATA, Channel.BULK))

    def _broken(self, peer: PeerId, channel: Channel, target: _Target) -> None:
        """A killed process shows on all links at once: then the control link is in no doubt any more. Where no reset
        came, TCP would go on waiting longer and longer between its tries, for up to `BODY_DEAD_MS` after the way is
        open again: with the control link the others begin anew."""
        if channel is not Channel.CONTROL:
            self._links[peer, Channel.CONTROL].end_doubt()
            return
        for other in (Channel.DATA, Channel.BULK):
            link = self._links[peer, other]
            if link.up:
                self._links[peer, other] = self._link(peer, other, target)
                link.close()

    def disconnect(self, peer: PeerId) -> None:
        """Drop the links to `peer`, if there are any. `on_link` is told of those that were up."""
        if self._targets.pop(peer, None) is None:
            return
        for link in [self._links.pop((peer, channel)) for channel in Channel]:
            link.close()

    def send(self, channel: Channel, peer: PeerId, frames: Sequence[Frame]) -> bool:
        """Hand a message over for sending; never waits.

        False when `peer` is not connected, its link is down, or its queue is full: then nothing was sent.
        True promises no delivery: a link that breaks takes its queue with it.

        Frames are contiguous memory. Those of `NO_COPY_BYTES` or more are not copied: nobody may change them
        afterwards.

        Raises:
            ValueError: no frame, or one that is longer than the channel allows (`sockets.BOUNDS`).
        """
        link = self._links.get((peer, channel))
        if link is None or not link.send(frames):
            self.counters["unsent"] += 1
            return False
        self.counters["sent"] += 1
        return True

    def linked(self, peer: PeerId, channel: Channel = Channel.CONTROL) -> bool:
        """Whether the link is up now, as far as is known."""
        link = self._links.get((peer, channel))
        return link is not None and link.up

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers that links are held to, up or down."""
        return tuple(self._targets)
