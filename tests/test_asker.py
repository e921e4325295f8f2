"""What a person who asks notices of plans that come and go: nothing, or a sentence in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from answer_route import GREEDY, letters
from net_support import PATIENCE_S

from meshinfer.agent import asker as module
from meshinfer.agent.asker import Asker
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.speaker import Speaker
from meshinfer.answer.question import Done, Message, Question, SamplingParams, Text
from meshinfer.answer.session import Session
from meshinfer.answer.text import TextStream
from meshinfer.engine.runner import Runner
from meshinfer.errors import RouteError
from meshinfer.mesh.plan import plan_id
from meshinfer.values import Assignment, ModelId, PeerId, Plan, SequenceId, Span
from meshinfer.wire import messages
from meshinfer.wire.messages import Free, HopTrace, Refusal, RefusalReason, Result, Step

OWNER, OTHER = PeerId("ab" * 16), PeerId("ba" * 16)
QUESTION = Question((Message("user", "hello"),), SamplingParams(temperature=0), max_tokens=8)


def plan(*owners: PeerId, number: int = 1) -> Plan:
    """Each owner has two layers."""
    spans = [
        Assignment(owner, Span(2 * index, 2 * index + 2), "CPU", 4096) for index, owner in enumerate(owners)
    ]
    return Plan(ModelId("c" * 64), 2 * len(owners), number, None, tuple(spans), (), (), 0, 0)


PLAN = plan(OWNER)
NEXT = plan(OTHER, number=2)
SHARED = plan(OWNER, OTHER, number=2)


class Words:
    """A speaker whose tokens mean nothing: each next one is `a`."""

    context = 512

    def prompt(self, _question: Question) -> list[int]:
        return [1, 2, 3]

    def session(
        self, sequence: SequenceId, prompt: Sequence[int], most: int, _question: Question, _seed: int
    ) -> Session:
        return Session(sequence, prompt, most, frozenset([0]), GREEDY, TextStream(letters, ()))

    def embed(self, tokens: Sequence[int], _positions: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.zeros((len(tokens), 4), np.float32)

    def speak(self, rows: Any, sessions: list[Session]) -> Any:
        return [7] * len(sessions), {}


class Mesh:
    """What the asker's owners were sent; they answer when they are told to."""

    def __init__(self, reachable: bool = True) -> None:
        self.reachable = reachable
        self.sent: list[tuple[PeerId, messages.Message]] = []
        self.asker = cast(Asker, None)

    def send(self, peer: PeerId, message: messages.Message) -> bool:
        self.sent.append((peer, message))
        return self.reachable

    @property
    def steps(self) -> list[Step]:
        return [message for _, message in self.sent if isinstance(message, Step)]

    def freed(self, peer: PeerId) -> list[tuple[int, ...]]:
        return [message.sequences for to, message in self.sent if to == peer and isinstance(message, Free)]

    async def step(self, number: int) -> Step:
        """The one of that number, counted from 0, once it has been sent."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.steps) <= number:
                await asyncio.sleep(0.001)
        return self.steps[number]

    def answer(self, step: Step) -> None:
        wanted = sum(entry.want for entry in step.entries)
        trace = (HopTrace(0, 0, 1),) * len(step.route)
        rows = np.zeros((wanted, 4), np.float32)
        self.asker.result(step.route[-1], Result(step.plan, step.step, step.entries, trace, rows))

    def refuse(self, step: Step) -> None:
        refusal = Refusal(step.plan, step.step, 0, RefusalReason.NOT_ACCEPTED, "no more", ())
        self.asker.refusal(step.route[0], refusal)

    async def answer_all(self, number: int) -> None:
        """All steps from that number on, until there are no more."""
        while True:
            self.answer(await self.step(number))
            number += 1


@asynccontextmanager
async def asking(mesh: Mesh) -> AsyncIterator[Asker]:
    runner = Runner("CPU")
    mesh.asker = Asker(PeerId("cd" * 16), runner, mesh.send, Metrics(), str, 1)
    try:
        yield mesh.asker
    finally:
        await mesh.asker.close()
        runner.close()


async def whole(asker: Asker, question: Question = QUESTION) -> str:
    said = ""
    async with asyncio.timeout(PATIENCE_S):
        async for event in asker.ask(question):
            if isinstance(event, Text):
                said += event.text
            else:
                assert isinstance(event, Done)
    return said


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "PATIENCE_S", 0.8)
    monkeypatch.setattr(module, "AGAIN_S", 0.2)
    return


# ── when the plan goes ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("gone_after_s", [0.0, 0.1, 0.3])
async def test_an_answer_whose_owner_is_lost_ends_in_time(reachable: bool, gone_after_s: float) -> None:
    """Before its step was sent, while it is under way, and between two tries of an owner that is not there."""
    mesh = Mesh(reachable)
    async with asking(mesh) as asker:
        asker.use(PLAN, cast(Speaker, Words()))
        asked = asyncio.ensure_future(anext(asker.ask(QUESTION)))
        async with asyncio.timeout(PATIENCE_S):
            while not asker.under_way:
                await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop.call_later(gone_after_s, asker.lost, OWNER, "is gone")
        loop.call_later(gone_after_s, asker.stop_using, "peers have changed")
        loop.call_later(gone_after_s + 0.2, asker.stop_using, "layers 0-1 are missing")
        # The last reason, not the first: what is missing is known when the mesh has settled.
        with pytest.raises(RouteError, match="layers 0-1 are missing"):
            await asyncio.wait_for(asked, PATIENCE_S)
        assert asker.under_way == 0


async def test_an_answer_goes_on_while_its_owners_serve_it_though_no_plan_is_usable() -> None:
    mesh = Mesh()
    async with asking(mesh) as asker:
        asker.use(PLAN, cast(Speaker, Words()))
        said = asyncio.ensure_future(whole(asker))
        mesh.answer(await mesh.step(0))
        await mesh.step(1)
        asker.stop_using("a standby is missing")
        with pytest.raises(RouteError):
            await anext(asker.ask(QUESTION))
        rest = asyncio.ensure_future(mesh.answer_all(1))
        assert len(await said) == 8
        rest.cancel()
        assert {step.plan for step in mesh.steps} == {plan_id(PLAN)}
        assert not asker.owners, "and nothing of the route stays behind"


# ── when another comes ──────────────────────────────────────────────────────────────────────────────────────
async def test_a_new_plan_interrupts_no_answer_and_takes_the_next_question() -> None:
    mesh = Mesh()
    async with asking(mesh) as asker:
        words = cast(Speaker, Words())
        asker.use(PLAN, words)
        first = asyncio.ensure_future(whole(asker))
        mesh.answer(await mesh.step(0))
        await mesh.step(1)
        asker.use(NEXT, words)
        second = asyncio.ensure_future(whole(asker))
        assert (await mesh.step(2)).plan == plan_id(NEXT)
        rest = asyncio.ensure_future(mesh.answer_all(1))
        assert (len(await first), len(await second)) == (8, 8)
        rest.cancel()
        assert [step.entries[0].position for step in mesh.steps if step.plan == plan_id(PLAN)] == [
            0,
            *range(3, 10),
        ], "nothing of the first answer was computed twice"
        assert asker.owners == {OTHER}


async def test_an_answer_whose_plan_has_ended_goes_on_at_once_along_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh()
    async with asking(mesh) as asker:
        words = cast(Speaker, Words())
        asker.use(PLAN, words)
        said = asyncio.ensure_future(whole(asker))
        mesh.answer(await mesh.step(0))
        asker.use(SHARED, words)
        monkeypatch.setattr(module, "AGAIN_S", 2 * PATIENCE_S)  # no pause: the newest route is another one
        mesh.refuse(await mesh.step(1))
        replayed = await mesh.step(2)
        assert (replayed.plan, replayed.entries[0].position, replayed.entries[0].count) == (
            plan_id(SHARED),
            0,
            4,
        )
        rest = asyncio.ensure_future(mesh.answer_all(2))
        assert len(await said) == 8
        rest.cancel()
        assert asker.owners == {OWNER, OTHER}


async def test_what_goes_on_along_another_route_is_not_forgotten_by_an_owner_of_both() -> None:
    """Else a late word about the old route would wipe the memory that the new one has just built."""
    mesh = Mesh()
    async with asking(mesh) as asker:
        words = cast(Speaker, Words())
        asker.use(PLAN, words)
        long = replace(QUESTION, max_tokens=20)
        said = [asyncio.ensure_future(whole(asker, long)) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while asker.under_way < 2:
                await asyncio.sleep(0.001)
        mesh.answer(await mesh.step(0))
        async with asyncio.timeout(PATIENCE_S):
            while not any(len(step.entries) == 2 for step in mesh.steps):
                for step in mesh.steps:  # each may be the one that is waited for; twice counts for nothing
                    mesh.answer(step)
                await asyncio.sleep(0.01)
        both = next(step for step in mesh.steps if len(step.entries) == 2)
        count = len(mesh.steps)
        asker.use(SHARED, words)
        mesh.refuse(both)
        await mesh.step(count)
        moved = {entry.sequence for step in mesh.steps[count:] for entry in step.entries}
        assert moved
        frees = len(mesh.freed(OWNER))
        mesh.answer(both)  # twice: it counts for nothing
        assert len(mesh.freed(OWNER)) == frees
        rest = asyncio.ensure_future(mesh.answer_all(0))  # others may wait since before
        assert [len(text) for text in await asyncio.gather(*said)] == [20, 20]
        rest.cancel()


async def test_who_leaves_an_old_route_frees_its_owners() -> None:
    mesh = Mesh()
    async with asking(mesh) as asker:
        words = cast(Speaker, Words())
        asker.use(PLAN, words)
        answer = asker.ask(QUESTION)
        asked = asyncio.ensure_future(anext(answer))
        mesh.answer(await mesh.step(0))
        await asked
        asker.use(NEXT, words)
        await answer.aclose()
        assert mesh.freed(OWNER) == [(1,)]
        assert not mesh.freed(OTHER)
