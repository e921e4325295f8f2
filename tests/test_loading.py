"""Whatever becomes of a load, the mesh hears of its end once: else all its peers would wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from net_support import PATIENCE_S

from meshinfer.agent.library import Library
from meshinfer.agent.loading import Loading
from meshinfer.agent.owner import Owner
from meshinfer.agent.tasks import Tasks
from meshinfer.errors import CapacityError, ModelError
from meshinfer.mesh.events import Event, LoadDone, LoadFailed
from meshinfer.values import ModelId, PeerId, ShardKey, Span

MODEL = ModelId("c" * 64)
SHARD = ShardKey(MODEL, Span(0, 15), "CPU", 4096)
OTHER = ShardKey(MODEL, Span(15, 30), "CPU", 4096)


class Disk:
    """A library with one model, of which nothing is missing."""

    here = True

    def files(self, model: ModelId) -> object | None:
        return object() if self.here else None

    async def fetch(self, *_: Any) -> None:
        await asyncio.sleep(0)


class Device:
    """An owner whose loads end when they are told to, and which, like a thread, does not stop in the middle."""

    def __init__(self) -> None:
        self.gates: dict[ShardKey, asyncio.Event] = {}
        self.begun: list[ShardKey] = []
        self.unloaded: list[ShardKey] = []
        self.error: Exception | None = None

    def gate(self, shard: ShardKey) -> asyncio.Event:
        return self.gates.setdefault(shard, asyncio.Event())

    async def load(self, shard: ShardKey, _files: object) -> None:
        self.begun.append(shard)
        gate = asyncio.ensure_future(self.gate(shard).wait())
        try:
            await asyncio.shield(gate)
        except asyncio.CancelledError:
            await gate
            raise
        if self.error is not None:
            raise self.error

    def unload(self, shard: ShardKey) -> None:
        self.unloaded.append(shard)


class Case:
    def __init__(self) -> None:
        self.disk, self.device, self.events = Disk(), Device(), list[Event]()
        self.tasks = Tasks()
        self.loading = Loading(
            PeerId("ab" * 16),
            cast(Library, self.disk),
            cast(Owner, self.device),
            lambda: (),
            lambda _peer: True,
            self.events.append,
            self.tasks.spawn,
        )

    async def until(self, begun: int, events: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.device.begun) < begun or len(self.events) < events:
                await asyncio.sleep(0)


@asynccontextmanager
async def case() -> AsyncIterator[Case]:
    made = Case()
    try:
        yield made
    finally:
        for gate in made.device.gates.values():
            gate.set()
        await made.tasks.end()


async def test_what_is_loaded_is_told() -> None:
    async with case() as one:
        one.loading.load(SHARD)
        one.loading.load(OTHER)
        await one.until(2, 0)
        assert one.loading.models == {MODEL}
        one.device.gate(OTHER).set()
        await one.until(2, 1)
        one.device.gate(SHARD).set()
        await one.until(2, 2)
        assert one.events == [LoadDone(OTHER), LoadDone(SHARD)]
        assert not one.loading.models
        assert not one.loading.progress


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CapacityError("no room"), "no room"),
        (ModelError("is cut short"), "cut short"),
        (KeyError(3), "KeyError"),
    ],
)
async def test_what_cannot_be_loaded_is_told_in_a_sentence(error: Exception, words: str) -> None:
    async with case() as one:
        one.device.error = error
        one.loading.load(SHARD)
        one.device.gate(SHARD).set()
        await one.until(1, 1)
        (failed,) = one.events
        assert isinstance(failed, LoadFailed)
        assert failed.shard == SHARD
        assert words in failed.sentence


async def test_a_model_that_is_gone_from_the_disk_is_told() -> None:
    async with case() as one:
        one.disk.here = False
        one.loading.load(SHARD)
        await one.until(0, 1)
        assert isinstance(one.events[0], LoadFailed)


async def test_who_is_told_to_unload_says_nothing_more_of_that_load() -> None:
    async with case() as one:
        one.loading.load(SHARD)
        await one.until(1, 0)
        one.loading.unload(SHARD)
        assert one.device.unloaded == [SHARD]
        one.device.gate(SHARD).set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not one.events


async def test_a_shard_that_is_wanted_again_at_once_is_told_once() -> None:
    """The first load is still on its way out of the device when the second begins."""
    async with case() as one:
        one.loading.load(SHARD)
        await one.until(1, 0)
        one.loading.unload(SHARD)
        one.loading.load(SHARD)
        one.device.gate(SHARD).set()
        await one.until(2, 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert one.events == [LoadDone(SHARD)]
        assert not one.loading.models
