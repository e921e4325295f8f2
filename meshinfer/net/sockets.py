"""What each kind of ZeroMQ socket is set to, and how addresses are written."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

import zmq

from meshinfer import limits
from meshinfer.values import Channel

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Frame = bytes | bytearray | memoryview

WILDCARD: Final = "*"
"""Bind to every address of this PC, those that come later included."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait per peer and direction, how long a frame may be, when silence means death."""

    queue_messages: int
    frame_bytes: int
    ping_ms: int
    dead_ms: int


BOUNDS: Final = {
    Channel.CONTROL: Bounds(
        limits.CONTROL_QUEUE_MESSAGES, limits.CONTROL_BYTES, limits.CONTROL_PING_MS, limits.CONTROL_DEAD_MS
    ),
    Channel.DATA: Bounds(
        limits.DATA_QUEUE_MESSAGES, limits.BODY_BYTES, limits.BODY_PING_MS, limits.BODY_DEAD_MS
    ),
    Channel.BULK: Bounds(
        limits.BULK_QUEUE_MESSAGES, limits.BLOB_CHUNK_BYTES, limits.BODY_PING_MS, limits.BODY_DEAD_MS
    ),
}


def endpoint(host: str, port: int | str) -> str:
    """The ZeroMQ name of a TCP endpoint; `host` is an IPv4 or IPv6 address, or `*`."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def checked_address(host: str) -> str:
    """`host` if it is an IP address: libzmq would look a name up on its I/O thread, where all traffic waits.

    Raises:
        ValueError: it is a name.
    """
    ipaddress.ip_address(host)
    return host


def receiving_socket(context: Context, channel: Channel, curve_secret: bytes) -> Socket:
    """A ROUTER that admits whom ZAP admits; nothing is ever sent on it but pings."""
    socket = context.socket(zmq.ROUTER)
    _set_common(socket, channel)
    socket.setsockopt(zmq.RCVHWM, BOUNDS[channel].queue_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, BOUNDS[channel].frame_bytes + limits.CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"mesh")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secret)
    return socket


def sending_socket(
    context: Context, channel: Channel, curve_secret: bytes, curve_public: bytes, peer_public: bytes
) -> Socket:
    """A DEALER that speaks to the holder of `peer_public` alone; what comes back on it is not read."""
    socket = context.socket(zmq.DEALER)
    _set_common(socket, channel)
    socket.setsockopt(zmq.SNDHWM, BOUNDS[channel].queue_messages)
    # A peer that answers here breaks the protocol: one small message waits, then its connection stands still.
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.HANDSHAKE_BYTES)
    # Nothing is queued for a peer that is not there: `send` says so at once, and another route is chosen.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, limits.RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, limits.RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, limits.HANDSHAKE_MS)
    socket.setsockopt(zmq.CURVE_SERVERKEY, peer_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, curve_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secret)
    return socket


def _set_common(socket: Socket, channel: Channel) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, limits.HANDSHAKE_MS)
    # libzmq counts the timeout from the first ping that nothing came after (zmq_setsockopt(3)), and that ping is up
    # to one interval later than the last sign of life. Both ends ping: neither needs the other's patience (TTL).
    bounds = BOUNDS[channel]
    socket.setsockopt(zmq.HEARTBEAT_IVL, bounds.ping_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, bounds.dead_ms - bounds.ping_ms)
