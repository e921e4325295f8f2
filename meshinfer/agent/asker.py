"""The questions that are asked on this PC: from text to tokens, round after round along the route, and back to text.

New questions go along the newest plan's route; an answer stays on the route that it began on for as long as that holds.
Per token there is one hand-over to the inference thread and one back: it runs the head on what came, picks the tokens
and embeds them, so that the loop has the next step's rows at hand.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np

from meshinfer.agent.inference import Inference
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.route import Answer, Embedded, Route, Waiting, rows_at_hand
from meshinfer.agent.speaker import Speaker, Spoken
from meshinfer.agent.timing import StepPassed
from meshinfer.answer.effects import Effect, Ended, Failed, Shown, StepDraft, Stranded
from meshinfer.answer.question import Done, Finish, Question, Text
from meshinfer.answer.session import answer_tokens
from meshinfer.engine.runner import Runner
from meshinfer.engine.step import Rows
from meshinfer.errors import MeshinferError, RouteError
from meshinfer.net.loop import monotonic
from meshinfer.values import ModelId, PeerId, Plan, PlanId, SequenceId
from meshinfer.wire.messages import Free, Message, Refusal, RefusalReason, Result, Step

PATIENCE_S: Final = 10.0
LONG_PATIENCE_S: Final = 60.0
"""An answer whose route is gone waits so long for another before it ends with an error: a plan takes about 2 s, and the
longer time where one is being loaded."""

AGAIN_S: Final = 0.5
"""A route that failed an answer is tried again after this, while no newer one is there."""


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
        self._inference = Inference(runner, metrics)
        self._send = send
        self._metrics = metrics
        self._name_of = name_of
        self._sequences = count(first_sequence)
        self._steps = count(1)
        self._newest: Route | None = None
        """The route that new questions take."""
        self._routes: dict[PlanId, Route] = {}
        """That one, and those that answers are still under way on."""
        self._answers: dict[SequenceId, Answer] = {}
        self._stranded: dict[SequenceId, Waiting] = {}
        self._embedded: dict[SequenceId, Embedded] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._coming = False
        self._closed = False
        self.quiet = asyncio.Event()
        """Set while no answer is under way."""
        self.quiet.set()

    # ── plans ───────────────────────────────────────────────────────────────────────────────────────────────
    def use(self, plan: Plan, speaker: Speaker) -> None:
        """Ask along this plan's route from now on. Answers under way stay on theirs; those that lost it go on here."""
        newest = self._newest
        if newest is not None and newest.plan == plan and newest.speaker is speaker:
            return
        for route in [route for route in self._routes.values() if route.speaker is not speaker]:
            self._give_up(route, "the mesh serves another model now")
        route = Route(plan, speaker, self._steps)
        self._newest = self._routes.setdefault(route.id, route)
        self._drop_idle()
        for sequence in list(self._stranded):
            answer = self._answers[sequence]
            if answer.plan.model == plan.model:
                self._seat(answer, self._newest)
            else:
                self._fail(sequence, RouteError("the answer ends here: the mesh serves another model now"))
        self._pump()

    def stop_using(self, reason: str, coming: bool = False) -> None:
        """No new question can be asked. Answers under way go on while their owners serve them; those that lost their
        route wait a while for another, longer where one is `coming`."""
        self._newest, self._coming = None, coming
        self._drop_idle()
        # What is missing is often known only once the mesh has settled: the last reason is the one to tell.
        for sequence, stranded in self._stranded.items():
            self._stranded[sequence] = replace(stranded, reason=reason)
        self._set_timer()

    def end(self, reason: str) -> None:
        """The speaker is about to close: no route is of use any more."""
        self.stop_using(reason)
        for route in list(self._routes.values()):
            self._give_up(route, reason)
        self._set_timer()

    def lost(self, peer: PeerId, clause: str) -> None:
        """A peer "is gone" or "cannot be reached": answers on routes through it look for another at once."""
        for route in [route for route in self._routes.values() if peer in route.plan.owners]:
            if route.rounds.idle:
                continue
            newest = route is self._newest
            self._give_up(route, f"{self._name_of(peer)} {clause}")
            if newest:
                # It may be a single link that broke, and the plan still hold: its answers try it again.
                self._newest = self._routes[route.id] = Route(route.plan, route.speaker, self._steps)
        self._set_timer()

    def _give_up(self, route: Route, reason: str) -> None:
        del self._routes[route.id]
        if route is self._newest:
            self._newest = None
        self._carry_out(route, route.rounds.close(reason))

    def _drop_idle(self) -> None:
        for route in [route for route in self._routes.values() if route.rounds.idle]:
            if route is not self._newest:
                del self._routes[route.id]

    @property
    def model(self) -> ModelId | None:
        """The model that can be asked now."""
        return self._newest.plan.model if self._newest is not None else None

    @property
    def owners(self) -> frozenset[PeerId]:
        """All that answers go through, or would."""
        return frozenset(owner for route in self._routes.values() for owner in route.plan.owners)

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
        before = self._newest
        if before is None:
            raise RouteError("no question can be asked now: the mesh has no plan")
        speaker = before.speaker
        prompt = await asyncio.to_thread(speaker.prompt, question)
        route = self._newest
        if route is not None and route.speaker is not speaker:
            raise RouteError("the mesh has just changed its model: ask again")
        most = answer_tokens(
            len(prompt), question.max_tokens, speaker.context, (route or before).rounds.pool_tokens
        )
        sequence = SequenceId(next(self._sequences))
        session = speaker.session(sequence, prompt, most, question, secrets.randbits(64))
        answer = Answer(session, asked_at, before.plan)
        if route is not None:
            answer.seat(route)
        self._answers[sequence] = answer
        self.quiet.clear()
        if route is None:
            # The plan went while the prompt was rendered.
            self._strand(sequence, "the plan has changed", monotonic())
        self._pump()
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
        if answer.route is not None:
            self._carry_out(answer.route, answer.route.rounds.cancel(sequence))
            self._pump()
        else:
            answer.session.cancel()
            self._end(sequence, Finish.CANCELLED)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────
    def _pump(self) -> None:
        """Send what can be sent now; where there is no route, see that nothing waits for ever."""
        for route in [*self._routes.values()]:
            for draft in route.rounds.next_steps(monotonic()):
                rows = rows_at_hand(draft, self._embedded)
                if rows is not None:
                    self._send_step(route, draft, rows)
                else:
                    self._embed(route, draft)
        self._set_timer()

    def _embed(self, route: Route, draft: StepDraft) -> None:
        self._inference.run(
            "embed",
            lambda: route.speaker.embed(draft.tokens, draft.positions),
            lambda rows: self._send_step(route, draft, rows),
            lambda error: self._refused(route, draft.step, RefusalReason.FAILED, str(error), ()),
        )

    def _send_step(self, route: Route, draft: StepDraft, rows: Rows) -> None:
        if self._routes.get(route.id) is not route:
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
        route = self._routes.get(result.plan)
        draft = None if route is None else route.draft_of(sender, result)
        passed = None if route is None or draft is None else route.passed(result, came_at)
        if route is None or draft is None or passed is None:
            # Said twice, too: the head must not pick a second time.
            self._metrics.count("ignored.result")
            return
        self._note(route, draft, passed)
        wanting = draft.wanting
        if not wanting:
            self._carry_out(route, route.rounds.returned(result.step, ()))
            self._pump()
            return
        rows = np.asarray(result.rows, dtype=np.float32)
        self._inference.run(
            "head",
            lambda: route.speaker.speak(rows, wanting),
            lambda spoken: self._spoken(route, result.step, spoken),
            lambda error: self._refused(route, result.step, RefusalReason.FAILED, str(error), ()),
        )

    def _spoken(self, route: Route, step: int, spoken: Spoken) -> None:
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
        route = self._routes.get(refusal.plan)
        if route is None or not route.refuses(sender, refusal):
            self._metrics.count("ignored.refusal")
            return
        self._metrics.count(f"refusals.{refusal.reason.name.lower()}")
        detail = f"{self._name_of(sender)}: {refusal.detail}"
        self._refused(route, refusal.step, refusal.reason, detail, refusal.held)

    def _refused(
        self, route: Route, step: int, reason: RefusalReason, detail: str, held: Sequence[int]
    ) -> None:
        route.sent_at.pop(step, None)
        self._carry_out(route, route.rounds.refused(step, reason, detail, held, monotonic()))
        # Not at once: what was refused for want of a link would be refused again in the same breath.
        self._loop.call_soon(self._pump)

    # ── effects ─────────────────────────────────────────────────────────────────────────────────────────────
    def _carry_out(self, route: Route, effects: Iterable[Effect]) -> None:
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
                case Free(sequences):
                    for owner, free in route.frees(sequences, self._answers):
                        self._send(owner, free)
        if route is not self._newest and route.rounds.idle and self._routes.get(route.id) is route:
            del self._routes[route.id]

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
            answer.events.put_nowait(Done(finish, answer.stats(monotonic(), self._name_of)))

    def _fail(self, sequence: SequenceId, error: MeshinferError) -> None:
        answer = self._forget(sequence)
        if answer is not None:
            answer.events.put_nowait(error)

    def _forget(self, sequence: SequenceId) -> Answer | None:
        self._stranded.pop(sequence, None)
        self._embedded.pop(sequence, None)
        answer = self._answers.pop(sequence, None)
        if not self._answers:
            self.quiet.set()
        return answer

    def _strand(self, sequence: SequenceId, reason: str, now: float) -> None:
        """The route is no good for this answer; it goes on along a newer one at once, or tries the same one again."""
        answer = self._answers.get(sequence)
        if answer is None:
            return
        pause_s = AGAIN_S if self._newest is None or answer.plan == self._newest.plan else 0.0
        self._stranded[sequence] = Waiting(reason, now + pause_s, answer.strand(now))
        self._embedded.pop(sequence, None)

    def _seat(self, answer: Answer, route: Route) -> None:
        """Let a stranded answer go on; what was shown stays, and what the owners lack is computed again."""
        self._stranded.pop(answer.session.sequence, None)
        try:
            answer.seat(route)
        except MeshinferError as error:
            self._fail(answer.session.sequence, error)

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────
    def _set_timer(self) -> None:
        """One timer for what happens though nothing comes: steps that stay away, pauses, answers without a route."""
        times = [stranded.since + self._patience_s for stranded in self._stranded.values()]
        if self._newest is not None:
            times += [stranded.again_at for stranded in self._stranded.values()]
        deadlines = [route.rounds.next_deadline() for route in self._routes.values()]
        times += [deadline for deadline in deadlines if deadline is not None]
        due = min(times, default=None)
        if self._timer is not None:
            if due is not None and self._timer_due <= due:
                return  # it will look again when it fires
            self._timer.cancel()
            self._timer = None
        if due is not None and not self._closed:
            self._timer_due = due
            self._timer = self._loop.call_later(max(0.0, due - monotonic()), self._time_passed)

    @property
    def _patience_s(self) -> float:
        return LONG_PATIENCE_S if self._coming and self._newest is None else PATIENCE_S

    def _time_passed(self) -> None:
        self._timer = None
        now = monotonic()
        for route in [*self._routes.values()]:
            self._carry_out(route, route.rounds.expire(now))
            route.tidy()
        for sequence, stranded in list(self._stranded.items()):
            if stranded.since + self._patience_s <= now:
                self._fail(sequence, RouteError(f"the answer ends here: {stranded.reason}"))
            elif self._newest is not None and stranded.again_at <= now:
                self._seat(self._answers[sequence], self._newest)
        self._pump()

    def _note(self, route: Route, draft: StepDraft, passed: StepPassed) -> None:
        """What a step took, for its answers' figures and for the plan's."""
        if len(draft.tokens) == len(draft.entries):
            self._metrics.routes.note(route.id, passed)
        for session in draft.sessions:
            answer = self._answers.get(session.sequence)
            if answer is not None and answer.route is route:
                answer.steps.append(passed)
