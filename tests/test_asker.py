"""An answer that has lost its route ends in time, whatever it was waiting for when the route went."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from answer_route import GREEDY, letters

from meshinfer.agent import asker as module
from meshinfer.agent.asker import Asker
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.speaker import Speaker
from meshinfer.answer.question import Message, Question, SamplingParams
from meshinfer.answer.session import Session
from meshinfer.answer.text import TextStream
from meshinfer.engine.runner import Runner
from meshinfer.errors import RouteError
from meshinfer.values import Assignment, ModelId, PeerId, Plan, SequenceId, Span

OWNER = PeerId("ab" * 16)
QUESTION = Question((Message("user", "hello"),), SamplingParams(temperature=0))
PLAN = Plan(ModelId("c" * 64), 2, (Assignment(OWNER, Span(0, 2), "CPU", 4096),), (), 0)


class Words:
    """A speaker whose tokens mean nothing: no step of it ever comes back."""

    context = 512

    def prompt(self, _question: Question) -> list[int]:
        return [1, 2, 3]

    def session(
        self, sequence: SequenceId, prompt: Sequence[int], most: int, _question: Question, _seed: int
    ) -> Session:
        return Session(sequence, prompt, most, frozenset([0]), GREEDY, TextStream(letters, ()))

    def embed(self, tokens: Sequence[int], _positions: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.zeros((len(tokens), 4), np.float32)


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("gone_after_s", [0.0, 0.1, 0.3])
async def test_an_answer_without_a_route_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, reachable: bool, gone_after_s: float
) -> None:
    """Before its step was sent, while it is under way, and between two tries of an owner that is not there."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.8)
    monkeypatch.setattr(module, "AGAIN_S", 0.2)
    runner = Runner("CPU")
    asker = Asker(PeerId("cd" * 16), runner, lambda _peer, _message: reachable, Metrics(), str, 1)
    try:
        asker.use(PLAN, cast(Speaker, Words()))
        asked = asyncio.ensure_future(anext(asker.ask(QUESTION)))
        async with asyncio.timeout(5):
            while not asker.under_way:
                await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop.call_later(gone_after_s, asker.stop_using, "peers have changed")
        loop.call_later(gone_after_s + 0.2, asker.stop_using, "layers 0-1 are missing")
        # The last reason, not the first: what is missing is known when the mesh has settled.
        with pytest.raises(RouteError, match="layers 0-1 are missing"):
            await asyncio.wait_for(asked, 5)
        assert asker.under_way == 0
    finally:
        await asker.close()
        runner.close()
