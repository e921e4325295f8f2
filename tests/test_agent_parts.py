"""Parts of an agent by themselves: what one peer or one bad moment can do to the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from net_support import PATIENCE_S
from test_asker import OWNER, PLAN, QUESTION, Words

from meshinfer import limits
from meshinfer.agent import asker as asking
from meshinfer.agent.asker import Asker
from meshinfer.agent.bulk import Bulk
from meshinfer.agent.library import Library
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.speaker import Speaker
from meshinfer.agent.tasks import Tasks
from meshinfer.agent.threads import to_its_end
from meshinfer.answer.question import Question
from meshinfer.answer.session import Session
from meshinfer.engine.runner import Runner
from meshinfer.errors import RouteError
from meshinfer.limits import FETCHES_SERVED
from meshinfer.model import store
from meshinfer.values import ModelId, PeerId
from meshinfer.wire import messages
from meshinfer.wire.messages import Blob, Fetch, HopTrace, Missing, Result, Step

ME, OTHER = PeerId("aa" * 16), PeerId("bb" * 16)
MODEL = ModelId("cd" * 32)


class _Disk:
    """One blob, and a gate before it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.data = b"weights"

    def blob_size(self, digest: bytes) -> int | None:
        return len(self.data)

    def read_blob(self, digest: bytes, offset: int, length: int) -> bytes:
        self.gate.wait()
        return self.data[offset : offset + length]


async def test_a_peer_that_floods_requests_is_refused_beyond_the_bound() -> None:
    disk, sent = _Disk(), list[messages.Message]()

    def send(_peer: PeerId, message: messages.Message) -> bool:
        sent.append(message)
        return True

    bulk = Bulk(send, lambda _model: disk)
    digest = sha256(disk.data).digest()
    for number in range(FETCHES_SERVED + 10):
        bulk.received(OTHER, Fetch(MODEL, digest, 0, 7, number))
    bulk.received(ME, Fetch(MODEL, digest, 0, 7, 0))
    assert len(sent) == 10
    assert all(isinstance(message, Missing) for message in sent)
    disk.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        while len(sent) < FETCHES_SERVED + 11 or bulk._serving:
            await asyncio.sleep(0.01)
    assert all(isinstance(message, Blob) for message in sent[10:])
    bulk.received(OTHER, Fetch(MODEL, digest, 0, 7, 1))
    await asyncio.sleep(0)
    await bulk.close()
    assert not any(isinstance(message, Missing) for message in sent[10:]), "there is room again"


async def test_what_a_cancelled_thread_made_is_given_back_before_anything_else() -> None:
    begun, gate, discarded = threading.Event(), threading.Event(), list[str]()

    def make() -> str:
        begun.set()
        gate.wait()
        return "shard"

    task = asyncio.create_task(to_its_end(make, discarded.append))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert discarded == ["shard"]


async def test_a_model_that_arrives_while_the_disk_is_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(tmp_path, cast(Bulk, None))
    arriving = cast(Any, object())

    def listing(*_: object) -> list[store.Stored]:
        library._files[MODEL] = arriving
        library._names[MODEL] = "new"
        return []

    monkeypatch.setattr(store, "listing", listing)
    await library.refresh()
    assert library.files(MODEL) is arriving


async def test_an_error_ends_no_loop_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.001)
    turns = 0

    async def work() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            raise asyncio.CancelledError
        raise OSError("the disk is gone")

    tasks = Tasks()
    tasks.keep_doing(work)
    async with asyncio.timeout(PATIENCE_S):
        while turns < 3:
            await asyncio.sleep(0.001)
    await tasks.end()
    assert turns == 3


class _GoneMeanwhile(Words):
    """The route goes while a prompt is rendered."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def prompt(self, question: Question) -> list[int]:
        self._meanwhile()
        return super().prompt(question)


async def test_a_question_whose_route_goes_while_its_prompt_is_rendered_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    runner = Runner("CPU")
    asker = Asker(ME, runner, lambda _peer, _message: True, Metrics(), str, 1)
    loop = asyncio.get_running_loop()

    def lose() -> None:
        async def stop() -> None:
            asker.stop_using("it left")

        asyncio.run_coroutine_threadsafe(stop(), loop).result()

    try:
        asker.use(PLAN, cast(Speaker, _GoneMeanwhile(lose)))
        with pytest.raises(RouteError, match="the plan has changed"):
            await asyncio.wait_for(anext(asker.ask(QUESTION)), PATIENCE_S)
        assert asker.under_way == 0
    finally:
        await asker.close()
        runner.close()


async def test_an_answer_does_not_go_on_with_another_model() -> None:
    runner = Runner("CPU")
    asker = Asker(ME, runner, lambda _peer, _message: True, Metrics(), str, 1)
    try:
        asker.use(PLAN, cast(Speaker, Words()))
        asked = asyncio.ensure_future(anext(asker.ask(QUESTION)))
        async with asyncio.timeout(PATIENCE_S):
            while not asker.under_way:
                await asyncio.sleep(0)
        asker.use(replace(PLAN, model=MODEL), cast(Speaker, Words()))
        with pytest.raises(RouteError, match="another model"):
            await asyncio.wait_for(asked, PATIENCE_S)
    finally:
        await asker.close()
        runner.close()


class _Head(Words):
    """Counts how often the head ran."""

    def __init__(self) -> None:
        self.spoke = 0

    def speak(self, rows: Any, sessions: list[Session]) -> Any:
        self.spoke += 1
        return [7] * len(sessions), {session.sequence: (session.length, 7, rows) for session in sessions}


async def test_a_result_that_comes_twice_is_spoken_once_and_who_left_leaves_nothing() -> None:
    sent: list[messages.Message] = []

    def send(_peer: PeerId, message: messages.Message) -> bool:
        sent.append(message)
        return True

    runner, head = Runner("CPU"), _Head()
    asker = Asker(ME, runner, send, Metrics(), str, 1)
    try:
        asker.use(PLAN, cast(Speaker, head))
        answer = asker.ask(QUESTION)
        asked = asyncio.ensure_future(anext(answer))
        async with asyncio.timeout(PATIENCE_S):
            while not sent:
                await asyncio.sleep(0)
        step = sent[0]
        assert isinstance(step, Step)
        rows = np.zeros((1, 4), np.float32)
        result = Result(step.plan, step.step, step.entries, (HopTrace(0, 0, 1),), rows)
        asker.result(OWNER, result)
        asker.result(OWNER, result)
        asked.cancel()  # while the head runs
        async with asyncio.timeout(PATIENCE_S):
            while asker.under_way or not head.spoke:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert head.spoke == 1
        assert not asker._embedded
    finally:
        await asker.close()
        runner.close()
