"""Commands about the models on this PC: listing, pulling, verifying."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from meshinfer.front import render
from meshinfer.front.options import home_option, json_option, print_json

if TYPE_CHECKING:
    from meshinfer.model.store import Stored
    from meshinfer.model.weights import ModelFiles

STORE: Final = "models"


@click.command()
@home_option
@json_option
def models(home: Path, as_json: bool) -> None:
    """List the models on this PC."""
    from meshinfer.model import store

    listed = [_facts(stored) for stored in store.listing(home / STORE)]
    if as_json:
        print_json({"models": listed})
        return
    if not listed:
        click.echo("there is no model here yet; get one with: meshinfer pull smollm2")
        return
    rows = [
        (
            model["name"],
            model["model"][:12],
            render.amount(model["size"]),
            model["layers"] if model["layers"] is not None else "-",
            model["quantization"] or "-",
            model["context"] if model["context"] is not None else "-",
            "damaged" if model["damage"] else "whole" if model["complete"] else render.amount(model["held"]),
        )
        for model in listed
    ]
    click.echo(render.table(("name", "id", "size", "layers", "quantization", "context", "here"), rows))
    for model in listed:
        if model["damage"]:
            click.echo(f"{model['model'][:12]}: {render.safe(model['damage'])}")


def _facts(stored: Stored) -> dict[str, Any]:
    """What `models --json` tells of one model; sizes are bytes. A damaged one has its damage and no more."""
    known: dict[str, Any] = {"name": stored.name, "model": stored.model, "damage": stored.damage or None}
    if stored.files is None:
        return known | dict.fromkeys(("size", "held", "layers", "quantization", "context")) | {"complete": False}
    return known | _whole(stored.files)


def _whole(files: ModelFiles) -> dict[str, Any]:
    manifest = files.manifest
    missing_bytes = sum(piece.length for piece in files.missing())
    return {
        "size": manifest.weights_size,
        "held": manifest.weights_size - missing_bytes,
        "layers": len(manifest.layers),
        "quantization": manifest.config.quantization,
        "context": manifest.config.context,
        "complete": files.complete,
    }


@click.command()
@click.argument("name")
@home_option
@json_option
def pull(name: str, home: Path, as_json: bool) -> None:
    """Get a model: smollm2, hf:OWNER/NAME, or a path to an OpenVINO, GGUF or Hugging Face model."""
    files = pull_to(home, name, quiet=as_json)
    facts = {"name": files.name, "model": files.model, "damage": None} | _whole(files)
    if as_json:
        print_json(facts)
        return
    click.echo(f"{render.safe(files.name)} is here: {facts['layers']} layers, {render.amount(facts['size'])}")


def pull_to(home: Path, name: str, *, quiet: bool = False) -> ModelFiles:
    """Pulls with progress on standard error. Raises ModelError."""
    from meshinfer.agent.files import private_directory
    from meshinfer.front import progress
    from meshinfer.model.pull import pull as pull_model

    private_directory(home)
    with progress.shown(quiet=quiet) as shown:
        return pull_model(name, home / STORE, shown)


@click.command()
@click.argument("model")
@home_option
@json_option
def verify(model: str, home: Path, as_json: bool) -> None:
    """Cut MODEL at every possible place, and compare what it says with the uncut one."""
    from meshinfer.front import progress
    from meshinfer.model import store
    from meshinfer.model.verify import verify as verify_model

    files = store.find(home / STORE, model)
    with progress.shown(quiet=as_json) as shown:
        report = verify_model(files, shown)
    if as_json:
        print_json(report.to_json())
    else:
        click.echo(report.sentence())
    if not report.holds:
        click.get_current_context().exit(1)
