"""A route in miniature, for tests: owners with KV of their own, links that keep order, faults by a seed.

The model is exact arithmetic: an owner's output for a token depends on every input it was given before, so
that one wrong or missing token anywhere in any owner's memory changes all that follows.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshinfer.answer.effects import Effect, Ended, Failed, Shown, StepDraft, Stranded
from meshinfer.answer.question import Finish, SamplingParams
from meshinfer.answer.rounds import Rounds
from meshinfer.answer.sampling import Sampler
from meshinfer.answer.session import Session
from meshinfer.answer.text import TextStream
from meshinfer.errors import MeshinferError
from meshinfer.values import SequenceId
from meshinfer.wire.messages import Entry, Free, RefusalReason

EOS = 0
VOCABULARY = 40
GREEDY = Sampler(SamplingParams(temperature=0), 0)


def fold(state: int, row: int) -> int:
    return (state * 6364136223846793005 + row * 1442695040888963407 + 1) % 2**61


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in ids)


def model(prompt: Sequence[int], owners: int, count: int) -> list[int]:
    """The tokens that undisturbed owners give after `prompt`, `EOS` or `count` the last."""
    states = [0] * owners
    tokens, answer = list(prompt), list[int]()
    position = 0
    while not answer or (answer[-1] != EOS and len(answer) < count):
        row = tokens[position]
        position += 1
        for owner in range(owners):
            states[owner] = row = fold(states[owner], row)
        if position == len(tokens):
            answer.append(row % VOCABULARY)
            tokens.append(answer[-1])
    return answer


@dataclass
class Parcel:
    """A step, result or refusal on its way; `rows` are the owner's inputs, entry after entry."""

    step: int
    entries: tuple[Entry, ...]
    rows: list[list[int]]


@dataclass
class Refused:
    step: int
    reason: RefusalReason
    held: tuple[int, ...]


class Owner:
    def __init__(self) -> None:
        self.kv: dict[int, list[int]] = {}

    def held(self, sequence: int) -> int:
        return len(self.kv.get(sequence, ()))

    def run(self, parcel: Parcel) -> list[list[int]]:
        return [self._run_entry(entry, rows) for entry, rows in zip(parcel.entries, parcel.rows, strict=True)]

    def _run_entry(self, entry: Entry, rows: list[int]) -> list[int]:
        states = self.kv.setdefault(entry.sequence, [])
        del states[entry.position :]
        for row in rows:
            states.append(fold(states[-1] if states else 0, row))
        return states[entry.position :]


@dataclass
class Answer:
    prompt: list[int]
    max_tokens: int
    stops: tuple[str, ...]
    text: str = ""
    tokens: int = 0
    finish: Finish | None = None
    error: MeshinferError | None = None
    strandings: int = 0

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None

    def expected(self, owners: int) -> tuple[str, Finish]:
        tokens = model(self.prompt, owners, self.max_tokens)
        text = letters(tokens[:-1] if tokens[-1] == EOS else tokens)
        places = [text.find(stop) for stop in self.stops if stop in text]
        if places:
            return text[: min(places)], Finish.STOP
        return text, Finish.STOP if tokens[-1] == EOS else Finish.LENGTH


@dataclass
class Faults:
    """Chances by step and owner, and by turn for `cancel`."""

    evict: float = 0.0
    refuse: float = 0.0
    fail: float = 0.0
    lose: float = 0.0
    cancel: float = 0.0


@dataclass
class Route:
    """The asker's rounds and the owners behind them, one event at a time."""

    random: random.Random
    owners: list[Owner]
    rounds: Rounds
    pool_tokens: int
    faults: Faults = field(default_factory=Faults)
    answers: dict[int, Answer] = field(default_factory=dict)
    now: float = 0.0
    turns: int = 0
    steps_sent: list[StepDraft] = field(default_factory=list)
    refusals: int = 0

    def __post_init__(self) -> None:
        # links[i] leads to owner i: steps from the owner before (or the asker). Frees come straight from the
        # asker, over another link except at the first owner.
        self.links: list[deque[Parcel | Free]] = [deque() for _ in self.owners]
        self.frees: list[deque[Free]] = [deque() for _ in self.owners]
        self.results: deque[Parcel] = deque()
        self.refused: list[deque[Refused]] = [deque() for _ in self.owners]

    @staticmethod
    def make(seed: int, owners: int, pool_tokens: int, max_groups: int = 1) -> Route:
        rounds = Rounds(pool_tokens, itertools.count(1), max_groups)
        return Route(random.Random(seed), [Owner() for _ in range(owners)], rounds, pool_tokens)

    def ask(self, sequence: int, answer: Answer) -> Session:
        self.answers[sequence] = answer
        session = Session(
            SequenceId(sequence),
            answer.prompt,
            answer.max_tokens,
            frozenset([EOS]),
            GREEDY,
            TextStream(letters, answer.stops),
        )
        self.rounds.add(session)
        return session

    # ── one event ───────────────────────────────────────────────────────────────────────────────────
    def run(self, most_turns: int = 200_000) -> None:
        """Until nothing is under way and nothing waits."""
        self.send()
        while self.turn():
            self.check()
            assert self.turns < most_turns, "no end in sight"

    def turn(self) -> bool:
        self.turns += 1
        self.now += self.random.random() * 0.002
        open_ = [key for key, answer in self.answers.items() if not answer.over]
        if open_ and self.random.random() < self.faults.cancel:
            self.apply(self.rounds.cancel(SequenceId(self.random.choice(open_))))
            self.send()
            return True
        busy = [
            *(("link", i) for i, link in enumerate(self.links) if link),
            *(("free", i) for i, link in enumerate(self.frees) if link),
            *(("refused", i) for i, link in enumerate(self.refused) if link),
            *([("result", 0)] if self.results else []),
        ]
        if not busy:
            return self.wait()
        kind, index = self.random.choice(busy)
        if kind == "link":
            self.arrive(index, self.links[index].popleft())
        elif kind == "free":
            self.arrive(index, self.frees[index].popleft())
        elif kind == "refused":
            refusal = self.refused[index].popleft()
            self.apply(self.rounds.refused(refusal.step, refusal.reason, "no", refusal.held, self.now))
        else:
            self.finish_step(self.results.popleft())
        self.send()
        return True

    def wait(self) -> bool:
        """Nothing moves: the next deadline is the next event."""
        deadline = self.rounds.next_deadline()
        if deadline is None:
            return False
        self.now = max(self.now, deadline)
        self.apply(self.rounds.expire(self.now))
        self.send()
        return True

    def send(self) -> None:
        for draft in self.rounds.next_steps(self.now):
            self.steps_sent.append(draft)
            rows, begin = [], 0
            for entry in draft.entries:
                rows.append([int(token) for token in draft.tokens[begin : begin + entry.count]])
                begin += entry.count
            self.links[0].append(Parcel(draft.step, draft.entries, rows))

    def arrive(self, index: int, message: Parcel | Free) -> None:
        owner, chance = self.owners[index], self.random.random
        if isinstance(message, Free):
            for sequence in message.sequences:
                owner.kv.pop(sequence, None)
            return
        if chance() < self.faults.lose:
            return
        for entry in message.entries:
            if chance() < self.faults.evict and entry.sequence in owner.kv:
                del owner.kv[entry.sequence][self.random.randrange(owner.held(entry.sequence) + 1) :]
        reason = self.trouble(owner, message)
        if reason is not None:
            self.refusals += 1
            held = tuple(owner.held(entry.sequence) for entry in message.entries)
            self.refused[index].append(Refused(message.step, reason, held))
            return
        parcel = Parcel(message.step, message.entries, owner.run(message))
        (self.links[index + 1] if index + 1 < len(self.owners) else self.results).append(parcel)

    def trouble(self, owner: Owner, parcel: Parcel) -> RefusalReason | None:
        if any(owner.held(entry.sequence) < entry.position for entry in parcel.entries):
            return RefusalReason.MISSING_KV
        chance = self.random.random()
        if chance < self.faults.refuse:
            return self.random.choice(
                [RefusalReason.POOL_FULL, RefusalReason.OVERLOADED, RefusalReason.NOT_ACCEPTED]
            )
        return RefusalReason.FAILED if chance < self.faults.refuse + self.faults.fail else None

    def finish_step(self, parcel: Parcel) -> None:
        draft = self.rounds.under_way(parcel.step)
        if draft is None:
            return
        assert draft.entries == parcel.entries
        last = [rows[-1] % VOCABULARY for rows, e in zip(parcel.rows, parcel.entries, strict=True) if e.want]
        assert len(last) == len(draft.wanting)
        self.apply(self.rounds.returned(parcel.step, last))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Free():
                    self.links[0].append(effect)
                    for link in self.frees[1:]:
                        link.append(effect)
                case Shown(sequence, text):
                    assert not self.answers[sequence].over
                    assert text
                    self.answers[sequence].text += text
                case Ended(sequence, finish):
                    assert not self.answers[sequence].over
                    self.answers[sequence].finish = finish
                case Failed(sequence, error):
                    assert not self.answers[sequence].over
                    self.answers[sequence].error = error
                case Stranded(sequence, session, _):
                    assert not self.answers[sequence].over
                    self.answers[sequence].strandings += 1
                    self.rounds.add(session)

    # ── what always holds ───────────────────────────────────────────────────────────────────────────
    def check(self) -> None:
        for owner, frees in zip(self.owners, self.frees, strict=True):
            going = {sequence for free in frees for sequence in free.sequences}
            blocks = sum(-(-len(states) // 32) for key, states in owner.kv.items() if key not in going)
            assert blocks * 32 <= self.pool_tokens, "an owner holds more than was reserved"
        assert 0 <= self.rounds.reserved_tokens <= self.pool_tokens

    def check_over(self) -> None:
        assert self.rounds.idle
        assert self.rounds.reserved_tokens == 0
        assert [owner.kv for owner in self.owners] == [{} for _ in self.owners], "KV leaked"
        for answer in self.answers.values():
            text, finish = answer.expected(len(self.owners))
            if answer.finish in (Finish.STOP, Finish.LENGTH):
                assert (answer.text, answer.finish) == (text, finish)
            else:
                assert answer.over
                assert "memory" not in str(answer.error), "replays did not bring back what was lost"
                assert text.startswith(answer.text)
