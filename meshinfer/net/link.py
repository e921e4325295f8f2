"""The sending side to one peer on one channel, and whether it is up."""

from __future__ import annotations

import struct
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from meshinfer import limits
from meshinfer.net.sockets import BOUNDS, Context, Frame, sending_socket
from meshinfer.net.watch import Watch
from meshinfer.values import Channel

_EVENT: Final = struct.Struct("=Hi")  # zmq_socket_monitor(3): event, value
# Plain numbers: or-ing pyzmq's enumerations costs a microsecond each time.
_LAST: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_WATCHED: Final = zmq.Event.CONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class Link:
    """Connects at once, and again whenever the connection breaks, until closed.

    A link that breaks is down at once, or in doubt first: either end may just have been starved, and then a new
    connection stands within a moment.
    """

    __slots__ = (
        "_changed",
        "_channel",
        "_doubt",
        "_doubtful",
        "_frame_bytes",
        "_loop",
        "_monitor",
        "_socket",
        "_watch",
        "up",
    )

    def __init__(
        self,
        loop: AbstractEventLoop,
        context: Context,
        channel: Channel,
        keys: tuple[bytes, bytes, bytes],
        target: str,
        changed: Callable[[bool], None],
        doubtful: Callable[[], bool],
    ) -> None:
        """`keys`: our secret, our public, the peer's public, raw; `changed` hears of up and down; `doubtful` says
        whether a break that is seen now may be this connection's alone, and soon over."""
        self.up = False
        self._loop = loop
        self._doubt: TimerHandle | None = None
        self._channel = channel
        self._changed = changed
        self._doubtful = doubtful
        self._frame_bytes = BOUNDS[channel].frame_bytes
        secret, public, peer_public = keys
        self._socket = sending_socket(context, channel, secret, public, peer_public)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._watch = Watch(loop, self._monitor, self._take_event)
        self._socket.connect(target)

    def send(self, frames: Sequence[Frame]) -> bool:
        """Whether the message was queued; all of it or nothing.

        Raises:
            ValueError: a frame is longer than the channel's bound: the peer would hang up on it.
        """
        sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
        if max(sizes) > self._frame_bytes:
            raise ValueError(
                f"a frame of {max(sizes)} bytes is too long for its channel ({self._frame_bytes})"
            )
        try:
            self._send(frames, sizes)
        except zmq.Again:
            # libzmq looks for freed room at most once a millisecond unless asked: it may have some after all.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                return False
            try:
                self._send(frames, sizes)
            except zmq.Again:
                return False
        return True

    def _send(self, frames: Sequence[Frame], sizes: Sequence[int]) -> None:
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            flags = _LAST if index == last else _MORE
            self._socket.send(frame, flags, copy=sizes[index] < limits.NO_COPY_BYTES)

    def _take_event(self) -> None:
        event, _ = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._set(True)
        elif event == zmq.Event.CONNECTED:
            if self._doubt is not None:
                self._begin_doubt(limits.HANDSHAKEN_S)
        elif self.up and self._doubtful():
            if self._doubt is None:
                self._begin_doubt(limits.RECONNECTED_S)
        else:
            self._set(False)

    def _begin_doubt(self, patience_s: float) -> None:
        if self._doubt is not None:
            self._doubt.cancel()
        due = self._loop.time() + patience_s
        self._doubt = self._loop.call_at(due, self._patience_over, due)

    def _patience_over(self, due: float) -> None:
        if self._loop.time() - due > limits.RECONNECTED_S:
            # It was this agent that stood still: what has happened meanwhile has not been looked at yet.
            self._begin_doubt(limits.RECONNECTED_S)
        else:
            self._set(False)

    def end_doubt(self) -> None:
        """Another link to the same peer has broken too: it is not just this one's bad luck."""
        if self._doubt is not None:
            self._set(False)

    def _set(self, up: bool) -> None:
        if self._doubt is not None:
            self._doubt.cancel()
            self._doubt = None
        if up != self.up:
            self.up = up
            self._changed(up)

    def close(self) -> None:
        self._watch.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        # A goodbye that was just sent gets out; whatever else waits is of no use to anybody.
        self._socket.close(limits.GOODBYE_MS if self._channel is Channel.CONTROL and self.up else 0)
        self._set(False)
