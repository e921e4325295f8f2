"""Commands that start an agent, stop it, and show what it knows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import click

from meshinfer.errors import MeshinferError
from meshinfer.front import render
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
    until_input_ends: bool,
) -> None:
    """Run the agent here until Ctrl-C or `meshinfer stop`."""
    from meshinfer.agent import config

    given = {
        "name": name,
        "network.port": port,
        "network.peers": peers,
        "network.interfaces": interfaces,
        "sharing.memory": memory,
        "sharing.ask": False if lend_only else None,
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
    labels = {
        "name": "name",
        "peer": "peer",
        "mesh": "mesh",
        "state": "state",
        "model": "model",
        "device": "device",
    }
    rows = [(label, str(value[key])) for key, label in labels.items() if value.get(key) is not None]
    if value.get("spans"):
        rows.append(("layers", render.spans(value["spans"])))
    if value.get("reason"):
        rows.append(("reason", str(value["reason"])))
    rows.append(("ready", "yes" if value.get("ready") else "no"))
    for label, text in rows:
        click.echo(f"{label:<8} {render.safe(text)}")


@click.command()
@home_option
@json_option
def peers(home: Path, as_json: bool) -> None:
    """List the PCs of the mesh that are reachable now."""
    value = _get(home, "/api/peers")
    if as_json:
        print_json(value)
        return
    if not value["peers"]:
        click.echo("no other PC is reachable")
        return
    click.echo(
        render.table(
            ("name", "peer", "device", "memory", "layers", "heard s ago"),
            [
                (
                    peer.get("name", "-"),
                    str(peer.get("peer", "-"))[:8],
                    peer.get("device", "-"),
                    render.amount(peer.get("memory")),
                    render.spans(peer.get("spans")),
                    "-" if peer.get("heard_s") is None else f"{peer['heard_s']:.1f}",
                )
                for peer in value["peers"]
            ],
        )
    )


@click.command()
@home_option
@json_option
def plan(home: Path, as_json: bool) -> None:
    """Show which PC runs which layers."""
    value = _get(home, "/api/plan")
    if as_json:
        print_json(value)
        return
    if not value.get("plan"):
        click.echo(f"there is no plan: {render.safe(str(value.get('reason') or 'no model is known here'))}")
        for shortage in value.get("by_peer") or ():
            name = render.safe(str(shortage.get("name") or shortage.get("peer", "?")))
            click.echo(f"  {name}: {render.amount(shortage.get('available'))} available")
        return
    click.echo(f"plan {str(value['plan'])[:12]} for {render.safe(str(value.get('model')))}")
    click.echo(
        render.table(
            ("peer", "layers", "device", "KV tokens", "state"),
            [
                (
                    owner.get("name") or str(owner.get("peer"))[:8],
                    render.span(owner.get("span")),
                    owner.get("device", "-"),
                    owner.get("pool_tokens", "-"),
                    owner.get("readiness", "-"),
                )
                for owner in value.get("owners", ())
            ],
        )
    )
    if value.get("predicted_us"):
        click.echo(f"predicted: {value['predicted_us'] / 1000:.1f} ms a token")
