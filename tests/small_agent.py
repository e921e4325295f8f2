"""Just what the local interface needs of an agent, for tests of what lies before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from meshinfer.answer.question import Done, Finish, Question, StageStats, Stats, Text
from meshinfer.errors import RouteError
from meshinfer.values import PeerId, Span

STATS = Stats(
    prompt_tokens=5,
    tokens=2,
    ttft_s=0.1,
    total_s=0.2,
    tokens_per_s=20.0,
    route=(StageStats(PeerId("ab" * 16), "office-1", Span(0, 15), "CPU", 2, 4.0, 0.1, 0.3),),
)


class SmallAgent:
    """Just what the interface needs of an agent; answers with the words of the question."""

    def __init__(self) -> None:
        self.ready = True
        self.error: Exception | None = None
        self.fail_after: int | None = None
        self.endless = False
        self.running = 0
        self.asked: list[Question] = []
        self.closed = asyncio.Event()

    def status(self) -> dict[str, Any]:
        return {
            "name": "büro",
            "ready": self.ready,
            "spans": [
                {
                    "first": 0,
                    "last": 15,
                    "speed": {"decode_us": 310, "prefill_us": 40},
                    "observed": {"decode_us": 450, "prefill_us": None},
                }
            ],
            "standings": [
                {"plan": "f" * 64, "readiness": "failed", "detail": "the disk is full", "spans": []}
            ],
            "model": {"id": "c" * 64, "name": "smollm2", "layers": 30},
            "door": 29470,
            "addresses": ["10.0.0.5", "fd00::5"],
            "reason": "layers 3-5 are missing",
        }

    def peers(self) -> list[dict[str, Any]]:
        return []

    def plan(self) -> dict[str, Any]:
        return {"plan": None, "reason": "no model"}

    def models(self) -> list[dict[str, Any]]:
        return [{"name": "smollm2", "model": "c" * 64}]

    async def ask(self, question: Question) -> AsyncIterator[Text | Done]:
        self.asked.append(question)
        self.running += 1
        try:
            if self.error is not None:
                raise self.error
            for number, word in enumerate(question.messages[-1].content.split()):
                if number == self.fail_after:
                    raise RouteError("layers 3-5 are missing")
                yield Text(word + " ")
            while self.endless:
                await asyncio.sleep(0.01)
                yield Text(".")
            yield Done(Finish.STOP, STATS)
        finally:
            self.running -= 1
            self.closed.set()
