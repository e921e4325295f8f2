"""An agent that is started for one question and stopped after it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import meshinfer
from meshinfer.agent.files import private_directory
from meshinfer.errors import MeshinferError, UserError
from meshinfer.front import client, readiness
from meshinfer.front.client import Client

START_TIMEOUT_S: Final = 60.0
"""Until the interface listens; importing everything takes a few seconds on a cold disk."""

STOP_TIMEOUT_S: Final = 20.0
KILL_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05
_REASON_BYTES: Final = 4096


@contextlib.contextmanager
def agent(home: Path, wait_s: float) -> Iterator[Client]:
    """Starts an agent on `home`, waits until it has a route, and stops it at the end of the block.

    The agent ends by itself should this process be killed: it holds the other end of its standard input.
    """
    private_directory(home)
    with tempfile.TemporaryFile() as complaints:
        process = _start(home, complaints)
        try:
            started = _listening(home, process, complaints)
            readiness.wait(home, started, wait_s, pause=lambda seconds: _pause(process, complaints, seconds))
            yield started
        finally:
            _stop(home, process)


def _start(home: Path, complaints: IO[bytes]) -> subprocess.Popen[bytes]:
    # -P: a file in the current directory must not take the place of a module.
    command = [sys.executable, "-P", "-m", "meshinfer", "start", "--home", str(home), "--until-input-ends"]
    # Ctrl-C in this terminal is for the question; the agent is told to stop when that has ended.
    own_group = sys.platform != "win32"
    flags = int(getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0))
    return subprocess.Popen(  # noqa: S603, our own program
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=complaints,
        env=_environment(),
        start_new_session=own_group,
        creationflags=flags,
    )


def _environment() -> dict[str, str]:
    """Ours; a source tree that the package runs from must be found without the current directory."""
    tree = Path(meshinfer.__file__).parent.parent
    if tree == Path(sysconfig.get_path("purelib")):
        return dict(os.environ)
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{before}" if before else str(tree)}


def _listening(home: Path, process: subprocess.Popen[bytes], complaints: IO[bytes]) -> Client:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (found := client.find(home)) is None or found.pid != process.pid:
        if time.monotonic() > deadline:
            raise MeshinferError(
                f"the agent did not start in {START_TIMEOUT_S:.0f} s; see {home / 'agent.log'}"
            )
        _pause(process, complaints, _POLL_S)
    return found


def _pause(process: subprocess.Popen[bytes], complaints: IO[bytes], seconds: float) -> None:
    """Waits, but not longer than the agent lives; raises what it complained of when it died."""
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return
    complaints.seek(0)
    lines = complaints.read(_REASON_BYTES).decode("utf-8", "replace").strip().splitlines()
    reason = lines[-1].removeprefix("meshinfer: ") if lines else f"the agent ended with code {code}"
    raise (UserError if code == UserError.exit_code else MeshinferError)(reason)


def _stop(home: Path, process: subprocess.Popen[bytes]) -> None:
    """By its interface and the end of its input; by force only if it does not follow."""
    if process.stdin is not None:
        process.stdin.close()
    running = client.find(home)
    if running is not None and running.pid == process.pid:
        with contextlib.suppress(MeshinferError):
            running.post("/api/stop", {})
    for end, timeout_s in ((None, STOP_TIMEOUT_S), (process.terminate, KILL_TIMEOUT_S)):
        if end is not None:
            end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=timeout_s)
            return
    process.kill()
    process.wait()
