"""Answers that share a route: every token is right whatever goes wrong, nothing leaks, nobody starves."""

from __future__ import annotations

import itertools
import time

import pytest
from answer_route import EOS, GREEDY, Answer, Faults, Route, letters, model

from meshinfer import limits
from meshinfer.answer.effects import Ended, Failed, Shown, StepDraft, Stranded
from meshinfer.answer.question import Finish
from meshinfer.answer.rounds import Rounds
from meshinfer.answer.session import Session, answer_tokens
from meshinfer.answer.text import TextStream
from meshinfer.errors import BusyError, PromptError, StepError
from meshinfer.values import SequenceId
from meshinfer.wire.messages import Free, RefusalReason

POOL = 100_000


def session(sequence: int = 1, prompt: int = 3, max_tokens: int = 100) -> Session:
    return Session(
        SequenceId(sequence), [5] * prompt, max_tokens, frozenset([EOS]), GREEDY, TextStream(letters)
    )


def rounds(pool_tokens: int = POOL, max_groups: int = 1) -> Rounds:
    return Rounds(pool_tokens, itertools.count(1), max_groups)


def shape(drafts: list[StepDraft]) -> list[list[tuple[int, int, int, int]]]:
    return [[(e.sequence, e.position, e.count, e.want) for e in draft.entries] for draft in drafts]


def decoding(count: int, max_groups: int = 1) -> tuple[Rounds, list[StepDraft]]:
    """Rounds with `count` answers whose prompts are through, and the first round under way."""
    made = rounds(max_groups=max_groups)
    for sequence in range(count):
        made.add(session(sequence, prompt=2))
    while True:
        drafts = made.next_steps(0.0)
        if drafts and all(entry.position > 0 for draft in drafts for entry in draft.entries):
            return made, drafts
        for draft in drafts:
            made.returned(draft.step, [7] * len(draft.wanting))


# ── the simulation ──────────────────────────────────────────────────────────────────────────────
def disturbed(seed: int) -> Route:
    route = Route.make(seed, owners=1 + seed % 3, pool_tokens=2048, max_groups=1 + seed // 3 % 2)
    chance = route.random
    route.faults = Faults(
        evict=chance.choice([0, 0.01, 0.05]),
        refuse=chance.choice([0, 0.02, 0.1]),
        fail=chance.choice([0, 0.01, 0.03]),
        lose=chance.choice([0, 0, 0.002]),
        cancel=chance.choice([0, 0.002, 0.01]),
    )
    for sequence in range(chance.randint(1, 8)):
        length = chance.choice([1, 2, 30, 256, 257, 600, 900])
        prompt = [chance.randrange(1, 40) for _ in range(length)]
        stops = chance.choice([(), ("ab",), ("q", "xyz"), ("e",)])
        route.ask(sequence, Answer(prompt, chance.randint(1, 40), stops))
    return route


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_every_token_is_right_whatever_goes_wrong(first: int) -> None:
    """Lost KV, full and overloaded owners, failed and lost steps, cancelled answers, in any order."""
    for seed in range(first, first + 50):
        route = disturbed(seed)
        try:
            route.run()
            route.check_over()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_simulation_meets_what_it_is_about() -> None:
    """Else the test above might pass because nothing happens in it."""
    refusals = strandings = cancelled = failed = whole = waited = 0
    for seed in range(60):
        route = disturbed(seed)
        route.send()
        waited += route.rounds.waiting
        while route.turn():
            pass
        refusals += route.refusals
        for answer in route.answers.values():
            strandings += answer.strandings
            cancelled += answer.finish is Finish.CANCELLED
            failed += answer.error is not None
            whole += answer.finish in (Finish.STOP, Finish.LENGTH)
    assert min(refusals, strandings, cancelled, failed, waited) > 10
    assert whole > 100


def test_undisturbed_answers_all_come_whole() -> None:
    route = Route.make(1, owners=3, pool_tokens=POOL)
    for sequence in range(40):
        route.ask(sequence, Answer([1 + sequence % 39] * (1 + 17 * sequence), 30, ()))
    route.run()
    route.check_over()
    assert route.refusals == 0
    assert all(answer.error is None for answer in route.answers.values())


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────
def test_a_long_prompt_goes_in_chunks_in_order_and_only_its_last_row_comes_back() -> None:
    made = rounds()
    made.add(session(prompt=600))
    assert shape(made.next_steps(0.0)) == [[(1, 0, 256, 0)], [(1, 256, 256, 0)]]
    assert made.next_steps(0.0) == []
    assert made.returned(1, []) == []
    (last,) = made.next_steps(0.0)
    assert shape([last]) == [[(1, 512, 88, 1)]]
    assert last.tokens.tolist() == [5] * 88
    assert last.positions.tolist() == list(range(512, 600))
    made.returned(2, [])
    assert made.returned(3, [7]) == [Shown(SequenceId(1), "h")]
    assert shape(made.next_steps(0.0)) == [[(1, 600, 1, 1)]]


def test_short_prompts_share_a_step() -> None:
    made = rounds()
    for sequence in range(16):
        made.add(session(sequence, prompt=16))
    assert [len(draft.entries) for draft in made.next_steps(0.0)] == [16]


def test_long_prompts_take_turns_and_do_not_swamp_the_route() -> None:
    made = rounds()
    for sequence in range(5):
        made.add(session(sequence, prompt=1000))
    under_way = made.next_steps(0.0)
    order = [draft.entries[0].sequence for draft in under_way]
    assert len(under_way) == limits.PREFILL_STEPS
    while len(order) < 20:
        made.returned(under_way.pop(0).step, [7])
        new = [draft for draft in made.next_steps(0.0) if draft.entries[0].count > 1]
        order += [draft.entries[0].sequence for draft in new]
        under_way += new
    for turn in range(0, 20, 5):
        assert sorted(order[turn : turn + 5]) == [0, 1, 2, 3, 4]


def test_a_prompt_that_comes_in_does_not_hold_up_the_next_round() -> None:
    made, (first,) = decoding(4)
    made.add(session(99, prompt=5000))
    assert all(draft.entries[0].sequence == 99 for draft in made.next_steps(0.0))
    made.returned(first.step, [7] * 4)
    assert len(made.next_steps(0.0)[0].entries) == 4


# ── rounds ──────────────────────────────────────────────────────────────────────────────────────
def test_all_that_is_ready_shares_one_round() -> None:
    made, (draft,) = decoding(16)
    assert len(draft.entries) == 16
    assert draft.tokens.tolist() == [7] * 16
    assert draft.positions.tolist() == [2] * 16
    assert made.next_steps(0.0) == []


def test_a_newcomer_joins_the_next_round() -> None:
    made, (first,) = decoding(2)
    made.add(session(50, prompt=1))
    assert made.next_steps(0.0) == []
    made.returned(first.step, [7, 7])
    assert shape(made.next_steps(0.0)) == [[(0, 3, 1, 1), (1, 3, 1, 1), (50, 0, 1, 1)]]


def test_groups_are_of_equal_size_so_that_no_owner_runs_empty() -> None:
    _, drafts = decoding(6, max_groups=2)
    assert [len(draft.entries) for draft in drafts] == [3, 3]


def test_a_round_of_sixteen_costs_little() -> None:
    """150 µs where it was written, stop strings included; a step takes some 10 ms."""
    made, drafts = decoding(16)
    times = []
    for _ in range(60):
        start = time.perf_counter()
        made.returned(drafts[0].step, [7] * 16)
        drafts = made.next_steps(0.0)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


# ── memory ──────────────────────────────────────────────────────────────────────────────────────
def test_the_youngest_waits_and_nobody_overtakes() -> None:
    made = rounds(pool_tokens=1024)
    made.add(session(1, prompt=500))
    made.add(session(2, prompt=500))
    made.add(session(3, prompt=1, max_tokens=1))
    assert {entry.sequence for draft in made.next_steps(0.0) for entry in draft.entries} == {1}
    assert (made.running, made.waiting) == (1, 2)
    made.cancel(SequenceId(1))
    made.returned(1, [])
    made.returned(2, [7])
    assert {entry.sequence for draft in made.next_steps(0.0) for entry in draft.entries} == {2, 3}


def test_what_can_never_fit_is_refused_with_both_lengths() -> None:
    made = rounds(pool_tokens=1000)
    with pytest.raises(PromptError, match=r"1,024.*992"):
        made.add(session(prompt=1000, max_tokens=20))


def test_beyond_the_queue_a_client_is_told_to_come_back() -> None:
    made = rounds(pool_tokens=64)
    made.add(session(0, max_tokens=10))
    made.next_steps(0.0)
    for sequence in range(1, 1 + limits.ANSWERS_WAITING):
        made.add(session(sequence, max_tokens=10))
    with pytest.raises(BusyError, match="wait") as caught:
        made.add(session(9999, max_tokens=10))
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize(
    ("prompt", "asked", "context", "pool", "expected"),
    [
        (10, 20, 100, 100, 20),
        (10, None, 100_000, 100_000, limits.ANSWER_TOKENS),
        (10, None, 100, 1000, 91),
        (10, 500, 100, 1000, 91),
        (100, 500, 100, 1000, 1),
        (10, 500, 1000, 100, 87),
    ],
)
def test_an_answer_gets_what_context_and_memory_leave(
    prompt: int, asked: int | None, context: int, pool: int, expected: int
) -> None:
    assert answer_tokens(prompt, asked, context, pool) == expected
    made = rounds(pool)
    made.add(session(prompt=prompt, max_tokens=expected))


@pytest.mark.parametrize(("context", "pool", "named"), [(100, 1000, r"101.*100"), (1000, 100, r"101.*96")])
def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(context: int, pool: int, named: str) -> None:
    with pytest.raises(PromptError, match=named):
        answer_tokens(101, 10, context, pool)


def test_a_prompt_as_long_as_the_context_is_served() -> None:
    route = Route.make(3, owners=2, pool_tokens=512)
    prompt = [1 + i % 39 for i in range(512)]
    route.ask(1, Answer(prompt, answer_tokens(512, None, 512, 512), ()))
    route.run()
    route.check_over()
    assert route.answers[1].text == letters(model(prompt, 2, 1))


# ── cancelling ──────────────────────────────────────────────────────────────────────────────────
def test_cancelling_while_nothing_is_under_way_frees_at_once() -> None:
    made, (draft,) = decoding(1)
    made.returned(draft.step, [7])
    assert made.cancel(SequenceId(0)) == [Ended(SequenceId(0), Finish.CANCELLED), Free((0,))]
    assert made.idle


def test_cancelling_in_a_shared_round_disturbs_nobody_and_frees_after_it() -> None:
    made, (draft,) = decoding(3)
    assert made.cancel(SequenceId(1)) == [Ended(SequenceId(1), Finish.CANCELLED)]
    effects = made.returned(draft.step, [7, 7, 7])
    assert effects == [Shown(SequenceId(0), "h"), Shown(SequenceId(2), "h"), Free((1,))]
    assert made.cancel(SequenceId(1)) == []


def test_cancelling_a_prompt_under_way_frees_at_once_and_again_when_it_is_through() -> None:
    """A step that overtakes the first `Free` would leave KV behind until its lease runs out."""
    made = rounds()
    made.add(session(prompt=600))
    made.next_steps(0.0)
    assert made.cancel(SequenceId(1)) == [Ended(SequenceId(1), Finish.CANCELLED), Free((1,))]
    assert made.returned(1, []) == []
    assert made.reserved_tokens > 0
    assert made.returned(2, []) == [Free((1,))]
    assert made.idle
    assert made.reserved_tokens == 0


def test_cancelling_one_that_waits_or_never_was() -> None:
    made = rounds(pool_tokens=128)
    made.add(session(1))
    made.add(session(2))
    made.next_steps(0.0)
    assert made.cancel(SequenceId(2)) == [Ended(SequenceId(2), Finish.CANCELLED)]
    assert made.cancel(SequenceId(77)) == []
    assert made.waiting == 0


# ── trouble ─────────────────────────────────────────────────────────────────────────────────────
def test_lost_kv_is_replayed_from_what_is_held_and_the_others_go_on() -> None:
    made, (draft,) = decoding(2)
    assert made.refused(draft.step, RefusalReason.MISSING_KV, "", (2, 1), 0.0) == []
    assert shape(made.next_steps(0.0)) == [[(0, 2, 1, 1)], [(1, 1, 2, 1)]]


def test_a_route_that_never_keeps_anything_ends_the_answer_and_no_other() -> None:
    made, (draft,) = decoding(1)
    made.add(session(50, prompt=600))
    effects = []
    for _ in range(limits.STEP_RETRIES + 1):
        assert effects == []
        first, second = made.next_steps(0.0)
        made.returned(first.step, [])
        effects = made.refused(second.step, RefusalReason.MISSING_KV, "", (0,), 0.0)
    assert [type(effect) for effect in effects] == [Failed, Free]
    assert made.next_steps(0.0) == []
    assert made.returned(draft.step, [7]) == [Shown(SequenceId(0), "h")]
    assert made.next_steps(0.0)


def test_a_failed_step_is_tried_one_by_one_and_only_the_culprit_ends() -> None:
    made, (draft,) = decoding(3)
    assert made.refused(draft.step, RefusalReason.FAILED, "NaN", (), 0.0) == []
    alone = made.next_steps(0.0)
    assert [len(each.entries) for each in alone] == [1, 1, 1]
    made.returned(alone[0].step, [7])
    (failed, freed) = made.refused(alone[1].step, RefusalReason.FAILED, "NaN", (), 0.0)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StepError)
    assert (failed.sequence, freed) == (1, Free((1,)))
    made.returned(alone[2].step, [7])
    assert [len(each.entries) for each in made.next_steps(0.0)] == [2]


def test_a_row_that_cannot_be_sampled_ends_its_own_answer_only() -> None:
    made, (draft,) = decoding(2)
    error = StepError("not finite")
    effects = made.returned(draft.step, [error, 7])
    assert effects == [Failed(SequenceId(0), error), Shown(SequenceId(1), "h"), Free((0,))]


def test_a_full_pool_makes_the_youngest_wait() -> None:
    made, (draft,) = decoding(3)
    assert made.refused(draft.step, RefusalReason.POOL_FULL, "full", (), 10.0) == [Free((2,))]
    assert shape(made.next_steps(10.0)) == [[(0, 2, 1, 1), (1, 2, 1, 1)]]
    deadline = made.next_deadline()
    assert deadline is not None
    assert 10.0 < deadline < 11.0
    assert shape(made.next_steps(deadline)) == [[(2, 0, 3, 1)]]


def test_an_overloaded_route_is_left_alone_for_ever_longer_and_in_the_end_given_up() -> None:
    made, drafts = decoding(1)
    now, pauses, effects = 0.0, list[float](), []
    while drafts and not effects:
        effects = made.refused(drafts[0].step, RefusalReason.OVERLOADED, "busy", (), now)
        deadline = made.next_deadline()
        if deadline is None:
            break
        assert made.next_steps((now + deadline) / 2) == []
        pauses.append(deadline - now)
        now = deadline
        drafts = made.next_steps(now)
    assert pauses == pytest.approx(sorted(pauses))
    assert limits.RETRY_S <= pauses[0] <= 2 * limits.RETRY_S
    assert limits.BUSY_PATIENCE_S <= now <= limits.BUSY_PATIENCE_S + 2 * limits.RETRY_MAX_S
    assert isinstance(effects[0], Failed)
    assert isinstance(effects[0].error, BusyError)


def test_a_route_that_is_gone_strands_its_answers_whole_and_another_goes_on() -> None:
    made, (draft,) = decoding(2)
    effects = made.refused(draft.step, RefusalReason.NOT_ACCEPTED, "other plan", (), 0.0)
    stranded = [effect for effect in effects if isinstance(effect, Stranded)]
    assert [effect.sequence for effect in stranded] == [0, 1]
    assert effects[-1] == Free((0, 1))
    other = rounds()
    for effect in stranded:
        other.add(effect.session)
    assert shape(other.next_steps(0.0)) == [[(0, 0, 3, 1), (1, 0, 3, 1)]]


def test_a_step_that_nobody_answers_strands_its_answers() -> None:
    made, (draft,) = decoding(1)
    deadline = made.next_deadline()
    assert deadline == limits.STEP_TIMEOUT_S
    assert made.expire(deadline - 0.01) == []
    stranded, freed = made.expire(deadline)
    assert isinstance(stranded, Stranded)
    assert freed == Free((0,))
    assert made.under_way(draft.step) is None
    assert made.returned(draft.step, [7]) == []
    assert made.idle


def test_giving_up_a_route_strands_those_that_run_and_those_that_wait() -> None:
    made = rounds(pool_tokens=128)
    made.add(session(1))
    made.add(session(2))
    made.next_steps(0.0)
    effects = made.close("the plan changed")
    assert [effect.sequence for effect in effects if isinstance(effect, Stranded)] == [1, 2]
    assert (made.running, made.waiting) == (0, 0)


def test_an_answer_to_an_unknown_step_is_nothing() -> None:
    made, _ = decoding(1)
    assert made.returned(999, [7]) == []
    assert made.refused(999, RefusalReason.FAILED, "", (), 0.0) == []
