"""Runs an agent in the foreground: its lock, its log, its local interface, and the ways to end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Final

import click

from meshinfer.agent.config import Config
from meshinfer.agent.files import HomeLock, private_directory, remove_leftovers
from meshinfer.front import defects

LOG_FILE: Final = "agent.log"
_LOG_BYTES: Final = 4 * 1024 * 1024
_LOG_FILES: Final = 2
"""Two old logs are kept: 12 MiB in all, days of an ordinary office."""

_SWITCH_S: Final = 0.001
"""How long the inference thread may wait for the interpreter while the loop holds it, and the other way round.
Python's own 5 ms are half a step of a small model."""


def serve(home: Path, config: Config, *, until_input_ends: bool = False) -> None:
    """Returns when the agent was told to stop. Raises UserError if one runs on this home already."""
    private_directory(home)
    sys.setswitchinterval(_SWITCH_S)
    with HomeLock(home), _logging_to(home):
        remove_leftovers(home)
        from meshinfer.net import loop

        loop.run(lambda stop: _serve(home, config, stop, until_input_ends))


async def _serve(home: Path, config: Config, stop: asyncio.Event, until_input_ends: bool) -> None:
    from meshinfer.agent.agent import Agent
    from meshinfer.front.http import LocalApi

    agent = Agent(home, config)
    api = LocalApi(agent, home, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        stack.push_async_callback(api.stop)
        await api.start()
        if until_input_ends:
            _watch_input(stop)
        _greet(agent.status())
        await _first(stop, agent.stopped)


def _greet(status: dict[str, object]) -> None:
    mesh = (
        f"in mesh {str(status['mesh'])[:8]}"
        if status.get("mesh")
        else "alone (meshinfer mesh create begins a mesh)"
    )
    click.echo(f"{status.get('name')} runs {mesh}; stop with Ctrl-C or: meshinfer stop")
    if status.get("reason"):
        click.echo(str(status["reason"]))


async def _first(*events: asyncio.Event) -> None:
    """Waits until one of `events` is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _watch_input(stop: asyncio.Event) -> None:
    """Whoever started this agent holds the other end of its input: it ends when they do, however they do."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def read() -> None:
        # Not through `sys.stdin`: a thread that holds its lock when Python ends aborts the process.
        while os.read(descriptor, 4096):
            pass
        # The loop may have ended for another reason before.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=read, name="input", daemon=True).start()


# ── the log ─────────────────────────────────────────────────────────────────────────────────────


class _Formatter(logging.Formatter):
    """Tracebacks without messages, which may quote a prompt or a key."""

    def formatException(  # noqa: N802, the name is logging's
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return defects.trace(ei[1]) if ei[1] is not None else ""


class _Log(RotatingFileHandler):
    """A line that a full or broken disk refuses is lost, and nothing else: no traceback, and no message quoted."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the name is logging's
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is tried again here
            super().close()


@contextlib.contextmanager
def _logging_to(home: Path) -> Iterator[None]:
    """INFO and worse to the log in the home; warnings to the terminal as well."""
    to_file = _Log(home / LOG_FILE, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8")
    to_file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.WARNING)
    to_terminal.setFormatter(_Formatter("meshinfer: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    for handler in (to_file, to_terminal):
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in (to_file, to_terminal):
            root.removeHandler(handler)
            handler.close()
