"""What stands between a question and its answer: a model, and a route through it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from meshinfer.errors import CapacityError, ModelError, RouteError
from meshinfer.front.client import Client
from meshinfer.front.render import safe

POLL_S: Final = 0.1
SETTLING_S: Final = 8.0
"""Discovery takes 1 to 3 s; a shortage that lasts longer than this will not go away by itself."""

_SHOWN_CHARS: Final = 78
"""What surely fits in one line of a terminal, so that it can be wiped."""


def need_model(home: Path, *, may_pull: bool) -> None:
    """Raises ModelError, naming the command, if no model can be had here; pulls it if the person agrees.

    The agent of a mesh may be served by others, and is asked itself.
    """
    from meshinfer.agent import membership

    if any((home / "models").glob("*/manifest.json")) or membership.is_member(home):
        return
    from meshinfer.agent import config

    name = config.load(home).model.default
    if not (
        may_pull and click.confirm(f"There is no model here yet. Pull {name} now?", default=True, err=True)
    ):
        raise ModelError(no_model(name))
    from meshinfer.front import model_commands

    model_commands.pull_to(home, name)


def no_model(name: str) -> str:
    return f"there is no model here yet; get one with: meshinfer pull {name}"


def wait(home: Path, client: Client, wait_s: float, pause: Callable[[float], None] = time.sleep) -> None:
    """Returns when the agent has a route. Raises what stands in the way: Route-, Capacity- or ModelError."""
    began = time.monotonic()
    shown = ""
    while True:
        status = client.get("/api/status")
        if status.get("ready"):
            break
        waited_s = time.monotonic() - began
        reason = str(status.get("reason") or "no route through the model yet")
        if waited_s > SETTLING_S:
            _give_up_early(home, client, status)
        if waited_s > wait_s:
            raise RouteError(f"{reason} (waited {waited_s:.0f} s)")
        shown = _show(reason, shown)
        pause(POLL_S)
    _show("", shown)


def _give_up_early(home: Path, client: Client, status: dict[str, Any]) -> None:
    """Time alone mends neither a missing model nor missing memory."""
    if not status.get("model") and not client.get("/api/models")["models"]:
        from meshinfer.agent import config

        raise ModelError(no_model(config.load(home).model.default))
    plan = client.get("/api/plan")
    if plan.get("by_peer"):
        raise CapacityError(str(plan.get("reason") or status.get("reason")))


def _show(reason: str, shown: str) -> str:
    """On a terminal, one line that says what is waited for; it vanishes when the waiting ends."""
    if reason == shown or not sys.stderr.isatty():
        return reason
    line = safe(reason).replace("\n", " ")[:_SHOWN_CHARS]
    click.echo(f"\r{line:<{_SHOWN_CHARS if shown else 0}}\r{line}", err=True, nl=False)
    return reason
