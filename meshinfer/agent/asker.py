"""The questions that are asked on this PC: from text to tokens, round after round along the route, and back to text.

Per token there is one hand-over to the inference thread and one back: it runs the head on what came, picks the tokens
and embeds them, so that the loop has the next step's rows at hand.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter_ns
from typing import Final, TypeVar

import numpy as np

from meshinfer.agent.metrics import Metrics
from meshinfer.agent.speaker import Speaker, Spoken
from meshinfer.agent.timing import StepPassed, route_stats
from meshinfer.answer.effects import Effect, Ended, Failed, Shown, StepDraft, Stranded
from meshinfer.answer.question import Done, Finish, Question, Stats, Text
from meshinfer.answer.rounds import Rounds
from meshinfer.answer.session import Session, answer_tokens
from meshinfer.engine.runner import Runner
from meshinfer.engine.step import Rows
from meshinfer.errors import MeshinferError, RouteError, StepError
from meshinfer.mesh.plan import plan_id, pool_limit
from meshinfer.net.loop import monotonic
from meshinfer.values import ModelId, PeerId, Plan, PlanId, SequenceId
from meshinfer.wire.messages import Free, Message, Refusal, RefusalReason, Result, Step

PATIENCE_S: Final = 10.0
"""An answer whose route is gone waits so long for another before it ends with an error: a plan takes about 2 s."""

AGAIN_S: Final = 0.5
"""A route that failed an answer is tried again after this, while the plan still holds."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Answer:
    """One question under way: what its reader has not taken yet, and what it has cost."""

    session: Session
    asked_at: float
    plan: Plan
    events: asyncio.Queue[Text | Done | MeshinferError] = field(default_factory=asyncio.Queue)
    first_at: float | None = None
    steps: list[StepPassed] = field(default_factory=list)

    stranded_at: float | None = None
    """Since when it has had no route; a token ends that."""
    stranded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Stranded:
    """An answer without a route: why, when to try the present one again, and until when to wait for another."""

    reason: str
    again_at: float
    until: float


@dataclass(slots=True, eq=False)
class _Route:
    """The owners under one plan, and the answers that go through them."""

    plan: Plan
    id: PlanId
    rounds: Rounds
    sent_at: dict[int, float] = field(default_factory=dict)


class Asker:
    """All methods belong to the loop."""

    def __init__(
        self,
        me: PeerId,
        runner: Runner,
        send: Callable[[PeerId, Message], bool],
        metrics: Metrics,
        name_of: Callable[[PeerId], str],
        first_sequence: int,
    ) -> None:
        """`first_sequence` is above all that this identity ever used: owners may still hold KV of an earlier run."""
        self._me = me
        self._runner = runner
        self._send = send
        self._metrics = metrics
        self._name_of = name_of
        self._sequences = count(first_sequence)
        self._steps = count(1)
        self._speaker: Speaker | None = None
        self._route: _Route | None = None
        self._answers: dict[SequenceId, _Answer] = {}
        self._stranded: dict[SequenceId, _Stranded] = {}
        self._embedded: dict[SequenceId, tuple[int, int, Rows]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._closed = False

    # ── the plan ────────────────────────────────────────────────────────────────────────────────────────────
    def use(self, plan: Plan, speaker: Speaker) -> None:
        """Ask along this plan's route from now on; answers that lost theirs go on here."""
        if self._route is not None and self._route.plan == plan and self._speaker is speaker:
            return
        self.stop_using("the plan has changed")
        self._speaker = speaker
        self._route = _Route(plan, plan_id(plan), Rounds(pool_limit(plan), self._steps))
        for sequence in list(self._stranded):
            answer = self._answers[sequence]
            if answer.plan.model == plan.model:
                self._seat(answer, self._route)
            else:
                self._fail(sequence, RouteError("the answer ends here: the mesh serves another model now"))
        self._pump()

    def stop_using(self, reason: str) -> None:
        """The plan is of no use any more: its answers wait a while for another."""
        route, self._route = self._route, None
        if route is not None:
            self._carry_out(route, route.rounds.close(reason))
        # What is missing is often known only once the mesh has settled: the last reason is the one to tell.
        for sequence, stranded in self._stranded.items():
            self._stranded[sequence] = replace(stranded, reason=reason)
        self._set_timer()

    @property
    def model(self) -> ModelId | None:
        """The model that can be asked now."""
        return self._route.plan.model if self._route is not None else None

    @property
    def under_way(self) -> int:
        return len(self._answers)

    async def close(self) -> None:
        """Ends all answers, and tells the owners that they may forget them."""
        self._closed = True
        for sequence in list(self._answers):
            self._cancel(sequence)
        if self._timer is not None:
            self._timer.cancel()

    # ── one question ────────────────────────────────────────────────────────────────────────────────────────
    async def ask(self, question: Question) -> AsyncIterator[Text | Done]:
        """Streams the answer; whoever stops reading (`aclose`) cancels it.

        Raises RouteError, PromptError, BusyError, or StepError where the answer fails; text that came before stays.
        """
        asked_at = monotonic()
        route, speaker = self._route, self._speaker
        if route is None or speaker is None:
            raise RouteError("no question can be asked now: the mesh has no plan")
        prompt = await asyncio.to_thread(speaker.prompt, question)
        if self._speaker is not speaker:
            raise RouteError("the mesh has just changed its model: ask again")
        route = self._route or route
        most = answer_tokens(len(prompt), question.max_tokens, speaker.context, route.rounds.pool_tokens)
        sequence = SequenceId(next(self._sequences))
        session = speaker.session(sequence, prompt, most, question, secrets.randbits(64))
        answer = _Answer(session, asked_at, route.plan)
        if route is self._route:
            route.rounds.add(session)
            self._answers[sequence] = answer
            self._pump()
        else:
            # The plan went while the prompt was rendered: its rounds would never send anything.
            self._answers[sequence] = answer
            self._strand(sequence, "the plan has changed", monotonic())
            self._set_timer()
        try:
            while True:
                event = await answer.events.get()
                if isinstance(event, MeshinferError):
                    raise event
                yield event
                if isinstance(event, Done):
                    return
        finally:
            self._cancel(sequence)

    def _cancel(self, sequence: SequenceId) -> None:
        """Nothing happens when the answer is over."""
        answer = self._answers.get(sequence)
        if answer is None:
            return
        if self._route is not None and sequence not in self._stranded:
            self._carry_out(self._route, self._route.rounds.cancel(sequence))
            self._pump()
        else:
            answer.session.cancel()
            self._end(sequence, Finish.CANCELLED)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────
    def _pump(self) -> None:
        """Send what can be sent now."""
        route = self._route
        if route is None:
            # Answers without a route must not wait for ever: the timer that just fired may have been a step's.
            self._set_timer()
            return
        for draft in route.rounds.next_steps(monotonic()):
            rows = self._rows_at_hand(draft)
            if rows is not None:
                self._send_step(route, draft, rows)
            else:
                self._embed(route, draft)
        self._set_timer()

    def _rows_at_hand(self, draft: StepDraft) -> Rows | None:
        """The rows of tokens that were embedded when they were picked.

        The token is compared as well: what a step picked that no longer counted stands at the same position.
        """
        if len(draft.tokens) != len(draft.entries):
            return None
        found = []
        for entry, token in zip(draft.entries, draft.tokens.tolist(), strict=True):
            embedded = self._embedded.get(SequenceId(entry.sequence))
            if embedded is None or embedded[:2] != (entry.position, token):
                return None
            found.append(embedded[2])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _embed(self, route: _Route, draft: StepDraft) -> None:
        speaker = self._speaker
        assert speaker is not None, "a route comes with its speaker"
        self._in_runner(
            "embed",
            lambda: speaker.embed(draft.tokens, draft.positions),
            lambda rows: self._send_step(route, draft, rows),
            lambda error: self._refused(route, draft.step, RefusalReason.FAILED, str(error), ()),
        )

    def _send_step(self, route: _Route, draft: StepDraft, rows: Rows) -> None:
        if route is not self._route:
            return
        plan = route.plan
        step = Step(route.id, plan.owners, 0, self._me, draft.step, draft.entries, (), rows)
        route.sent_at[draft.step] = monotonic()
        if not self._send(plan.owners[0], step):
            detail = f"{self._name_of(plan.owners[0])} cannot be reached"
            self._refused(route, draft.step, RefusalReason.NOT_ACCEPTED, detail, ())

    # ── what comes back ─────────────────────────────────────────────────────────────────────────────────────
    def result(self, sender: PeerId, result: Result) -> None:
        """Rows from the last owner: the head turns them into tokens."""
        came_at = monotonic()
        route, speaker = self._route, self._speaker
        if route is None or speaker is None or result.plan != route.id or sender != route.plan.owners[-1]:
            self._metrics.count("ignored.result")
            return
        draft = route.rounds.under_way(result.step)
        if draft is None or result.entries != draft.entries or len(result.trace) != len(route.plan.owners):
            self._metrics.count("ignored.result")
            return
        if not self._note(route, draft, result, came_at):
            # Said twice: the head must not pick a second time.
            self._metrics.count("ignored.result")
            return
        wanting = draft.wanting
        if not wanting:
            self._carry_out(route, route.rounds.returned(result.step, ()))
            self._pump()
            return
        rows = np.asarray(result.rows, dtype=np.float32)
        self._in_runner(
            "head",
            lambda: speaker.speak(rows, wanting),
            lambda spoken: self._spoken(route, result.step, spoken),
            lambda error: self._refused(route, result.step, RefusalReason.FAILED, str(error), ()),
        )

    def _spoken(
        self,
        route: _Route,
        step: int,
        spoken: Spoken,
    ) -> None:
        picked, embedded = spoken
        for sequence, found in embedded.items():
            if sequence in self._answers:  # its reader may have left while the head ran
                self._embedded[sequence] = found
        effects = route.rounds.returned(step, picked)
        # The next step first: owners compute while people are told.
        self._pump()
        self._carry_out(route, effects)

    def refusal(self, sender: PeerId, refusal: Refusal) -> None:
        """An owner's no: the rounds decide what becomes of the answers in that step."""
        route = self._route
        owners = route.plan.owners if route is not None else ()
        if route is None or refusal.plan != route.id or not refusal.hop < len(owners):
            self._metrics.count("ignored.refusal")
            return
        if sender != owners[refusal.hop] or route.rounds.under_way(refusal.step) is None:
            self._metrics.count("ignored.refusal")
            return
        self._metrics.count(f"refusals.{refusal.reason.name.lower()}")
        detail = f"{self._name_of(sender)}: {refusal.detail}"
        self._refused(route, refusal.step, refusal.reason, detail, refusal.held)

    def _refused(
        self, route: _Route, step: int, reason: RefusalReason, detail: str, held: Sequence[int]
    ) -> None:
        route.sent_at.pop(step, None)
        self._carry_out(route, route.rounds.refused(step, reason, detail, held, monotonic()))
        # Not at once: what was refused for want of a link would be refused again in the same breath.
        self._loop.call_soon(self._pump)

    def _in_runner(
        self, what: str, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        """Run `work` in the inference thread, then one of the others in the loop. `what` names it in the metrics."""
        asked_ns = perf_counter_ns()
        begun_ns = ended_ns = asked_ns

        def timed() -> T:
            nonlocal begun_ns, ended_ns
            begun_ns = perf_counter_ns()
            try:
                return work()
            finally:
                ended_ns = perf_counter_ns()

        def back(outcome: T | Exception) -> None:
            self._metrics.took(f"{what}.wait", (begun_ns - asked_ns) // 1000)
            self._metrics.took(f"{what}.run", (ended_ns - begun_ns) // 1000)
            self._metrics.took(f"{what}.return", (perf_counter_ns() - ended_ns) // 1000)
            if isinstance(outcome, Exception):
                failed(outcome)
            else:
                done(outcome)

        def finished(outcome: T | Exception) -> None:
            self._loop.call_soon_threadsafe(back, outcome)

        try:
            self._runner.call(timed, finished)
        except StepError as error:
            failed(error)

    # ── effects ─────────────────────────────────────────────────────────────────────────────────────────────
    def _carry_out(self, route: _Route, effects: Iterable[Effect]) -> None:
        now = monotonic()
        for effect in effects:
            match effect:
                case Shown(sequence, text):
                    self._show(sequence, text, now)
                case Ended(sequence, finish):
                    self._end(sequence, finish)
                case Failed(sequence, error):
                    self._fail(sequence, error)
                case Stranded(sequence, _, reason):
                    self._strand(sequence, reason, now)
                case Free():
                    for owner in route.plan.owners:
                        self._send(owner, effect)

    def _show(self, sequence: SequenceId, text: str, now: float) -> None:
        answer = self._answers.get(sequence)
        if answer is None:
            return  # the step that was sent in between has failed it
        if answer.first_at is None:
            answer.first_at = now
        answer.events.put_nowait(Text(text))

    def _end(self, sequence: SequenceId, finish: Finish) -> None:
        answer = self._forget(sequence)
        if answer is not None:
            answer.events.put_nowait(Done(finish, self._stats(answer)))

    def _fail(self, sequence: SequenceId, error: MeshinferError) -> None:
        answer = self._forget(sequence)
        if answer is not None:
            answer.events.put_nowait(error)

    def _forget(self, sequence: SequenceId) -> _Answer | None:
        self._stranded.pop(sequence, None)
        self._embedded.pop(sequence, None)
        return self._answers.pop(sequence, None)

    def _strand(self, sequence: SequenceId, reason: str, now: float) -> None:
        """The route is no good for this answer; it may go on along the same or the next one, if that comes in time."""
        answer = self._answers.get(sequence)
        if answer is None:
            return
        if answer.stranded_at is None or answer.session.generated > answer.stranded_tokens:
            answer.stranded_at, answer.stranded_tokens = now, answer.session.generated
        self._stranded[sequence] = _Stranded(reason, now + AGAIN_S, answer.stranded_at + PATIENCE_S)
        self._embedded.pop(sequence, None)

    def _seat(self, answer: _Answer, route: _Route) -> None:
        """Let a stranded answer go on; what was shown stays, and what the owners lack is computed again."""
        self._stranded.pop(answer.session.sequence, None)
        if answer.plan != route.plan:
            answer.plan = route.plan
            answer.steps.clear()
        try:
            route.rounds.add(answer.session)
        except MeshinferError as error:
            self._fail(answer.session.sequence, error)

    def _set_timer(self) -> None:
        """One timer for what happens though nothing comes: steps that stay away, pauses, answers without a route."""
        times = [stranded.until for stranded in self._stranded.values()]
        if self._route is not None:
            times += [stranded.again_at for stranded in self._stranded.values()]
            due = self._route.rounds.next_deadline()
            times += [] if due is None else [due]
        due = min(times, default=None)
        if self._timer is not None:
            if due is not None and self._timer_due <= due:
                return  # it will look again when it fires
            self._timer.cancel()
            self._timer = None
        if due is not None and not self._closed:
            self._timer_due = due
            self._timer = self._loop.call_later(max(0.0, due - monotonic()), self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        now = monotonic()
        route = self._route
        if route is not None:
            self._carry_out(route, route.rounds.expire(now))
            for step in [step for step in route.sent_at if route.rounds.under_way(step) is None]:
                del route.sent_at[step]
        for sequence, stranded in list(self._stranded.items()):
            if stranded.until <= now:
                self._fail(sequence, RouteError(f"the answer ends here: {stranded.reason}"))
            elif route is not None and stranded.again_at <= now:
                self._seat(self._answers[sequence], route)
        self._pump()

    # ── figures ─────────────────────────────────────────────────────────────────────────────────────────────
    def _note(self, route: _Route, draft: StepDraft, result: Result, came_at: float) -> bool:
        """False for a step that was not sent, or has come back before."""
        sent_at = route.sent_at.pop(result.step, None)
        if sent_at is None:
            return False
        passed = StepPassed(int((came_at - sent_at) * 1e6), result.trace)
        for session in draft.sessions:
            answer = self._answers.get(session.sequence)
            if answer is not None:
                answer.steps.append(passed)
        return True

    def _stats(self, answer: _Answer) -> Stats:
        now = monotonic()
        session = answer.session
        first_at = answer.first_at if answer.first_at is not None else now
        decoding_s = now - first_at
        tokens = session.generated
        return Stats(
            prompt_tokens=session.prompt_tokens,
            tokens=tokens,
            ttft_s=first_at - answer.asked_at,
            total_s=now - answer.asked_at,
            tokens_per_s=(tokens - 1) / decoding_s if tokens > 1 and decoding_s > 0 else 0.0,
            route=route_stats(answer.plan, answer.steps, self._name_of),
        )
