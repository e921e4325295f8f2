"""Which sequences go into the next step of one route: answers that run share rounds, prompts come in between.

A round is one step with one token of every answer that is ready. Prompts travel in steps of their own, in
chunks, a few at a time and in turn, so that a long one delays the others little. An answer is admitted when
all the KV it may ever need is unreserved: so none has to be thrown out, and the youngest waits.

Events go in (`add`, `cancel`, `returned`, `refused`, `expire`), effects come out; after each, ask
`next_steps`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from meshinfer import limits
from meshinfer.answer.effects import Effect, Ended, Failed, Shown, StepDraft, Stranded, draft_step
from meshinfer.answer.question import Finish
from meshinfer.answer.session import Session
from meshinfer.errors import BusyError, MeshinferError, PromptError, StepError
from meshinfer.values import SequenceId
from meshinfer.wire.messages import Entry, Free, RefusalReason


@dataclass(slots=True, eq=False)
class _Seat:
    """A session's place in these rounds."""

    session: Session
    steps: int = 0
    """Steps under way with an entry of it, those that no longer count included."""
    left: bool = False
    """The session is out of these rounds; what it holds is given back when its last step is."""
    alone: bool = False
    """A step that it was part of failed: it goes by itself until that is cleared up."""
    served: int = 0
    """The latest step with an entry of it."""
    busy_since: float = inf
    """Since when owners have had no room or time for its next token."""
    refusals: int = 0
    """How often they said so."""
    rests_until: float = -inf

    def may_send(self, chunks: int) -> bool:
        session = self.session
        return session.unsent > 0 and session.in_flight < (1 if self.alone else chunks)


@dataclass(slots=True, eq=False)
class _Flight:
    """A step under way."""

    draft: StepDraft
    seats: tuple[_Seat, ...]
    epochs: tuple[int, ...]
    is_round: bool
    deadline: float


@dataclass(slots=True)
class _Outcome:
    """The effects of one event; all that can be freed goes into one message."""

    effects: list[Effect] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def all(self) -> list[Effect]:
        return [*self.effects, Free(tuple(dict.fromkeys(self.freed)))] if self.freed else self.effects


class Rounds:
    """The answers of one asker on one route. Times are seconds of any one monotonic clock.

    `max_groups` rounds may be under way at once: 1 where owners share a PC, more where they do not, by
    measurement. It may be changed at any time.
    """

    def __init__(
        self,
        pool_tokens: int,
        steps: Iterator[int],
        max_groups: int = 1,
        prefill_steps: int = limits.PREFILL_STEPS,
        prefill_chunks: int = limits.PREFILL_CHUNKS,
    ) -> None:
        """`pool_tokens` is the KV room of the owner that has least; `steps` numbers steps, ascending."""
        self.max_groups = max_groups
        self.pool_tokens = pool_tokens // limits.KV_BLOCK_TOKENS * limits.KV_BLOCK_TOKENS
        self.reserved_tokens = 0
        self._steps = steps
        self._latest = 0
        self._prefill_steps = prefill_steps
        self._prefill_chunks = prefill_chunks
        self._waiting: list[Session] = []
        self._seats: dict[SequenceId, _Seat] = {}
        self._flights: dict[int, _Flight] = {}
        self._rounds_under_way = 0
        self._prefills_under_way = 0

    # ── how it stands ───────────────────────────────────────────────────────────────────────────────────
    @property
    def running(self) -> int:
        return len(self._seats)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs, or is under way."""
        return not (self._waiting or self._seats or self._flights)

    def under_way(self, step: int) -> StepDraft | None:
        """The step as it was sent; None when it is not, or no longer, waited for: drop what comes for it."""
        flight = self._flights.get(step)
        return flight.draft if flight else None

    def next_deadline(self) -> float | None:
        """When `expire` and `next_steps` are worth calling though nothing came."""
        times = [seat.rests_until for seat in self._seats.values() if seat.rests_until > -inf]
        times += [flight.deadline for flight in islice(self._flights.values(), 1)]
        return min(times, default=None)

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────
    def add(self, session: Session) -> None:
        """Takes a new session, or one that another route left stranded; the oldest is admitted first.

        Raises `PromptError` when it could never fit, `BusyError` when too many wait.
        """
        if session.reservation > self.pool_tokens:
            raise PromptError(
                f"the conversation may grow to {session.reservation:,} tokens, the mesh has memory for "
                f"{self.pool_tokens:,}: shorten the prompt, ask for fewer tokens, or share more memory"
            )
        if len(self._waiting) >= limits.ANSWERS_WAITING:
            raise BusyError(f"{len(self._waiting)} questions wait already: ask again later", 5.0)
        session.step_back(0)
        insort(self._waiting, session, key=_age)

    def cancel(self, sequence: SequenceId) -> list[Effect]:
        """The person left. Nothing happens when the answer is over."""
        outcome = _Outcome()
        session = self._dismiss(sequence, outcome)
        if session:
            session.cancel()
            outcome.effects.append(Ended(sequence, Finish.CANCELLED))
        return outcome.all()

    def close(self, reason: str) -> list[Effect]:
        """The route is given up: every session is stranded."""
        outcome = _Outcome()
        for sequence in [*self._seats, *(session.sequence for session in self._waiting)]:
            session = self._dismiss(sequence, outcome)
            if session:
                outcome.effects.append(Stranded(sequence, session, reason))
        return outcome.all()

    def returned(self, step: int, picked: Sequence[int | MeshinferError]) -> list[Effect]:
        """A step has run. `picked` has for each of its `wanting` the token chosen, or why there is none."""
        flight = self._land(step)
        outcome = _Outcome()
        rows = iter(picked)
        for seat, entry, counts in self._landed(flight, outcome):
            row = next(rows) if entry.want else None
            if counts:
                seat.alone = False
                if row is not None:
                    self._append(seat, row, outcome)
        return outcome.all()

    def refused(
        self, step: int, reason: RefusalReason, detail: str, held: Sequence[int], now: float
    ) -> list[Effect]:
        """An owner did not run a step, or it could not be sent (`OVERLOADED`). `held` as in `Refusal`."""
        flight = self._land(step)
        outcome = _Outcome()
        counting = [
            (index, seat, entry)
            for index, (seat, entry, counts) in enumerate(self._landed(flight, outcome))
            if counts
        ]
        by_itself = flight is not None and len(flight.seats) == 1
        youngest = max((seat.session.sequence for _, seat, _ in counting), default=None)
        for index, seat, entry in counting:
            match reason:
                case RefusalReason.MISSING_KV:
                    self._missing(seat, entry, held[index] if index < len(held) else 0, outcome)
                case RefusalReason.POOL_FULL if seat.session.sequence == youngest:
                    outcome.freed.append(youngest)
                    self._rest(seat, 0, detail, now, outcome)
                case RefusalReason.OVERLOADED:
                    self._rest(seat, entry.position, detail, now, outcome)
                case RefusalReason.NOT_ACCEPTED:
                    self._strand(seat, detail, outcome)
                case RefusalReason.FAILED if by_itself:
                    self._fail(seat, StepError(detail or "an owner could not run a step"), outcome)
                case _:
                    seat.alone = reason is RefusalReason.FAILED
                    seat.session.step_back(entry.position)
        return outcome.all()

    def expire(self, now: float) -> list[Effect]:
        """Gives up on steps that have been under way for `limits.STEP_TIMEOUT_S`."""
        outcome = _Outcome()
        for step in [step for step, flight in self._flights.items() if flight.deadline <= now]:
            for seat, _, counts in self._landed(self._land(step), outcome):
                if counts:
                    self._strand(seat, f"no owner answered within {limits.STEP_TIMEOUT_S:g} s", outcome)
        return outcome.all()

    # ── what to send ────────────────────────────────────────────────────────────────────────────────────
    def next_steps(self, now: float) -> list[StepDraft]:
        """What can be sent now, in this order. Each draft is under way from here on."""
        self._admit()
        ready: list[_Seat] = []
        pending: list[_Seat] = []
        decoding = 0
        for seat in self._seats.values():
            session = seat.session
            decoding += session.unsent <= 1
            if seat.rests_until > now:
                continue
            seat.rests_until = -inf
            if session.ready and not seat.alone:
                ready.append(seat)
            elif seat.may_send(self._prefill_chunks):
                pending.append(seat)
        # Groups of equal size: else one would take all and the others run empty.
        size = min(-(-decoding // self.max_groups), limits.STEP_SEQUENCES)
        return [*self._next_rounds(ready, size, now), *self._next_prefills(pending, now)]

    def _admit(self) -> None:
        # In order of age and without overtaking: a long question would else wait for ever behind short ones.
        while self._waiting and len(self._seats) < limits.ANSWERS_RUNNING:
            session = self._waiting[0]
            if self.reserved_tokens + session.reservation > self.pool_tokens:
                return
            self.reserved_tokens += session.reservation
            self._seats[session.sequence] = _Seat(session, served=self._latest)
            del self._waiting[0]

    def _next_rounds(self, ready: list[_Seat], size: int, now: float) -> Iterator[StepDraft]:
        if len(ready) > size:
            ready.sort(key=_served)
        while ready and self._rounds_under_way < self.max_groups:
            yield self._launch(ready[:size], True, now)
            del ready[:size]

    def _next_prefills(self, pending: list[_Seat], now: float) -> Iterator[StepDraft]:
        pending.sort(key=_served)
        while pending and self._prefills_under_way < self._prefill_steps:
            seats = _packed(pending)
            yield self._launch(seats, False, now)
            pending = [seat for seat in pending if seat not in seats]
            pending += [seat for seat in seats if seat.may_send(self._prefill_chunks)]

    def _launch(self, seats: list[_Seat], is_round: bool, now: float) -> StepDraft:
        step = next(self._steps)
        for seat in seats:
            seat.steps += 1
            seat.served = step
        draft = draft_step(step, tuple([seat.session for seat in seats]))
        epochs = tuple([seat.session.epoch for seat in seats])
        self._latest = step
        self._flights[step] = _Flight(draft, tuple(seats), epochs, is_round, now + limits.STEP_TIMEOUT_S)
        self._rounds_under_way += is_round
        self._prefills_under_way += not is_round
        return draft

    # ── what follows ────────────────────────────────────────────────────────────────────────────────────
    def _land(self, step: int) -> _Flight | None:
        """Takes a step off those under way; None for one that is not waited for any more."""
        flight = self._flights.pop(step, None)
        if flight:
            self._rounds_under_way -= flight.is_round
            self._prefills_under_way -= not flight.is_round
        return flight

    def _landed(self, flight: _Flight | None, outcome: _Outcome) -> Iterator[tuple[_Seat, Entry, bool]]:
        """Each entry of a step that is over, and whether it still counts for its session."""
        if not flight:
            return
        for seat, entry, epoch in zip(flight.seats, flight.draft.entries, flight.epochs, strict=True):
            seat.steps -= 1
            if seat.left and seat.steps == 0:
                self._release(seat, outcome)
            yield seat, entry, not seat.left and seat.session.arrived(epoch)

    def _append(self, seat: _Seat, row: int | MeshinferError, outcome: _Outcome) -> None:
        if isinstance(row, MeshinferError):
            self._fail(seat, row, outcome)
            return
        seat.busy_since, seat.refusals = inf, 0
        session = seat.session
        text = session.append(row)
        if text:
            outcome.effects.append(Shown(session.sequence, text))
        if session.finish:
            self._leave(seat, outcome)
            outcome.effects.append(Ended(session.sequence, session.finish))

    def _missing(self, seat: _Seat, entry: Entry, held: int, outcome: _Outcome) -> None:
        """An owner lacks KV of one of a step's sequences; of the others it has what they need."""
        if held < entry.position:
            seat.session.replays += 1
        if seat.session.replays > limits.STEP_RETRIES:
            error = (
                f"the route lost this answer's memory {seat.session.replays} times without a token between"
            )
            self._fail(seat, StepError(error), outcome)
            return
        seat.session.step_back(min(held, entry.position))

    def _rest(self, seat: _Seat, held: int, detail: str, now: float, outcome: _Outcome) -> None:
        seat.busy_since = min(seat.busy_since, now)
        if now - seat.busy_since >= limits.BUSY_PATIENCE_S:
            self._fail(seat, BusyError(f"the mesh is too busy ({detail}): ask again later", 30.0), outcome)
            return
        # Askers that are refused together must not come back together.
        spread = 1 + seat.session.sequence * 0x9E3779B1 % 2**32 / 2**32
        seat.rests_until = now + spread * min(limits.RETRY_S * 2**seat.refusals, limits.RETRY_MAX_S)
        seat.refusals = min(seat.refusals + 1, 16)
        seat.session.step_back(held)

    def _fail(self, seat: _Seat, error: MeshinferError, outcome: _Outcome) -> None:
        self._leave(seat, outcome)
        outcome.effects.append(Failed(seat.session.sequence, error))

    def _strand(self, seat: _Seat, reason: str, outcome: _Outcome) -> None:
        self._leave(seat, outcome)
        outcome.effects.append(Stranded(seat.session.sequence, seat.session, reason))

    def _dismiss(self, sequence: SequenceId, outcome: _Outcome) -> Session | None:
        """Takes out a session, whether it runs or waits; None when it is not here."""
        seat = self._seats.get(sequence)
        if seat:
            self._leave(seat, outcome)
            return seat.session
        for index, session in enumerate(self._waiting):
            if session.sequence == sequence:
                return self._waiting.pop(index)
        return None

    def _leave(self, seat: _Seat, outcome: _Outcome) -> None:
        """Ends a session's part. What it holds is freed when its last step is over, for a step that overtook
        `Free` would take KV again; but at once, too, when no step of other answers would be refused for it.
        """
        seat.left = True
        del self._seats[seat.session.sequence]
        if seat.steps == 0:
            self._release(seat, outcome)
        elif not any(seat in flight.seats and len(flight.seats) > 1 for flight in self._flights.values()):
            outcome.freed.append(seat.session.sequence)

    def _release(self, seat: _Seat, outcome: _Outcome) -> None:
        self.reserved_tokens -= seat.session.reservation
        if seat.session.sequence not in self._seats:  # unless it is back already
            outcome.freed.append(seat.session.sequence)


def _packed(pending: Sequence[_Seat]) -> list[_Seat]:
    """The first of `pending`, and what short ones fit beside it into one step."""
    first = pending[0]
    seats = [first]
    room = limits.PREFILL_CHUNK_TOKENS - first.session.unsent
    for seat in pending[1:]:
        if not (seat.alone or first.alone) and seat.session.unsent <= room:
            seats.append(seat)
            room -= seat.session.unsent
    return seats


def _age(session: Session) -> int:
    return session.sequence


def _served(seat: _Seat) -> int:
    return seat.served
