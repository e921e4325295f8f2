"""What rounds hand out: steps to send, and what became of answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshinfer.answer.question import Finish
from meshinfer.answer.session import Session, Tokens
from meshinfer.errors import MeshinferError
from meshinfer.limits import PREFILL_CHUNK_TOKENS
from meshinfer.values import SequenceId
from meshinfer.wire.messages import Entry, Free


@dataclass(frozen=True, slots=True, eq=False)
class StepDraft:
    """A step to send along the route, once its tokens are embedded.

    `tokens` and `positions` are `[sum of counts]`, entry after entry. `sessions[i]` is the one of
    `entries[i]`.
    """

    step: int
    entries: tuple[Entry, ...]
    sessions: tuple[Session, ...]
    tokens: Tokens
    positions: Tokens

    @property
    def wanting(self) -> list[Session]:
        """The sessions for which a row comes back, in the order of those rows."""
        return [session for session, entry in zip(self.sessions, self.entries, strict=True) if entry.want]


@dataclass(frozen=True, slots=True)
class Shown:
    """More of an answer's text."""

    sequence: SequenceId
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer is whole, or was cancelled."""

    sequence: SequenceId
    finish: Finish


@dataclass(frozen=True, slots=True)
class Failed:
    """An answer ended by an error of its own."""

    sequence: SequenceId
    error: MeshinferError


@dataclass(frozen=True, slots=True)
class Stranded:
    """The route is of no use to this answer any more. Its session is whole and out of these rounds: it can be
    added to another route's, and goes on there."""

    sequence: SequenceId
    session: Session
    reason: str


Effect = Shown | Ended | Failed | Stranded | Free
"""`Free` goes to each owner on the route."""


def draft_step(step: int, sessions: tuple[Session, ...]) -> StepDraft:
    """Takes the next chunk of each session; all of them have unsent tokens."""
    entries = tuple([session.take(PREFILL_CHUNK_TOKENS) for session in sessions])
    if len(entries) == sum([entry.count for entry in entries]):
        positions = [entry.position for entry in entries]
        tokens = [session.history[position] for session, position in zip(sessions, positions, strict=True)]
        return StepDraft(step, entries, sessions, np.array(tokens, np.int64), np.array(positions, np.int64))
    ends = [(entry.position, entry.position + entry.count) for entry in entries]
    rows = [session.history[begin:end] for session, (begin, end) in zip(sessions, ends, strict=True)]
    places = [np.arange(begin, end, dtype=np.int64) for begin, end in ends]
    return StepDraft(step, entries, sessions, np.concatenate(rows), np.concatenate(places))
