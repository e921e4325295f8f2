"""The models on this PC's disk, and getting what is missing of them from peers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from meshinfer.agent.bulk import Bulk
from meshinfer.errors import ModelError
from meshinfer.limits import HOLDINGS, MANIFEST_BYTES, PIECES_IN_FLIGHT
from meshinfer.model import store
from meshinfer.model.weights import ModelFiles
from meshinfer.values import Holding, ModelFacts, ModelId, PeerId, Span

STORE_DIRECTORY: Final = "models"


_log = logging.getLogger(__name__)


class Library:
    """Opens each model once. Reading and writing files happens in threads, never in the loop."""

    def __init__(self, home: Path, bulk: Bulk) -> None:
        self._store = home / STORE_DIRECTORY
        self._bulk = bulk
        self._files: dict[ModelId, ModelFiles] = {}
        self._names: dict[ModelId, str] = {}
        self._facts: dict[ModelId, ModelFacts] = {}
        self._damaged: dict[ModelId, str] = {}
        self._in_use: Counter[ModelId] = Counter()

    # ── what is here ────────────────────────────────────────────────────────────────────────────────────────
    async def refresh(self) -> None:
        """Looks at the disk again: a model may have been pulled or removed by another program."""
        opened = {
            model: files
            for model, files in self._files.items()
            if files.complete or self._in_use.get(model, 0)
        }
        before = set(self._files)
        listed = await asyncio.to_thread(store.listing, self._store, opened)
        self._damaged = {stored.model: stored.damage for stored in listed if stored.files is None}
        here = {stored.model for stored in listed if stored.files is not None}
        for stored in listed:
            if stored.files is not None and not self._in_use.get(stored.model, 0):
                self._files[stored.model] = stored.files
                self._names[stored.model] = stored.name
        # Only what was known before: another may have begun to arrive while the disk was being read.
        for model in before - here:
            self._files.pop(model, None)
            self._names.pop(model, None)
            self._facts.pop(model, None)

    def files(self, model: ModelId) -> ModelFiles | None:
        return self._files.get(model)

    def facts(self) -> Iterable[ModelFacts]:
        for model, files in self._files.items():
            if model not in self._facts:
                self._facts[model] = files.manifest.facts(self._names[model])
        return [self._facts[model] for model in self._files]

    def holdings(self) -> tuple[Holding, ...]:
        """What an advert says of the models here, complete ones first."""
        holdings = [
            Holding(model, self._names[model], files.complete) for model, files in self._files.items()
        ]
        holdings.sort(key=lambda holding: (not holding.complete, holding.model))
        return tuple(holdings[:HOLDINGS])

    def wanted(self, name: str) -> ModelId | None:
        """The complete model of that name or id, else the only complete one there is."""
        complete = [files for files in self._files.values() if files.complete]
        for files in complete:
            if self._names[files.model] == name or (len(name) >= 6 and files.model.startswith(name)):
                return files.model
        return complete[0].model if len(complete) == 1 else None

    def problems(self) -> list[str]:
        """Why models on this disk cannot be used, in a sentence each."""
        return [f"model {model[:12]}: {damage}" for model, damage in sorted(self._damaged.items())]

    def as_json(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for model, files in sorted(self._files.items(), key=lambda item: self._names[item[0]]):
            config = files.manifest.config
            rows.append(
                {
                    "model": model,
                    "name": self._names[model],
                    "size_bytes": files.manifest.weights_size,
                    "layers": config.layers,
                    "quantization": config.quantization,
                    "context": config.context,
                    "complete": files.complete,
                }
            )
        rows += [{"model": model, "damage": damage} for model, damage in sorted(self._damaged.items())]
        return rows

    # ── getting what is not ─────────────────────────────────────────────────────────────────────────────────
    async def fetch_manifest(self, model: ModelId, name: str, peers: Sequence[PeerId]) -> ModelFiles:
        """A model's description from the first peer that has it. Raises ModelError."""
        known = self._files.get(model)
        if known is not None:
            return known
        data = await self._bulk.fetch(peers, model, bytes.fromhex(model), MANIFEST_BYTES)
        files = await asyncio.to_thread(ModelFiles.create, self._store, data, name)
        self._names[model] = files.name
        return self._files.setdefault(model, files)

    async def fetch(
        self,
        files: ModelFiles,
        span: Span | None,
        asker: bool,
        peers: Callable[[], Sequence[PeerId]],
        progress: Callable[[int, int], None],
    ) -> None:
        """Everything that running `span`, asking, or both needs and that is not here yet, or not whole any more.

        Raises ModelError.

        `peers` is asked anew for each part, so that one that comes later helps too. `progress` hears bytes done and
        bytes in all.
        """
        self._in_use[files.model] += 1
        try:
            damaged = await asyncio.to_thread(files.drop_damaged, span, asker)
            if damaged:
                _log.warning(
                    "%d parts of %s were damaged on disk: fetched anew", damaged, self._names[files.model]
                )
            await self._fetch_files(files, asker, peers)
            await self._fetch_pieces(files, span, asker, peers, progress)
        finally:
            self._in_use[files.model] -= 1

    async def _fetch_files(
        self, files: ModelFiles, asker: bool, peers: Callable[[], Sequence[PeerId]]
    ) -> None:
        for entry in files.missing_files(asker):
            data = await self._bulk.fetch(peers(), files.model, entry.digest, entry.size)
            await asyncio.to_thread(files.write_file, entry.name, data)

    async def _fetch_pieces(
        self,
        files: ModelFiles,
        span: Span | None,
        asker: bool,
        peers: Callable[[], Sequence[PeerId]],
        progress: Callable[[int, int], None],
    ) -> None:
        pieces = files.missing(span, asker) if span or asker else []
        total = sum(piece.length for piece in pieces)
        done = 0
        slots = asyncio.Semaphore(PIECES_IN_FLIGHT)

        async def one(index: int) -> None:
            nonlocal done
            piece = pieces[index]
            async with slots:
                data = await self._bulk.fetch(peers(), files.model, piece.digest, piece.length)
                await asyncio.to_thread(files.write_piece, piece, data)
            done += piece.length
            progress(done, total)

        if not pieces:
            return
        progress(0, total)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(pieces)):
                    group.create_task(one(index))
        except* ModelError as errors:
            raise errors.exceptions[0] from None
        finally:
            # What did arrive is kept, whatever happened to the rest.
            await asyncio.to_thread(files.flush)
