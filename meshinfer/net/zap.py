"""Says to libzmq who may connect: ZAP (ZeroMQ RFC 27), answered in the event loop."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

import zmq

from meshinfer.net.watch import Watch

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_CURVE_REQUEST_FRAMES = 9  # routing id, empty, version, request id, domain, address, identity, mechanism, key


class Zap:
    """Admits the CURVE keys that `admits` (raw, 32 bytes) accepts, and makes each one the user id of its
    messages.

    pyzmq's own authenticator would do, but runs on `zmq.asyncio`, whose futures cost as much again as the
    handshake, and copies the roster instead of asking it. To be opened before the context's first server
    socket is bound.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        admits: Callable[[bytes], bool],
        refused: Callable[[], None],
    ) -> None:
        self._admits = admits
        self._refused = refused
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._watch = Watch(loop, self._socket, self._answer)

    def _answer(self) -> None:
        request = self._socket.recv_multipart(zmq.NOBLOCK)
        admitted = self._judge(request)
        if not admitted:
            self._refused()
        status, text = (b"200", b"OK") if admitted else (b"400", b"not on the roster")
        user = request[-1].hex().encode("ascii") if admitted else b""
        routing, request_id = request[0], request[3]
        self._socket.send_multipart([routing, b"", _VERSION, request_id, status, text, user, b""])

    def _judge(self, request: list[bytes]) -> bool:
        if len(request) != _CURVE_REQUEST_FRAMES or request[2] != _VERSION or request[7] != b"CURVE":
            return False
        return self._admits(request[8])

    def close(self) -> None:
        self._watch.close()
        self._socket.close(0)
