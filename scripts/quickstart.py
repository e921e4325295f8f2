"""Shows the whole path on one PC: three agents, each too small for the model, answer a question together.

Needs nothing but a Python: `python scripts/quickstart.py`. Everything lies in .venv and .quickstart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import environment

HOME = environment.ROOT / ".quickstart"
NAMES = ("anna", "ben", "clara")
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
MODEL = "smollm2"
LOOPBACK = "127.0.0.1"
"""Named by its address, for each system has another name for the interface."""

SHARE_OF_MODEL = 0.42
"""Room that each agent gives, beside what the model would take all in one place: weights, KV and buffers.
Just enough for three: up to 14 of 30 layers at the two that only lend, 3 at the one that asks."""

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
_LOG_TAIL_LINES = 15


class QuickstartFailure(Exception):
    """One sentence for the person."""


def main() -> int:
    arguments = _arguments()
    # Ended from outside, it still stops what it started.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began_s = time.monotonic()
    try:
        environment.ensure()
        result = _run(keep=arguments.keep, as_json=arguments.json)
    except (QuickstartFailure, environment.EnvironmentFailure) as failure:
        print(json.dumps({"error": str(failure)}) if arguments.json else f"quickstart: {failure}", flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    result["total_s"] = round(time.monotonic() - began_s, 1)
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        _say(f"done in {result['total_s']} s")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--keep", action="store_true", help="leave the agents running")
    return parser.parse_args()


def _say(sentence: str) -> None:
    """On standard error, so that standard output is the answer, or the JSON."""
    print(f"── {sentence}", file=sys.stderr, flush=True)


def _run(*, keep: bool, as_json: bool) -> dict[str, Any]:
    homes = [HOME / name for name in NAMES]
    _stop_leftovers(homes)
    _make_mesh(homes)
    model = _pull(homes[0])
    whole = int(model["layers_memory_bytes"] + model["asking_memory_bytes"])
    memory = int(whole * SHARE_OF_MODEL)
    _say(f"starting three agents with {memory >> 20} MiB each, for a model that takes {whole >> 20} MiB")
    with _agents(homes, memory, keep=keep) as agents:
        began_s = time.monotonic()
        _wait_until_ready(homes[0], agents)
        ready_s = time.monotonic() - began_s
        _say(f"found each other and loaded their layers in {ready_s:.1f} s; asking: {QUESTION}")
        answer = _ask_for_json(homes[0]) if as_json else _ask_streaming(homes[0])
        plan = _json(["plan"], homes[0])
        _check(answer["text"], plan)
        return {**answer, "plan": plan, "ready_s": round(ready_s, 1), "memory_bytes": memory}


def _check(text: str, plan: dict[str, Any]) -> None:
    if EXPECTED not in text:
        raise QuickstartFailure(f"the answer should name {EXPECTED}, but is: {text!r}")
    if len({owner["peer"] for owner in plan.get("owners", ())}) < 2:
        raise QuickstartFailure("the answer should have come over at least two peers; see meshinfer plan")


# ── commands, as a person would type them ─────────────────────────────────────────────────────────


def _command(arguments: Sequence[str], home: Path) -> list[str]:
    return [str(environment.program("meshinfer")), *arguments, "--home", str(home)]


def _environment() -> dict[str, str]:
    """Without settings of the person's own agent: these three are to be like each other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHINFER_")}
    return kept | {"PYTHONUTF8": "1"}


def _json(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """The command's JSON. Raises QuickstartFailure with the sentence that it failed with."""
    done = subprocess.run(
        _command([*arguments, "--json"], home),
        capture_output=True,
        encoding="utf-8",
        env=_environment(),
        stdin=subprocess.DEVNULL,
    )
    try:
        value = json.loads(done.stdout)
    except ValueError:
        raise QuickstartFailure(f"meshinfer {' '.join(arguments)} failed: {done.stderr.strip()}") from None
    if done.returncode != 0:
        raise QuickstartFailure(f"meshinfer {' '.join(arguments)}: {value.get('error', value)}")
    return dict(value)


def _stop_leftovers(homes: Sequence[Path]) -> None:
    """Agents of a run with --keep; one that was killed has taken its agents with it."""
    for home in homes:
        if (home / "api.json").exists():
            _json(["stop"], home)


def _make_mesh(homes: Sequence[Path]) -> None:
    first, *others = homes
    if not (first / "mesh.key").exists():
        _say("making a mesh")
        _json(["mesh", "create"], first)
    strangers = [home for home in others if not (home / "membership").exists()]
    if strangers:
        token = _json(["mesh", "token"], first)["token"]
        for home in strangers:
            _json(["mesh", "join", token, "--replace"], home)


def _pull(home: Path) -> dict[str, Any]:
    """The model's facts; pulls it the first time, with progress on standard error."""
    if not _whole(home):
        _say(f"pulling {MODEL}")
        done = subprocess.run(_command(["pull", MODEL], home), env=_environment(), stdout=sys.stderr)
        if done.returncode != 0:
            raise QuickstartFailure(f"{MODEL} could not be pulled")
    found = _whole(home)
    if found is None:
        raise QuickstartFailure(f"{MODEL} was pulled and is not whole; remove {HOME} and try again")
    return found


def _whole(home: Path) -> dict[str, Any] | None:
    models = _json(["models"], home)["models"]
    return next((model for model in models if model["name"] == MODEL and model.get("complete")), None)


def _ask_for_json(home: Path) -> dict[str, Any]:
    return _json(["ask", QUESTION, "--temperature", "0", "--max-tokens", "64"], home)


def _ask_streaming(home: Path) -> dict[str, Any]:
    """Passes on what comes as it comes; the figures follow the answer."""
    command = _command(["ask", QUESTION, "--stats", "--temperature", "0", "--max-tokens", "64"], home)
    parts: list[bytes] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment()) as process:
        assert process.stdout is not None
        while part := os.read(process.stdout.fileno(), 4096):
            parts.append(part)
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
    if process.returncode != 0:
        raise QuickstartFailure("the question was not answered")
    return {"text": b"".join(parts).decode("utf-8", "replace")}


# ── the agents ────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _agents(homes: Sequence[Path], memory: int, *, keep: bool) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three running agents; stopped when the block ends, however it does, unless well and with `keep`."""
    agents: list[subprocess.Popen[bytes]] = []
    ended_well = False
    try:
        for home in homes:
            agents.append(_start(home, memory, asks=home is homes[0], keep=keep))
        yield agents
        ended_well = True
    except QuickstartFailure:
        _show_logs(homes)
        raise
    finally:
        if keep and ended_well:
            _say(f"the agents go on; ask again with: {' '.join(_command(['ask', '…'], homes[0]))}")
        else:
            _stop(homes, agents)


def _start(home: Path, memory: int, *, asks: bool, keep: bool) -> subprocess.Popen[bytes]:
    arguments = ["start", "--name", home.name, "--interface", LOOPBACK, "--memory", str(memory)]
    arguments += ["--split", "always", *([] if asks else ["--lend-only"])]
    # An agent that watches its input ends with this process, even if that is killed.
    arguments += [] if keep else ["--until-input-ends"]
    with (home / "output.log").open("wb") as log:
        return subprocess.Popen(
            _command(arguments, home),
            stdin=subprocess.DEVNULL if keep else subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment(),
            # Ctrl-C here is for this script, which then stops them in order.
            start_new_session=os.name != "nt",
            creationflags=int(getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)),
        )


def _wait_until_ready(home: Path, agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until the first agent has a route. Raises QuickstartFailure when an agent ends, or time does."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    said = ""
    while True:
        for name, agent in zip(NAMES, agents, strict=True):
            if agent.poll() is not None:
                raise QuickstartFailure(f"the agent {name} ended with code {agent.returncode}")
        status = _status(home)
        if status.get("ready"):
            return
        reason = str(status.get("reason") or "the agents are starting")
        if time.monotonic() > deadline_s:
            raise QuickstartFailure(f"not ready after {READY_TIMEOUT_S:.0f} s: {reason}")
        if reason != said:
            _say(reason)
            said = reason
        # Not oftener: each command is a process, and takes from the agents on a PC with few cores.
        with contextlib.suppress(subprocess.TimeoutExpired):
            agents[0].wait(timeout=0.5)


def _status(home: Path) -> dict[str, Any]:
    """Empty while the agent is still starting."""
    try:
        return _json(["status"], home)
    except QuickstartFailure:
        return {}


def _stop(homes: Sequence[Path], agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Politely and at once, then by force; an agent whose input has ended stops by itself."""
    for agent in agents:
        if agent.stdin is not None:
            agent.stdin.close()
        else:
            agent.terminate()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for home, agent in zip(homes, agents, strict=False):
        try:
            agent.wait(timeout=max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            _say(f"the agent {home.name} does not stop, and is ended")
            agent.kill()
            agent.wait()


def _show_logs(homes: Sequence[Path]) -> None:
    for home in homes:
        for name in ("output.log", "agent.log"):
            with contextlib.suppress(OSError):
                lines = (home / name).read_text(encoding="utf-8", errors="replace").splitlines()
                if lines:
                    _say(f"the end of {home / name}:")
                    print("\n".join(lines[-_LOG_TAIL_LINES:]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
