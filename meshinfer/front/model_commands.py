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
    listed = _listed(home)
    if as_json:
        print_json({"models": listed})
        return
    if not listed:
        click.echo("there is no model here yet; get one with: meshinfer pull smollm2")
        return
    headers = ("name", "id", "size", "memory", "layers", "quantization", "context", "here")
    click.echo(render.table(headers, map(_cells, listed)))
    for model in listed:
        if model.get("damage"):
            click.echo(f"{model['model'][:12]}: {render.safe(model['damage'])}")


def _listed(home: Path) -> list[dict[str, Any]]:
    """From the agent if one runs: it has the files open, and may be fetching some just now."""
    from meshinfer.front import client
    from meshinfer.model import store

    running = client.find(home)
    if running is not None:
        return list(running.get("/api/models")["models"])
    return [_facts(stored) for stored in store.listing(home / STORE)]


def _cells(model: dict[str, Any]) -> tuple[object, ...]:
    whole = "damaged" if model.get("damage") else "whole" if model.get("complete") else "in part"
    memory_bytes = model.get("layers_memory_bytes", 0) + model.get("asking_memory_bytes", 0)
    shown = (model.get(key) for key in ("layers", "quantization", "context"))
    return (
        model.get("name") or "-",
        model["model"][:12],
        render.amount(model.get("size_bytes")),
        render.amount(memory_bytes or None),
        *("-" if value is None else value for value in shown),
        whole,
    )


def _facts(stored: Stored) -> dict[str, Any]:
    """As the agent tells it; of a damaged one, its damage and no more."""
    if stored.files is None:
        return {"model": stored.model, "name": stored.name, "damage": stored.damage}
    return _whole(stored.files)


def _whole(files: ModelFiles) -> dict[str, Any]:
    from meshinfer.agent.needs import memory_of

    config = files.manifest.config
    return {
        "model": files.model,
        "name": files.name,
        "size_bytes": files.manifest.weights_size,
        "layers": len(files.manifest.layers),
        "quantization": config.quantization,
        "context": config.context,
        "complete": files.complete,
        **memory_of(files.manifest.facts(files.name)),
    }


@click.command()
@click.argument("name")
@home_option
@json_option
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Store the weights in fewer bits.")
def pull(name: str, home: Path, as_json: bool, quantize: str | None) -> None:
    """Get a model: smollm2, hf:OWNER/NAME, or a path to an OpenVINO, GGUF or Hugging Face model."""
    files = pull_to(home, name, quantize, quiet=as_json)
    facts = {**_whole(files), "can_be_asked": files.manifest.file("tokenizer.json") is not None}
    if as_json:
        print_json(facts)
        return
    name = render.safe(files.name)
    click.echo(f"{name} is here: {facts['layers']} layers, {render.amount(facts['size_bytes'])}")
    if not facts["can_be_asked"]:
        click.echo(f"{name} came without a tokenizer.json, so it can be verified but not asked")


def pull_to(home: Path, name: str, quantize: str | None = None, *, quiet: bool = False) -> ModelFiles:
    """Pulls with progress on standard error. Raises ModelError."""
    from meshinfer.agent.files import private_directory
    from meshinfer.front import progress
    from meshinfer.model import store
    from meshinfer.model.pull import pull as pull_model
    from meshinfer.model.quantization import Compression

    private_directory(home)
    with progress.shown(quiet=quiet) as shown:
        model = pull_model(name, home / STORE, shown, Compression(quantize) if quantize else None)
    return store.find(home / STORE, model)


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
