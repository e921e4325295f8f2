"""Options that many commands share, and what they make of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _home(context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path:
    """The command's own --home, else the one before the command, else `MESHINFER_HOME`, else the usual."""
    from meshinfer.agent.config import default_home

    chosen = value or context.find_root().params.get("home") or default_home()
    return chosen.expanduser().absolute()


def home_option(function: _Function) -> _Function:
    return click.option(
        "--home",
        type=click.Path(path_type=Path, file_okay=False),
        callback=_home,
        metavar="DIR",
        help="Where this agent keeps its models and keys [or MESHINFER_HOME].",
    )(function)


def json_option(function: _Function) -> _Function:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


def print_json(value: Mapping[str, object]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether errors too are to be JSON. Needs no parsing: the arguments may be the mistake."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options
