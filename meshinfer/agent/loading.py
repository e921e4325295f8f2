"""Getting models ready on this PC: descriptions and weights from peers, shards into memory, one task for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from meshinfer.agent.library import Library
from meshinfer.agent.owner import Owner
from meshinfer.agent.report_plan import layers_of
from meshinfer.errors import MeshinferError, ModelError
from meshinfer.mesh.events import Event, LoadDone, LoadFailed, ModelKnown
from meshinfer.model.weights import ModelFiles
from meshinfer.net.process import give_back
from meshinfer.values import Advert, ModelId, PeerId, ShardKey

SOURCES: Final = 3
"""Peers with a model that links are held to while parts of it are missing here."""

_log = logging.getLogger(__name__)


class Loading:
    """Belongs to the loop. How each thing ended is told with `handle`, as the event that says so.

    Args:
        present: the adverts of all who are here.
        linked: whether a link to a peer stands.
        spawn: starts a task that ends with the agent.
    """

    def __init__(
        self,
        me: PeerId,
        library: Library,
        owner: Owner,
        present: Callable[[], Iterable[Advert]],
        linked: Callable[[PeerId], bool],
        handle: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._me = me
        self._library = library
        self._owner = owner
        self._present = present
        self._linked = linked
        self._handle = handle
        self._spawn = spawn
        self._loads: dict[ShardKey, asyncio.Task[None]] = {}
        self._fetching: set[ModelId] = set()
        self._ends: ModelId | None = None
        self.progress: dict[str, tuple[int, int]] = {}
        """What is being fetched: bytes done and bytes in all."""

    @property
    def sources(self) -> frozenset[PeerId]:
        """The peers that what is missing here would be asked of first: to these links are needed."""
        return frozenset(peer for model in self.models for peer in self.holders(model)[:SOURCES])

    def holders(self, model: ModelId) -> list[PeerId]:
        """Peers that have a model: those whom a link is held to first, of these whole ones first."""
        found = [
            (not self._linked(advert.peer), not holding.complete, advert.peer)
            for advert in self._present()
            for holding in advert.holdings
            if holding.model == model and advert.peer != self._me
        ]
        return [peer for _, _, peer in sorted(found)]

    def _name_of(self, model: ModelId) -> str:
        holdings = (holding for advert in self._present() for holding in advert.holdings)
        return next((holding.name for holding in holdings if holding.model == model), model[:12])

    @property
    def models(self) -> frozenset[ModelId]:
        """Those of which something is being fetched or loaded."""
        ends = () if self._ends is None else (self._ends,)
        return frozenset([*self._fetching, *(shard.model for shard in self._loads), *ends])

    # ── descriptions ────────────────────────────────────────────────────────────────────────────────────────
    def need(self, model: ModelId, sources: Sequence[PeerId]) -> None:
        """Fetch a model's manifest, if that is not going on already."""
        if model not in self._fetching:
            self._fetching.add(model)
            self._spawn(self._get_manifest(model, sources))

    async def _get_manifest(self, model: ModelId, sources: Sequence[PeerId]) -> None:
        try:
            # A source whose adverts come may still be about to take what is asked of it.
            for pause_s in (0.0, 0.1, 0.3):
                await asyncio.sleep(pause_s)
                try:
                    files = await self._library.fetch_manifest(model, self._name_of(model), sources)
                except ModelError as error:
                    _log.info("the description of model %s did not come: %s", model[:12], error)
                else:
                    self._handle(ModelKnown(files.manifest.facts(files.name)))
                    return
        finally:
            self._fetching.discard(model)

    # ── shards ──────────────────────────────────────────────────────────────────────────────────────────────
    def load(self, shard: ShardKey) -> None:
        """Fetch what is missing of a shard and load it."""
        self._loads[shard] = self._spawn(self._load(shard))

    def unload(self, shard: ShardKey) -> None:
        """Give its memory back; where it is still being loaded, that ends."""
        loading = self._loads.pop(shard, None)
        if loading is not None:
            loading.cancel()
        self._owner.unload(shard)

    async def _load(self, shard: ShardKey) -> None:
        try:
            ended = await self._outcome(shard)
        finally:
            # Behind an `unload` another load of the same shard may have begun already.
            mine = self._loads.get(shard) is asyncio.current_task()
            if mine:
                del self._loads[shard]
        if mine:
            self._handle(ended)

    async def _outcome(self, shard: ShardKey) -> LoadDone | LoadFailed:
        try:
            await self._get_ready(shard)
        except MeshinferError as error:
            _log.warning("layers %s of %s cannot be served: %s", shard.span, shard.model[:12], error)
            return LoadFailed(shard, str(error))
        except Exception as error:
            # A defect, but a load without an end would keep the whole mesh waiting.
            _log.exception("layers %s of %s cannot be served", shard.span, shard.model[:12])
            return LoadFailed(shard, f"an unexpected {type(error).__name__} while loading: see its log")
        return LoadDone(shard)

    async def _get_ready(self, shard: ShardKey) -> None:
        files = self._library.files(shard.model)
        if files is None:
            raise ModelError(f"the description of model {shard.model[:12]} is gone from this PC's disk")
        what = layers_of(shard.span)
        try:
            await self._library.fetch(
                files, shard.span, False, lambda: self.holders(shard.model), self._update(what)
            )
        finally:
            self.progress.pop(what, None)
        await self._owner.load(shard, files)
        await asyncio.to_thread(give_back)

    # ── the ends ────────────────────────────────────────────────────────────────────────────────────────────
    async def fetch_ends(self, files: ModelFiles) -> None:
        """What asking needs of a model. Raises ModelError."""
        self._ends = files.model
        try:
            await self._library.fetch(
                files, None, True, lambda: self.holders(files.model), self._update("asking")
            )
        finally:
            self._ends = None
            self.progress.pop("asking", None)

    def _update(self, what: str) -> Callable[[int, int], None]:
        def update(done: int, total: int) -> None:
            self.progress[what] = (done, total)

        return update
