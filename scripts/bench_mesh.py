"""The other contestant of bench.py: a mesh of three agents, behind lines of JSON.

This process holds the asker, which runs no layers; two owners run in processes of their own. All three talk over
encrypted sockets on the loopback interface, as they would over a network.

Reads {"prompts": ["text", …], "tokens": N} a line; answers {"seconds": …, "tokens": …, "ttft_s": …, "route": […]}.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshinfer.agent import config, membership
from meshinfer.agent.agent import Agent
from meshinfer.answer.question import Done, Message, Question, SamplingParams, Text
from meshinfer.net import loop

LOOPBACK = "127.0.0.1"
MEMORY = "2 GiB"
READY_S = 120.0


def make_homes(root: Path, store: Path, owners: int) -> tuple[Path, list[Path]]:
    """The asker's home with the model in it, and the owners', all of one mesh."""
    asker = root / "asker"
    membership.create_mesh(asker, "asker")
    shutil.copytree(store, asker / "models")
    token = membership.make_token(asker, time.time() + 3600)
    others = [root / f"owner{number}" for number in range(1, owners + 1)]
    for home in others:
        membership.join(home, token, home.name)
    return asker, others


def start_owner(home: Path, precision: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "meshinfer", "start", "--home", str(home), "--name", home.name]
    command += [
        "--interface",
        LOOPBACK,
        "--port",
        "0",
        "--memory",
        MEMORY,
        "--lend-only",
        "--until-input-ends",
    ]
    command += ["--precision", precision]
    log = (home / "output.log").open("wb")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


async def ask(agent: Agent, text: str, tokens: int) -> tuple[Done, float]:
    question = Question(
        (Message("user", text),),
        SamplingParams(temperature=0.0),
        max_tokens=tokens,
        plain=True,
        ignore_eos=True,
    )
    start = time.perf_counter()
    first = 0.0
    async for event in agent.ask(question):
        if isinstance(event, Text) and not first:
            first = time.perf_counter() - start
        if isinstance(event, Done):
            return event, first
    raise AssertionError("an answer ends with Done")


async def run(agent: Agent, prompts: list[str], tokens: int) -> dict[str, Any]:
    start = time.perf_counter()
    answers = await asyncio.gather(*(ask(agent, prompt, tokens) for prompt in prompts))
    seconds = time.perf_counter() - start
    done = [event for event, _ in answers]
    stages = done[0].stats.route
    return {
        "seconds": seconds,
        "tokens": sum(event.stats.tokens for event in done),
        "prompt_tokens": [event.stats.prompt_tokens for event in done],
        "ttft_s": [first for _, first in answers],
        "route": [
            {
                "name": stage.name,
                "layers": str(stage.span),
                "step_ms": stage.step_ms_p50,
                "queue_ms": stage.queue_ms_p50,
                "hop_ms": stage.hop_ms_p50,
            }
            for stage in stages
        ],
        "metrics": agent.metrics.as_json(),
    }


async def serve(asker: Path, precision: str) -> None:
    options = {
        "name": "asker",
        "network.interfaces": (LOOPBACK,),
        "network.port": 0,
        "sharing.memory": MEMORY,
        "sharing.lend": False,
        "placement.split": "always",
        "engine.precision": precision,
    }
    agent = Agent(asker, config.load(asker, {}, options))
    await agent.start()
    try:
        deadline = time.monotonic() + READY_S
        while (reason := agent.why_not_ready()) is not None or len(agent.plan().get("owners", ())) < 2:
            if time.monotonic() > deadline:
                raise SystemExit(f"the mesh was not ready within {READY_S:.0f} s: {reason}")
            await asyncio.sleep(0.1)
        print(json.dumps({"ready": True, "plan": agent.plan()}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = json.loads(line)
            print(json.dumps(await run(agent, task["prompts"], task["tokens"])), flush=True)
    finally:
        await agent.stop()


def main() -> None:
    store, precision = Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as root:
        asker, owners = make_homes(Path(root), store, 2)
        processes = [start_owner(home, precision) for home in owners]
        try:
            loop.run(lambda stop: serve(asker, precision))
        finally:
            for process in processes:
                process.communicate()


if __name__ == "__main__":
    main()
