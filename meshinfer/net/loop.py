"""The event loop of an agent: which kind, what stops it, and the clocks."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from meshinfer.net import process

Result = TypeVar("Result")

monotonic: Callable[[], float] = time.monotonic
"""Seconds that only ever grow, for deadlines. The same clock as the loop's own on all systems."""

wall: Callable[[], float] = time.time
"""Seconds since 1970, for what other PCs must understand: expiry dates, incarnations."""


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, Result]]) -> Result:
    """Run `main(stop)` to its end; `stop` is set by Ctrl+C, SIGTERM or, on Windows, Ctrl+Break and closing.

    The second such signal ends the process as if nobody had listened for it.
    """
    process.prepare()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_run(main))


async def _run(main: Callable[[asyncio.Event], Awaitable[Result]]) -> Result:
    stop = asyncio.Event()
    with stopping(stop):
        return await main(stop)


def new_loop() -> asyncio.AbstractEventLoop:
    """A selector loop on every system: Windows's default one cannot watch sockets for reading, as ZeroMQ needs."""
    return asyncio.SelectorEventLoop()


@contextmanager
def stopping(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` on the signals that ask a program to end, as long as the context lasts. Main thread only.

    Python runs a signal's handler between two of its own instructions, and a loop that waits in `select`
    executes none; on Windows a signal does not even interrupt it. A byte on a socket that the loop watches
    wakes it on both.
    """
    loop = asyncio.get_running_loop()
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    previous = {number: signal.getsignal(number) for number in _signals()}

    def handle(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    loop.add_reader(woken, lambda: woken.recv(64))
    previous_descriptor = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(previous_descriptor)
        loop.remove_reader(woken)
        woken.close()
        waker.close()


def _signals() -> list[signal.Signals]:
    asked = [signal.SIGINT, signal.SIGTERM]
    if sys.platform == "win32":
        asked.append(signal.SIGBREAK)
    return asked
