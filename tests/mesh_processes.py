"""Real agents in processes of their own, on the loopback interface, for tests of the whole path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshinfer.front import client

LOOPBACK = "127.0.0.1"
READY_S = 180.0


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "meshinfer", *map(str, words)]


def environment() -> dict[str, str]:
    """This process's, without settings that the person who runs the tests has made for themselves."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MESHINFER_")}


def meshinfer(*words: str | Path, expect: int = 0) -> str:
    """Runs the command line; its output, which is shown where its exit code is not the expected one."""
    done = subprocess.run(
        command(*words), capture_output=True, text=True, encoding="utf-8", env=environment(), timeout=300
    )
    assert done.returncode == expect, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if expect == 0 else done.stdout + done.stderr


class Running:
    """One agent's process and home."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self.name = home.name
        self.log = home / "output.log"
        home.mkdir(parents=True, exist_ok=True)
        words = ["start", "--home", home, "--name", home.name, "--interface", LOOPBACK, "--port", "0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command(*words, "--until-input-ends", *options),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def get(self, path: str) -> dict[str, Any]:
        return client.need(self.home).get(path)

    def status(self) -> dict[str, Any]:
        try:
            return self.get("/api/status")
        except client.NotRunning as error:
            return {"ready": False, "reason": str(error)}

    def ask(self, text: str, **fields: object) -> tuple[str, dict[str, Any]]:
        """The answer's text, and what came with its end."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        said, done = "", {}
        for event in client.need(self.home).events(body):
            said += event.get("text", "")
            done = event.get("done", done)
        return said, done

    def stop(self) -> None:
        """Politely: the end of its input."""
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise AssertionError(f"{self.name} did not stop:\n{self.told()}") from None

    def told(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        log = self.home / "agent.log"
        return text + (log.read_text(encoding="utf-8", errors="replace")[-4000:] if log.exists() else "")


def wait_until(
    what: str, holds: Callable[[], object], agents: list[Running], seconds: float = READY_S
) -> None:
    """Polls `holds`; where it does not come true, fails with what the agents said."""
    deadline = time.monotonic() + seconds
    while not holds():
        dead = [agent for agent in agents if agent.process.poll() is not None]
        if dead or time.monotonic() > deadline:
            told = "\n".join(
                f"--- {agent.name}\n{json.dumps(agent.status(), indent=1)[:2000]}\n{agent.told()}"
                for agent in agents
            )
            raise AssertionError(f"{what}: did not come true within {seconds:.0f} s\n{told}")
        time.sleep(0.1)


@contextmanager
def mesh(root: Path, agents: dict[str, tuple[str, ...]]) -> Iterator[dict[str, Running]]:
    """Agents of one mesh by name, each started with its options; the first one founds it. All end with the block."""
    names = list(agents)
    first = root / names[0]
    meshinfer("mesh", "create", "--home", first)
    token = json.loads(meshinfer("mesh", "token", "--home", first, "--json"))["token"]
    for name in names[1:]:
        meshinfer("mesh", "join", token, "--home", root / name)
    running: dict[str, Running] = {}
    try:
        for name, options in agents.items():
            running[name] = Running(root / name, *options)
        yield running
    finally:
        for agent in running.values():
            if agent.process.poll() is None:
                agent.process.stdin and agent.process.stdin.close()
        for agent in running.values():
            try:
                agent.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()
