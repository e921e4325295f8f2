"""The models on this PC: listed, found by name or id, removed. A damaged one is listed as such, no more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshinfer.errors import ModelError
from meshinfer.limits import NAME_CHARS
from meshinfer.model.sparse import disk_error
from meshinfer.model.weights import ModelFiles
from meshinfer.text import printable
from meshinfer.values import ModelId

_ID: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-f]{6,64}")
_REMOVED: Final = ".removed-"


@dataclass(frozen=True, slots=True)
class Stored:
    """One directory of the store: either `files`, or the sentence that says why it cannot be used."""

    model: ModelId
    name: str
    files: ModelFiles | None
    damage: str = ""


def listing(store: Path, opened: Mapping[ModelId, ModelFiles] | None = None) -> list[Stored]:
    """All models under `store`, by name. A store that is not there yet is empty.

    Those in `opened` are not opened again: two of them on one directory would not know what the other wrote.
    """
    known = opened or {}
    try:
        directories = [entry for entry in store.iterdir() if _ID.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, f"listing the models in {store}") from error
    rows = [_stored(directory, known.get(ModelId(directory.name))) for directory in directories]
    return sorted(rows, key=lambda stored: (stored.name, stored.model))


def find(store: Path, wanted: str) -> ModelFiles:
    """The model whose name is `wanted`, or whose id begins with it (6 digits at least).

    Raises `ModelError`, naming the models that are there and the command that gets one.
    """
    known = listing(store)
    matches = [stored for stored in known if stored.name == wanted]
    if not matches and _PREFIX.fullmatch(wanted):
        matches = [stored for stored in known if stored.model.startswith(wanted)]
    if len(matches) > 1:
        ids = ", ".join(stored.model[:12] for stored in matches)
        raise ModelError(
            f"{printable(wanted, NAME_CHARS)!r} is the name of several models: name one by its id ({ids})"
        )
    if not matches:
        raise ModelError(_unknown(wanted, known))
    if matches[0].files is None:
        raise ModelError(matches[0].damage)
    return matches[0].files


def free_name(store: Path, wanted: str, model: ModelId) -> str:
    """`wanted` made fit to be shown; where another model has that name, told apart by digits of the id."""
    name = printable(wanted, NAME_CHARS) or model[:12]
    if any(stored.name == name and stored.model != model for stored in listing(store)):
        return f"{name[: NAME_CHARS - 7]}-{model[:6]}"
    return name


def remove(store: Path, model: ModelId) -> None:
    """Removes a model wholly, or leaves it whole where one of its files is in use. Raises `ModelError`."""
    if not _ID.fullmatch(model):
        raise ModelError(f"{printable(model, NAME_CHARS)!r} is no model's id")
    aside = store / f"{_REMOVED}{model}"
    try:
        if aside.exists():
            shutil.rmtree(aside)
        # The rename is at once and all or nothing; a removal that is interrupted after it leaves no half
        # model.
        (store / model).rename(aside)
        shutil.rmtree(aside)
    except FileNotFoundError:
        raise ModelError(f"there is no model {model[:12]} to remove") from None
    except OSError as error:
        raise disk_error(
            error, f"removing the model {model[:12]} (stop the agent that uses it first)"
        ) from error


def _stored(directory: Path, opened: ModelFiles | None) -> Stored:
    model = ModelId(directory.name)
    try:
        files = opened or ModelFiles(directory)
        return Stored(model, files.name, files)
    except ModelError as error:
        return Stored(model, model[:12], None, str(error))
    except OSError as error:
        return Stored(model, model[:12], None, str(disk_error(error, f"reading the model {model[:12]}")))


def _unknown(wanted: str, known: list[Stored]) -> str:
    name = printable(wanted, NAME_CHARS)
    if not known:
        return f"there is no model {name!r} here, nor any other: get the default with meshinfer pull smollm2"
    names = ", ".join(stored.name for stored in known[:20])
    return f"there is no model {name!r} here, only {names}: get another with meshinfer pull NAME"
