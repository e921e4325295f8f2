"""The tokens drawn follow the distribution asked for, the same for a seed, and never what was cut off."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.answer.question import SamplingParams
from meshinfer.answer.sampling import Sampler, greedy, largest, pick_rows
from meshinfer.errors import StepError

Logits = npt.NDArray[np.float32]
NAN, INF = np.float32(np.nan), np.float32(np.inf)


def logits_of(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def random_logits(seed: int, size: int, spread: float = 3.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def reference(logits: Logits, params: SamplingParams, history: list[int]) -> npt.NDArray[np.float64]:
    """The distribution by the book: f64, everything sorted, no shortcut."""
    scores = logits.astype(np.float64)
    for token in set(history):
        penalty = params.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    scores /= params.temperature
    order = np.argsort(-scores, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    probability = np.exp(scores[order] - scores.max())
    probability /= probability.sum()
    before = np.cumsum(probability) - probability
    keep = before < params.top_p if params.top_p < 1 else np.full(order.size, True)
    keep &= probability >= params.min_p * probability[0]
    keep[0] = True
    out = np.zeros(logits.size)
    out[order[keep]] = probability[keep] / probability[keep].sum()
    return out


# ── greedy ────────────────────────────────────────────────────────────────────────────────────────
def test_greedy_takes_the_likeliest_and_of_equal_ones_the_first() -> None:
    sampler = Sampler(SamplingParams(temperature=0), 1)
    assert sampler.pick(logits_of(0, 3, 1, 3), []) == 1
    assert greedy(np.stack([logits_of(0, 3, 1, 3), logits_of(7, 3, 7, 3)])).tolist() == [1, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2, top_p=0.5)]
)
@pytest.mark.parametrize("bad", [(1, NAN, 2), (1, INF, 2), (-INF, -INF, -INF)])
def test_logits_that_are_no_numbers_end_the_step(params: SamplingParams, bad: tuple[float, ...]) -> None:
    with pytest.raises(StepError, match="finite"):
        Sampler(params, 1).pick(logits_of(*bad), [0])
    with pytest.raises(StepError, match="finite"):
        greedy(np.stack([logits_of(1, 2, 3), logits_of(*bad)]))


def test_one_bad_row_fails_alone() -> None:
    rows = np.stack([logits_of(1, 5, 2), logits_of(1, NAN, 2), logits_of(9, 5, 2)])
    picked = pick_rows(rows, [Sampler(SamplingParams(temperature=0), 1)] * 3, [[0]] * 3)
    assert picked[0] == 1
    assert isinstance(picked[1], StepError)
    assert picked[2] == 0


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=1), SamplingParams(top_p=0), SamplingParams(min_p=1)]
)
def test_the_narrowest_cut_is_greedy(params: SamplingParams) -> None:
    logits = random_logits(3, 5000)
    assert all(Sampler(params, seed).pick(logits, []) == logits.argmax() for seed in range(20))


# ── which tokens stay ─────────────────────────────────────────────────────────────────────────────
@given(
    st.lists(st.sampled_from([-np.inf, -2.0, -1.0, -0.0, 0.0, 1.0, 1.5, 3.0]), min_size=1, max_size=700),
    st.data(),
)
def test_the_largest_are_those_that_sorting_would_give(values: list[float], data: st.DataObject) -> None:
    logits = logits_of(*values)
    count = data.draw(st.integers(1, len(values)))
    expected = np.argsort(-logits, kind="stable")[:count]
    assert largest(logits, count).tolist() == expected.tolist()


@pytest.mark.parametrize("size", [4096, 49_152, 49_157])
@pytest.mark.parametrize("count", [1, 7, 40, 191, 400, 4000])
def test_the_largest_of_a_real_vocabulary(size: int, count: int) -> None:
    logits = np.round(random_logits(count, size), 1)  # many equal ones
    assert largest(logits, count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2.0),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    top_k=st.integers(0, 12),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 0.9)),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
)


@settings(max_examples=150, deadline=None)
@given(PARAMS, st.lists(st.integers(-8, 8), min_size=1, max_size=10), st.integers(0, 2**64 - 1))
def test_only_tokens_that_stay_are_drawn_and_all_of_them_can_be(
    params: SamplingParams, values: list[int], seed: int
) -> None:
    logits = logits_of(*values) / np.float32(2)
    history = [0] * 3
    expected = reference(logits, params, history)
    sampler = Sampler(params, seed)
    drawn = {sampler.pick(logits, history * n) for n in range(1, 60)}
    rounding = 1e-5
    allowed = set(np.flatnonzero(expected > 0))
    if not near_an_edge(logits, params, history, rounding):
        assert drawn <= allowed
        assert set(np.flatnonzero(expected > 0.4)) <= drawn  # missed with probability 1e-13


def near_an_edge(logits: Logits, params: SamplingParams, history: list[int], slack: float) -> bool:
    """Whether rounding may decide on which side of a cut a token lies."""
    sets = set()
    for factor in (1 - slack, 1.0, 1 + slack):
        moved = SamplingParams(
            params.temperature, min(1.0, params.top_p * factor), params.top_k, min(1.0, params.min_p *
            factor), params.repetition_penalty,
        )  # fmt: skip
        sets.add(tuple(np.flatnonzero(reference(logits, moved, history))))
    return len(sets) > 1


def test_ties_at_the_edge_go_to_the_lowest_ids() -> None:
    even = np.zeros(1000, dtype=np.float32)
    for params, kept in ((SamplingParams(top_k=3), 3), (SamplingParams(top_p=0.0055), 6)):
        sampler = Sampler(params, 5)
        assert {sampler.pick(even, [0] * n) for n in range(300)} == set(range(kept))


# ── the distribution ──────────────────────────────────────────────────────────────────────────────
CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=0.3, temperature=1.5),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=9, top_p=0.9, min_p=0.05, temperature=1.2, repetition_penalty=1.4),
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("size", [12, 3000])
def test_draws_follow_the_distribution(params: SamplingParams, size: int) -> None:
    logits = random_logits(size, size, 2.0)
    history = [int(logits.argmax())] * 3
    expected = reference(logits, params, history)
    draws = 4000
    counts = np.zeros(size)
    for seed in range(draws):
        counts[Sampler(params, seed).pick(logits, history)] += 1
    assert counts[expected == 0].sum() == 0
    # Pearson's chi-squared over cells with an expectation of 5 or more, the rest as one; far tail at 6 sigma.
    cells = np.flatnonzero(expected * draws >= 5)
    rest = draws - counts[cells].sum(), draws * (1 - expected[cells].sum())
    statistic = ((counts[cells] - draws * expected[cells]) ** 2 / (draws * expected[cells])).sum()
    if rest[1] > 1:
        statistic += (rest[0] - rest[1]) ** 2 / rest[1]
    freedom = max(1, cells.size - 1)
    assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 10


def test_positions_of_one_answer_draw_independently() -> None:
    logits = np.zeros(2, dtype=np.float32)
    sampler = Sampler(SamplingParams(), 11)
    bits = np.array([sampler.pick(logits, [0] * n) for n in range(4000)])
    assert abs(bits.mean() - 0.5) < 0.04
    assert abs(np.corrcoef(bits[:-1], bits[1:])[0, 1]) < 0.08


# ── the same for a seed ───────────────────────────────────────────────────────────────────────────
def test_a_seed_gives_the_same_tokens_on_every_platform() -> None:
    """Pinned: a change would give people other answers for the seeds that they noted."""
    logits = np.zeros(1000, dtype=np.float32)
    sampler = Sampler(SamplingParams(seed=42), 7)
    assert [sampler.pick(logits, [0] * n) for n in range(8)] == [820, 206, 423, 293, 482, 769, 27, 450]


def test_a_repeated_step_draws_the_same_again() -> None:
    logits, history = random_logits(1, 500), [4, 9]
    sampler = Sampler(SamplingParams(top_p=0.95), 3)
    first = sampler.pick(logits, history)
    sampler.pick(logits, [*history, first])
    assert sampler.pick(logits, history) == first


def test_the_agents_seed_is_used_only_where_the_person_gave_none() -> None:
    logits = random_logits(1, 500)
    given_seed = {Sampler(SamplingParams(seed=5), agent).pick(logits, []) for agent in range(20)}
    drawn_seed = {Sampler(SamplingParams(), agent).pick(logits, []) for agent in range(20)}
    assert len(given_seed) == 1
    assert len(drawn_seed) > 5


# ── what changes nothing ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "off", [{"top_k": 3000}, {"top_k": 10**6}, {"min_p": 1e-300}, {"repetition_penalty": 1}]
)
def test_a_cut_that_cuts_nothing_changes_nothing(off: dict[str, float]) -> None:
    logits = random_logits(8, 3000)
    for seed in range(30):
        plain = Sampler(SamplingParams(), seed).pick(logits, [1, 2])
        assert Sampler(SamplingParams(**off), seed).pick(logits, [1, 2]) == plain  # type: ignore[arg-type]


def test_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(2, 3000)
    before = logits.copy()
    for params in CASES:
        Sampler(params, 1).pick(logits, [1, 2, 3])
    assert np.array_equal(before, logits)


def test_a_repetition_makes_a_token_less_likely_whatever_its_sign() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert Sampler(params, 1).pick(logits_of(3, 2, 0), [0]) == 1
    assert Sampler(params, 1).pick(logits_of(-1, -1.5, -9), [0, 0]) == 1
    history = np.array([0, 0], dtype=np.int64)
    assert Sampler(params, 1).pick(logits_of(3, 2, 0), history) == 1


# ── cost ──────────────────────────────────────────────────────────────────────────────────────────
def fastest_us(call: Callable[[], object], repeats: int = 60) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=40, top_p=0.9, min_p=0.05, temperature=0.8),
        SamplingParams(top_p=0.9, temperature=0.7),
        SamplingParams(top_p=0.95, temperature=2.0),
        SamplingParams(min_p=0.05),
    ],
    ids=str,
)
def test_no_cut_sorts_the_vocabulary(params: SamplingParams) -> None:
    """Measured against this machine's own exponential of all logits (0.27 ms where it was written; the whole
    pick took 0.2 to 0.5); a sort takes thirty of them. The fastest of many: a busy machine must fail nobody.
    """
    logits = random_logits(1, 128_256)
    positions = iter(range(1000))
    sampler = Sampler(params, 5)
    history = np.zeros(100, dtype=np.int64)
    unit = fastest_us(lambda: np.exp(logits))
    assert fastest_us(lambda: sampler.pick(logits, history[: next(positions)])) < 6 * unit


def test_greedy_costs_one_look_at_the_logits() -> None:
    logits = random_logits(1, 49_152)
    sampler = Sampler(SamplingParams(temperature=0), 5)
    assert fastest_us(lambda: sampler.pick(logits, [1])) < 3 * fastest_us(lambda: logits.argmax()) + 10
