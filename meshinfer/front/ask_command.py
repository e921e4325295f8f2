"""`meshinfer ask`: one question to the agent that runs here, or to one started for it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from meshinfer.errors import PromptError
from meshinfer.front.options import home_option, json_option, print_json

if TYPE_CHECKING:
    from meshinfer.front.client import Client


@click.command()
@click.argument("question")
@home_option
@json_option
@click.option("--stats", is_flag=True, help="End with the figures and the route.")
@click.option("--model", metavar="NAME", help="A model's name or id; else the one that the mesh serves.")
@click.option("--system", metavar="TEXT", help="An instruction that goes before the question.")
@click.option("--max-tokens", type=int, help="Longest answer, in tokens.")
@click.option("--temperature", type=float, help="0 always takes the likeliest token.")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--min-p", type=float)
@click.option("--repetition-penalty", type=float)
@click.option("--seed", type=int, help="The same seed, the same choices.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--wait", type=float, default=120.0, show_default=True, help="Seconds to wait for a route.")
def ask(
    question: str, home: Path, as_json: bool, stats: bool, wait: float, system: str | None, **given: Any
) -> None:
    """Ask QUESTION ("-" reads it from standard input) and print the answer as it comes."""
    body = {"messages": _messages(_question(question), system)}
    body |= {name: value for name, value in given.items() if value is not None and value != ()}
    with _ended_by_sigterm(), _agent(home, wait, asks_person=not as_json) as client:
        done = _stream(client, body, show=not as_json)
    if as_json:
        print_json(done)
    elif stats:
        from meshinfer.front import render

        click.echo(f"\n{render.statistics(done['stats'])}")


def _question(argument: str) -> str:
    text = sys.stdin.buffer.read().decode("utf-8", "replace") if argument == "-" else argument
    if not text.strip():
        raise PromptError('the question is empty; write it in quotes: meshinfer ask "…"')
    return text


def _messages(question: str, system: str | None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}]


def _stream(client: Client, body: dict[str, Any], *, show: bool) -> dict[str, Any]:
    """Prints what comes; returns text, finish and stats. A text begun ends with a newline in any case."""
    from meshinfer.front.render import safe

    parts: list[str] = []
    done: dict[str, Any] = {}
    try:
        with contextlib.closing(client.events(body)) as events:
            for event in events:
                if "text" in event:
                    parts.append(event["text"])
                    if show:
                        click.echo(safe(event["text"]) if sys.stdout.isatty() else event["text"], nl=False)
                        sys.stdout.flush()
                elif "done" in event:
                    done = event["done"]
    finally:
        if show and parts:
            click.echo()
    return {"text": "".join(parts), **done}


@contextlib.contextmanager
def _agent(home: Path, wait_s: float, *, asks_person: bool) -> Iterator[Client]:
    """The agent of this home once it has a route; one that was started for the question ends with it."""
    from meshinfer.front import client, guest, readiness

    running = client.find(home)
    if running is not None:
        readiness.wait(home, running, wait_s)
        yield running
        return
    readiness.need_model(home, may_pull=asks_person and sys.stdin.isatty() and sys.stderr.isatty())
    with guest.agent(home, wait_s) as started:
        yield started


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that an agent started for the question is stopped."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
