"""An agent stops when it is asked to, however it is asked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from meshinfer.net import loop

WAITING = """
import asyncio
from meshinfer.net import loop

async def main(stop):
    print("waiting", flush=True)
    await stop.wait()
    print("cleaning up", flush=True)
    {after}
    return 7

raise SystemExit(loop.run(main))
"""


def start(after: str = "pass") -> subprocess.Popen[str]:
    flags = subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING.format(after=after)],
        stdout=subprocess.PIPE,
        text=True,
        creationflags=flags,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    return child


def signals() -> list[signal.Signals]:
    return [signal.CTRL_BREAK_EVENT] if sys.platform == "win32" else [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", signals())
def test_a_signal_wakes_an_idle_agent_and_lets_it_clean_up(number: signal.Signals) -> None:
    child = start()
    child.send_signal(number)
    output, _ = child.communicate(timeout=20)
    assert output == "cleaning up\n"
    assert child.returncode == 7


@pytest.mark.skipif(sys.platform == "win32", reason="a console event reaches the whole group")
def test_the_second_signal_ends_an_agent_that_hangs() -> None:
    child = start(after="await asyncio.sleep(600)")
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None
    assert child.stdout.readline() == "cleaning up\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == -signal.SIGTERM


def test_the_result_and_errors_come_back() -> None:
    async def fails(stop: asyncio.Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.run(fails)


@pytest.mark.skipif(sys.platform == "win32", reason="Python cannot send itself a signal there without ending")
def test_handlers_are_restored() -> None:
    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 20)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop.run(main)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_an_agent_may_open_as_many_sockets_as_the_system_permits() -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096)); " + (
        "from meshinfer.net import process; process.prepare(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == "(4096, 4096)\n"


def test_the_loop_can_watch_sockets_for_reading() -> None:
    """Windows's default loop cannot, and ZeroMQ needs it."""
    made = loop.new_loop()
    assert isinstance(made, asyncio.SelectorEventLoop)
    made.close()
