"""Reading a ZeroMQ socket from the event loop, without losing a message and without starving the loop."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Handle
from collections.abc import Callable
from typing import Final

import zmq

from meshinfer import limits

# Plain numbers: using pyzmq's enumerations costs a microsecond each time.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)


class Watch:
    """Calls `take` whenever `socket` may hold a message.

    `take` receives one message without waiting and deals with it; `zmq.Again` says that there is none.

    The descriptor that libzmq offers is edge-triggered: it tells once that something happened, and stays
    silent until everything was taken (zmq_getsockopt(3), ZMQ_FD). So a turn either sees the queue empty,
    which re-arms the descriptor, or is continued soon. This holds when `take` raises too: its error goes to
    the loop's exception handler, and the rest of the queue is still read.
    """

    __slots__ = ("_closed", "_descriptor", "_later", "_loop", "_socket", "_take")

    def __init__(self, loop: AbstractEventLoop, socket: zmq.Socket[bytes], take: Callable[[], None]) -> None:
        self._loop = loop
        self._socket = socket
        self._take = take
        self._closed = False
        self._descriptor = int(socket.FD)
        loop.add_reader(self._descriptor, self._turn)
        # What arrived before the loop watched gave its edge to nobody.
        self._later: Handle | None = loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._closed:
            return
        if self._later is not None:
            self._postpone(False)
        emptied = False
        try:
            emptied = self._take_some()
        except zmq.Again:
            emptied = True
        finally:
            if not emptied and not self._closed:
                self._postpone(True)

    def _take_some(self) -> bool:
        """Whether the queue was seen empty."""
        for _ in range(limits.TURN_MESSAGES):
            self._take()
            # Asking costs 2 µs, raising and catching `zmq.Again` 7; and most turns find a single message.
            if self._closed or not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
                return True
        return False

    def _postpone(self, again: bool) -> None:
        if self._later is not None:
            self._later.cancel()
        self._later = self._loop.call_soon(self._turn) if again else None

    def close(self) -> None:
        """Stop; to be called before the socket is closed."""
        self._closed = True
        self._postpone(False)
        self._loop.remove_reader(self._descriptor)
