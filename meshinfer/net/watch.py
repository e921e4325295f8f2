"""Reading a ZeroMQ socket from the event loop, without losing a message and without starving the loop."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Handle
from collections.abc import Callable

import zmq

from meshinfer import limits


class Watch:
    """Calls `take` whenever `socket` may hold a message.

    `take` receives one message without waiting and deals with it; `zmq.Again` from it means that there is
    none.

    The descriptor that libzmq offers is edge-triggered: it tells once that something happened, and stays
    silent until everything was taken (zmq_getsockopt(3), ZMQ_FD). So a turn either ends with `zmq.Again`,
    which re-arms it, or is continued soon. This holds when `take` raises too: its error goes to the loop's
    exception handler, and the rest of the queue is still read.
    """

    __slots__ = ("_closed", "_descriptor", "_later", "_loop", "_take")

    def __init__(self, loop: AbstractEventLoop, socket: zmq.Socket[bytes], take: Callable[[], None]) -> None:
        self._loop = loop
        self._take = take
        self._closed = False
        self._descriptor = int(socket.FD)
        loop.add_reader(self._descriptor, self._turn)
        # What arrived before the loop watched gave its edge to nobody.
        self._later: Handle | None = loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._closed:
            return
        self._postpone(False)
        drained = False
        try:
            self._take_some()
        except zmq.Again:
            drained = True
        finally:
            if not drained and not self._closed:
                self._postpone(True)

    def _take_some(self) -> None:
        for _ in range(limits.TURN_MESSAGES):
            if self._closed:
                return
            self._take()

    def _postpone(self, again: bool) -> None:
        if self._later is not None:
            self._later.cancel()
        self._later = self._loop.call_soon(self._turn) if again else None

    def close(self) -> None:
        """Stop; to be called before the socket is closed."""
        self._closed = True
        self._postpone(False)
        self._loop.remove_reader(self._descriptor)
