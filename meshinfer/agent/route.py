"""The owners under one plan as an asker uses them, and the answers that go through them or wait for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshinfer.agent.speaker import Speaker
from meshinfer.agent.timing import StepPassed, route_stats
from meshinfer.answer.effects import StepDraft
from meshinfer.answer.question import Done, Stats, Text
from meshinfer.answer.rounds import Rounds
from meshinfer.answer.session import Session
from meshinfer.engine.step import Rows
from meshinfer.errors import MeshinferError
from meshinfer.mesh.plan import plan_id, pool_limit
from meshinfer.values import PeerId, Plan, SequenceId
from meshinfer.wire.messages import Free, Refusal, Result

Embedded = tuple[int, int, Rows]
"""Position, token, and what it is embedded to."""


class Route:
    """One plan's owners. A route that was given up is dropped whole: what still comes for it counts for nothing."""

    def __init__(self, plan: Plan, speaker: Speaker, steps: Iterator[int]) -> None:
        """`steps` numbers the steps of all routes of an asker."""
        self.plan = plan
        self.id = plan_id(plan)
        self.speaker = speaker
        self.rounds = Rounds(pool_limit(plan), steps)
        self.sent_at: dict[int, float] = {}

    def draft_of(self, sender: PeerId, result: Result) -> StepDraft | None:
        """The step that this result is the answer to; None for what nobody waits for, or another should have sent."""
        if sender != self.plan.owners[-1] or len(result.trace) != len(self.plan.owners):
            return None
        draft = self.rounds.under_way(result.step)
        return draft if draft is not None and result.entries == draft.entries else None

    def refuses(self, sender: PeerId, refusal: Refusal) -> bool:
        """Whether an owner of this route says no to a step that is under way."""
        owners = self.plan.owners
        return (
            refusal.hop < len(owners)
            and sender == owners[refusal.hop]
            and self.rounds.under_way(refusal.step) is not None
        )

    def passed(self, result: Result, came_at: float) -> StepPassed | None:
        """What a step took; None for one that was not sent, or has come back before."""
        sent_at = self.sent_at.pop(result.step, None)
        return None if sent_at is None else StepPassed(int((came_at - sent_at) * 1e6), result.trace)

    def frees(
        self, sequences: Sequence[int], answers: Mapping[SequenceId, Answer]
    ) -> Iterator[tuple[PeerId, Free]]:
        """What each owner may forget: nothing of an answer that goes on there along another route."""
        elsewhere = {
            sequence: answers[SequenceId(sequence)].route for sequence in sequences if sequence in answers
        }
        for owner in self.plan.owners:
            done = tuple(
                sequence
                for sequence in sequences
                if (other := elsewhere.get(sequence)) is None
                or other is self
                or owner not in other.plan.owners
            )
            if done:
                yield owner, Free(done)

    def tidy(self) -> None:
        """Forgets when steps were sent that are not waited for any more."""
        for step in [step for step in self.sent_at if self.rounds.under_way(step) is None]:
            del self.sent_at[step]


@dataclass(slots=True, eq=False)
class Answer:
    """One question under way: what its reader has not taken yet, and what it has cost."""

    session: Session
    asked_at: float
    plan: Plan
    """The one that it goes on under, or went on under last."""
    route: Route | None = None
    """None while it is stranded."""
    events: asyncio.Queue[Text | Done | MeshinferError] = field(default_factory=asyncio.Queue)
    first_at: float | None = None
    steps: list[StepPassed] = field(default_factory=list)

    stranded_at: float | None = None
    """Since when it has had no route; a token ends that."""
    stranded_tokens: int = 0

    def strand(self, now: float) -> float:
        """It has lost its route. Since when it has had none that brought it a token."""
        if self.stranded_at is None or self.session.generated > self.stranded_tokens:
            self.stranded_at, self.stranded_tokens = now, self.session.generated
        self.route = None
        return self.stranded_at

    def seat(self, route: Route) -> None:
        """Goes on along this route. Raises MeshinferError where that has no room for it."""
        if self.plan != route.plan:
            self.plan = route.plan
            self.steps.clear()
        route.rounds.add(self.session)
        self.route = route

    def stats(self, now: float, name_of: Callable[[PeerId], str]) -> Stats:
        first_at = self.first_at if self.first_at is not None else now
        decoding_s = now - first_at
        tokens = self.session.generated
        return Stats(
            prompt_tokens=self.session.prompt_tokens,
            tokens=tokens,
            ttft_s=first_at - self.asked_at,
            total_s=now - self.asked_at,
            tokens_per_s=(tokens - 1) / decoding_s if tokens > 1 and decoding_s > 0 else 0.0,
            route=route_stats(self.plan, self.steps, name_of),
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """An answer without a route: why, when to try the newest one, and since when no route has brought it a token."""

    reason: str
    again_at: float
    since: float


def rows_at_hand(draft: StepDraft, embedded: Mapping[SequenceId, Embedded]) -> Rows | None:
    """The rows of tokens that were embedded when they were picked; None where one is missing.

    The token is compared as well: what a step picked that no longer counted stands at the same position.
    """
    if len(draft.tokens) != len(draft.entries):
        return None
    found = []
    for entry, token in zip(draft.entries, draft.tokens.tolist(), strict=True):
        one = embedded.get(SequenceId(entry.sequence))
        if one is None or one[:2] != (entry.position, token):
            return None
        found.append(one[2])
    return found[0] if len(found) == 1 else np.concatenate(found)
