"""Commands that start an agent, stop it, and show what it knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from meshinfer.errors import MeshinferError
from meshinfer.front import render, tables
from meshinfer.front.options import home_option, json_option, print_json

STOP_TIMEOUT_S: Final = 30.0
_STOP_POLL_S: Final = 0.05


@click.command()
@home_option
@click.option("--name", help="What others see in their tables.")
@click.option("--port", type=int, help="Where the door is looked for first; 0 for any free port.")
@click.option(
    "--peer", "peers", multiple=True, metavar="HOST:PORT", help="Another PC's door; may be repeated."
)
@click.option(
    "--interface", "interfaces", multiple=True, metavar="NAME", help="Network interface or address."
)
@click.option("--memory", metavar="AMOUNT", help='What this PC lends, such as "2 GiB".')
@click.option("--precision", metavar="auto|exact", help="exact: f32 throughout, the same text every time.")
@click.option("--device", metavar="NAME", help="auto, CPU, GPU …")
@click.option("--threads", type=int, help="Threads for computing.")
@click.option("--split", metavar="auto|always", help="always: over several PCs even where one has room.")
@click.option("--model", metavar="NAME", help="The model to serve.")
@click.option("--lend-only", is_flag=True, help="Nobody asks here: all memory goes to layers for others.")
@click.option("--ask-only", is_flag=True, help="This PC only asks: it runs no layers for others.")
@click.option(
    "--no-discovery", is_flag=True, help="Find peers by configured addresses alone, not by multicast."
)
@click.option("--until-input-ends", is_flag=True, hidden=True, help="Stop when standard input ends.")
def start(
    home: Path,
    name: str | None,
    port: int | None,
    peers: tuple[str, ...],
    interfaces: tuple[str, ...],
    memory: str | None,
    precision: str | None,
    device: str | None,
    threads: int | None,
    split: str | None,
    model: str | None,
    lend_only: bool,
    ask_only: bool,
    no_discovery: bool,
    until_input_ends: bool,
) -> None:
    """Run the agent here until Ctrl-C or `meshinfer stop`."""
    from meshinfer.agent import config

    given = {
        "name": name,
        "network.port": port,
        "network.peers": peers,
        "network.interfaces": interfaces,
        "network.discovery": False if no_discovery else None,
        "sharing.memory": memory,
        "sharing.ask": False if lend_only else None,
        "sharing.lend": False if ask_only else None,
        "engine.precision": precision,
        "engine.device": device,
        "engine.threads": threads,
        "placement.split": split,
        "model.default": model,
    }
    loaded = config.load(home, options=given)
    from meshinfer.front import run

    run.serve(home, loaded, until_input_ends=until_input_ends)


@click.command()
@home_option
@json_option
def stop(home: Path, as_json: bool) -> None:
    """Stop the agent that runs on this home, and wait until it has."""
    from meshinfer.agent.files import agent_runs
    from meshinfer.front import client

    running = client.find(home)
    if running is None and not agent_runs(home):
        _tell({"stopped": False, "pid": None}, "no agent was running", as_json)
        return
    agent = running or client.need(home)
    agent.post("/api/stop", {})
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while agent_runs(home):
        if time.monotonic() > deadline:
            raise MeshinferError(
                f"the agent (process {agent.pid}) has not stopped in {STOP_TIMEOUT_S:.0f} s; end it"
            )
        time.sleep(_STOP_POLL_S)
    _tell({"stopped": True, "pid": agent.pid}, f"stopped the agent (process {agent.pid})", as_json)


def _tell(value: dict[str, object], sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        click.echo(sentence)


def _get(home: Path, path: str) -> dict[str, Any]:
    from meshinfer.front import client

    return client.need(home).get(path)


@click.command()
@home_option
@json_option
def status(home: Path, as_json: bool) -> None:
    """Show how this PC's agent is, and if not ready, why."""
    value = _get(home, "/api/status")
    if as_json:
        print_json(value)
        return
    for label, text in _status_rows(value):
        click.echo(f"{label:<10} {render.safe(text)}")


def _status_rows(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for label in ("name", "peer", "mesh", "state", "device", "precision"):
        if status.get(label) is not None:
            yield label, str(status[label])
    if status.get("memory_bytes") is not None:
        yield "memory", render.amount(status["memory_bytes"])
    if status.get("model"):
        yield "model", f"{status['model'].get('name')} ({status['model'].get('layers')} layers)"
    if status.get("spans"):
        yield "layers", render.spans(status["spans"])
    for loaded in status.get("spans") or ():
        if loaded.get("speed"):
            yield "speed", _speed(loaded)
    for standing in status.get("standings") or ():
        why = f": {standing['detail']}" if standing.get("detail") else ""
        yield "plan", f"{str(standing.get('plan'))[:12]} {standing.get('readiness')}{why}"
    for what, size in (status.get("fetching") or {}).items():
        done, total = render.amount(size.get("done_bytes")), render.amount(size.get("total_bytes"))
        yield "fetching", f"{what}: {done} of {total}"
    for problem in status.get("problems") or ():
        yield "problem", str(problem)
    yield "ready", "yes" if status.get("ready") else f"no: {status.get('reason') or 'no reason is known'}"


def _speed(loaded: dict[str, Any]) -> str:
    """For one layer and token; what real steps took lately stands behind what was measured at loading."""
    measured, lately = loaded["speed"], loaded.get("observed") or {}

    def both(figure: str) -> str:
        now = lately.get(figure)
        return f"{measured.get(figure)} µs" + ("" if now is None else f" (lately {now})")

    return f"layers {render.span(loaded)}: {both('decode_us')} a token, {both('prefill_us')} one of a prompt"


@click.command()
@home_option
@json_option
def peers(home: Path, as_json: bool) -> None:
    """List the PCs of the mesh that are reachable now, and how this PC's links to them are."""
    value = _get(home, "/api/peers")
    if as_json:
        print_json(value)
        return
    if value["peers"]:
        click.echo(tables.peers(value["peers"]))
    if all(peer.get("self") for peer in value["peers"]):
        click.echo("no other PC is reachable")


@click.command()
@home_option
@json_option
def plan(home: Path, as_json: bool) -> None:
    """Show which PC runs which layers, and what a token was predicted to take and takes."""
    value = _get(home, "/api/plan")
    if as_json:
        print_json(value)
    else:
        click.echo("\n".join(tables.plan(value)))
