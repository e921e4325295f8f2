"""If these fail, somebody's text stalls while others' flows, or two steps of one answer run in the wrong
order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.engine.batching import DECODE_ROWS, WaitingSteps

BATCH_ROWS = 100


@dataclass(frozen=True, eq=False)
class Step:
    asker: str
    sequences: Sequence[tuple[str, int]]
    rows: int
    number: int = 0


def step(asker: str, *sequences: int, rows: int = 0, number: int = 0) -> Step:
    return Step(asker, [(asker, sequence) for sequence in sequences], rows or len(sequences), number)


def waiting(*steps: Step) -> WaitingSteps[Step]:
    line: WaitingSteps[Step] = WaitingSteps(BATCH_ROWS)
    for each in steps:
        line.add(each)
    return line


def is_decode(each: Step) -> bool:
    return each.rows <= DECODE_ROWS * len(each.sequences)


def test_all_that_fits_goes_together() -> None:
    steps = [step("a", 1), step("b", 1, 2), step("a", 3, rows=60)]
    line = waiting(*steps)
    assert set(line.take()) == set(steps)
    assert not len(line)
    assert line.take() == []


def test_decode_goes_before_prefill_that_came_first() -> None:
    prompts = [step("a", n, rows=80) for n in range(3)]
    token = step("b", 1)
    assert waiting(*prompts, token).take() == [token, prompts[0]]


def test_prefill_goes_along_however_much_decode_there_is() -> None:
    prompt = step("a", 1, rows=80)
    line = waiting(prompt, *(step("b", n) for n in range(500)))
    batch = line.take()
    assert prompt in batch
    assert len(batch) == BATCH_ROWS + 1


def test_a_step_larger_than_a_batch_runs() -> None:
    large = step("a", 1, rows=BATCH_ROWS * 5)
    assert waiting(large).take() == [large]
    assert waiting(large, step("b", 1)).take()[-1] is large


def test_a_token_waits_for_its_own_prompt() -> None:
    prompts = [step("a", n, rows=80) for n in range(2)]
    token = step("a", 1)
    line = waiting(*prompts, token)
    assert line.take() == [prompts[0]]
    assert line.take() == [prompts[1]]
    assert line.take() == [token]


def test_an_asker_with_many_prompts_does_not_hold_up_another() -> None:
    greedy = [step("a", n, rows=80) for n in range(20)]
    modest = step("b", 1, rows=80)
    line = waiting(*greedy, modest)
    assert modest in line.take() + line.take()


def test_an_asker_with_many_tokens_does_not_hold_up_another() -> None:
    greedy = [step("a", n) for n in range(400)]
    modest = [step("b", n) for n in range(30)]
    batch = waiting(*greedy, *modest).take()
    assert all(each in batch for each in modest)


def test_what_waits_is_known() -> None:
    line = waiting(step("a", 1), step("a", 1), step("a", 2))
    assert line.waits_for(("a", 1))
    line.take()
    assert line.waits_for(("a", 1))
    assert not line.waits_for(("a", 2))
    line.take()
    assert not line.waits_for(("a", 1))


steps = st.lists(
    st.builds(
        lambda asker, sequences, rows: step(asker, *sequences, rows=max(rows, len(sequences))),
        st.sampled_from("abc"),
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        st.integers(1, 150),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(before=steps, later=steps)
def test_laws_of_batches(before: list[Step], later: list[Step]) -> None:
    """Whatever waits, and whatever comes meanwhile."""
    line = waiting(*before)
    arrived, done = list(before), []
    batches = 0
    while len(line):
        batch = line.take()
        assert batch, "something waits and nothing runs"
        named = [sequence for each in batch for sequence in each.sequences]
        assert len(named) == len(set(named)), "a sequence is twice in a batch"
        decode = [each for each in batch if is_decode(each)]
        prefill = [each for each in batch if not is_decode(each)]
        assert len(decode) <= 1 or sum(each.rows for each in decode) <= BATCH_ROWS
        assert len(prefill) <= 1 or sum(each.rows for each in batch) <= BATCH_ROWS
        done += batch
        batches += 1
        if batches == 1:
            for each in later:
                line.add(each)
            arrived += later
    assert sorted(map(id, done)) == sorted(map(id, arrived)), "a step was lost or doubled"
    for sequence in {name for each in arrived for name in each.sequences}:
        assert [each for each in done if sequence in each.sequences] == [
            each for each in arrived if sequence in each.sequences
        ], "a sequence's steps changed their order"
