"""If these fail, answers are wrong, one sequence disturbs another, or a span takes memory that it does not
need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_models import ZOO, ends, graph, original_logits, rows, run, shard

from meshinfer.engine.device import choose, compile_properties, devices
from meshinfer.engine.memory import span_cost_bytes
from meshinfer.engine.rows import RowsModel
from meshinfer.engine.shard import PagedShard
from meshinfer.engine.step import BadStep, Chunk, MissingKv, PoolFull, Rows
from meshinfer.errors import CapacityError, ConfigError, ModelError, StepError
from meshinfer.limits import LEASE_S, MIB
from meshinfer.values import Precision, Span

CLOSE = 1e-4
"""f32 sums in another order: results of another batch shape differ by a few millionths of their size."""


def near(one: Rows, other: Rows) -> bool:
    return one.shape == other.shape and float(np.abs(one - other).max()) < CLOSE


@pytest.fixture(scope="module")
def whole() -> PagedShard:
    """All six layers of the small llama. Tests use sequences of their own names and free them."""
    return shard(pool_tokens=16_384)


@pytest.fixture(autouse=True)
def _nothing_left(whole: PagedShard) -> object:
    yield
    for sequence in whole.sequences:
        whole.free(sequence)
    assert whole.blocks_free == whole.blocks_total


# ── what it computes ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_embedding_spans_and_head_are_the_model(name: str) -> None:
    tokens = np.random.default_rng(5).integers(0, 512, 40)
    expected = original_logits(name, tokens.tolist())
    embedding, head = ends(name)
    spans = [shard(name, 0, 2), shard(name, 2, 3), shard(name, 3, 6)]
    got = []
    for first, last in ((0, 17), (17, 36), (36, 37), (37, 38), (38, 39), (39, 40)):
        state = embedding.embed(tokens[first:last], np.arange(first, last))
        for span in spans:
            state = run(span, "s", state, first)
        got.append(head.logits(state).copy())
    assert np.abs(np.concatenate(got) - expected).max() < 1e-3
    assert (np.concatenate(got).argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("precision", list(Precision))
def test_a_batch_of_all_kinds_gives_each_its_own_answer(precision: Precision) -> None:
    """Decode, a middle piece of a prompt, a whole prompt and guesses to verify, in one inference."""
    one, other = shard(precision=precision), shard(precision=precision)
    data = {
        name: rows(count, seed)
        for seed, (name, count) in enumerate((("a", 70), ("b", 150), ("c", 33), ("d", 48)))
    }
    for each in (one, other):
        run(each, "a", data["a"][:69])
        run(each, "b", data["b"][:64])
        run(each, "d", data["d"][:40])
    chunks = [
        Chunk("a", 69, data["a"][69:], 1),
        Chunk("b", 64, data["b"][64:], 0),
        Chunk("c", 0, data["c"], 1),
        Chunk("d", 40, data["d"][40:], 8),
    ]
    together = one.step(chunks, 0.0)
    alone = [other.step([chunk], 0.0)[0] for chunk in chunks]
    assert [result.shape for result in together] == [(1, 64), (0, 64), (1, 64), (8, 64)]
    tolerance = CLOSE if precision is Precision.EXACT else 0.05
    for got, expected in zip(together, alone, strict=True):
        assert got.dtype == np.float32
        assert not got.size or np.abs(got - expected).max() < tolerance
    assert one.position("b") == 150


def test_many_sequences_at_once(whole: PagedShard) -> None:
    """More than any buffer was first made for."""
    data = [rows(1 + n % 3, n) for n in range(300)]
    few = [run(whole, "alone", each)[-1:] for each in data]
    whole.free("alone")
    many = whole.step([Chunk(n, 0, each, 1) for n, each in enumerate(data)], 0.0)
    assert all(near(one, other) for one, other in zip(few, many, strict=True))


def test_results_stay_when_the_next_step_comes(whole: PagedShard) -> None:
    result = run(whole, 1, rows(5))
    kept = result.copy()
    run(whole, 2, rows(5, seed=9))
    assert np.array_equal(result, kept)


def test_a_long_prompt_crosses_many_blocks() -> None:
    one = shard(pool_tokens=4096)
    data = rows(1500)
    at_once = run(one, 1, data, want=4)
    for begin in range(0, 1500, 500):
        piecewise = run(one, 2, data[begin : begin + 500], begin, want=4)
    assert near(at_once, piecewise)


# ── D4: steps are idempotent ────────────────────────────────────────────────────────────────────────────────


def test_a_repeated_step_changes_nothing(whole: PagedShard) -> None:
    data = rows(40)
    run(whole, 1, data[:38])
    first = run(whole, 1, data[38:39], 38)
    assert near(run(whole, 1, data[38:39], 38), first)
    after = run(whole, 1, data[39:], 39)
    assert near(after, run(whole, 2, data)[-1:])


def test_a_rollback_forgets_what_lay_beyond(whole: PagedShard) -> None:
    data, other = rows(80), rows(80, seed=3)
    run(whole, 1, np.concatenate([data[:35], other[35:]]))
    run(whole, 1, data[35:79], 35)
    assert whole.position(1) == 79
    assert near(run(whole, 1, data[79:], 79), run(whole, 2, data)[-1:])
    run(whole, 1, data[:1], 0)
    assert whole.position(1) == 1
    assert whole.blocks_total - whole.blocks_free == 1 + 3


def test_missing_kv_is_refused_with_what_is_there(whole: PagedShard) -> None:
    run(whole, 1, rows(10))
    chunks = [Chunk(1, 10, rows(1), 1), Chunk(2, 7, rows(1), 1)]
    with pytest.raises(MissingKv) as refused:
        whole.step(chunks, 0.0)
    assert refused.value.held == (10, 0)
    assert whole.position(1) == 10
    assert whole.sequences == (1,)


def test_leases_run_out(whole: PagedShard) -> None:
    whole.step([Chunk(1, 0, rows(3), 0)], 0.0)
    whole.step([Chunk(2, 0, rows(3), 0)], 0.0)
    whole.step([Chunk(2, 3, rows(1), 0)], LEASE_S / 2)
    assert whole.expire(LEASE_S - 0.1) == []
    assert whole.expire(LEASE_S) == [1]
    assert whole.position(2) == 4


# ── one fails alone ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_pool_refuses_and_harms_nobody() -> None:
    small = shard(pool_tokens=96)
    data = rows(90)
    run(small, 1, data[:60])
    with pytest.raises(PoolFull) as full:
        run(small, 2, rows(50))
    assert (full.value.needed_blocks, full.value.free_blocks) == (2, 1)
    result = run(small, 1, data[60:], 60)
    small.free(1)
    assert near(run(small, 2, data)[60:], result)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1, 0, rows(2, hidden=63), 1),
        Chunk(1, 0, rows(2).astype(np.float64), 1),
        Chunk(1, 0, rows(2)[0], 1),
        Chunk(1, 0, rows(0), 0),
        Chunk(1, 0, rows(2), 3),
        Chunk(1, 0, rows(2), -1),
        Chunk(1, -1, rows(2), 1),
        Chunk(1, 2047, rows(2), 1),
        Chunk(1, 2**62, rows(2), 1),
    ],
    ids=["width", "type", "rank", "empty", "too many wanted", "few wanted", "before", "beyond", "far beyond"],
)
def test_nonsense_is_refused_before_the_device(whole: PagedShard, chunk: Chunk) -> None:
    with pytest.raises(BadStep):
        whole.step([chunk], 0.0)
    assert whole.sequences == ()


def test_a_sequence_named_twice_is_refused(whole: PagedShard) -> None:
    with pytest.raises(BadStep):
        whole.step([Chunk(1, 0, rows(1), 1), Chunk(1, 0, rows(1), 1)], 0.0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_fail_alone(whole: PagedShard, poison: float) -> None:
    bad = rows(3)
    bad[1, 5] = poison
    chunks = [Chunk(1, 0, rows(4), 1), Chunk(2, 0, bad, 1), Chunk(3, 0, rows(6, 1), 1)]
    whole.reserve(chunks, 0.0)
    first, second, third = whole.run(chunks)
    assert isinstance(second, BadStep)
    assert not isinstance(first, StepError)
    assert not isinstance(third, StepError)
    assert near(first, run(whole, "x", rows(4))[-1:])
    assert near(third, run(whole, "y", rows(6, 1))[-1:])
    assert whole.position(2) == 0


def test_a_sequence_that_overflows_does_not_poison_memory_for_the_next() -> None:
    """Finite rows whose squares are not: NaN gets into KV, and must not meet who is given those blocks."""
    one = shard("gpt2", pool_tokens=64)
    expected = run(one, 1, rows(3))
    one.free(1)
    huge = np.full((60, 64), 3e38, np.float32)
    chunks = [Chunk(2, 0, huge, 1)]
    one.reserve(chunks, 0.0)
    (outcome,) = one.run(chunks)
    assert isinstance(outcome, StepError)
    assert one.sequences == ()
    assert np.array_equal(run(one, 3, rows(3)), expected)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_takes_memory_only_as_far_as_it_is_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    large = shard(pool_tokens=400_000)
    large.warm()
    assert large.kv_bytes > 500 * MIB
    assert process.memory_info().rss - before < 100 * MIB
    large.close()


MEASURE = """
import gc, json, sys
import psutil
from engine_models import shard, rows, run, graph
small = shard("gpt2", 0, 1); small.warm()

gc.collect()
process = psutil.Process()
before = process.memory_info().rss
on = shard("llama", 0, 6)
on.warm()
run(on, 1, rows(512))
run(on, 2, rows(512))
taken = process.memory_info().rss - before
on.close(); del on; gc.collect()
print(json.dumps({"taken": taken, "kv": 6 * 2 * 32 * 4 * 1024}))
"""


def test_a_loaded_span_takes_no_more_than_was_promised() -> None:
    output = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        check=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout
    measured = json.loads(output.splitlines()[-1])
    layer = (graph("llama").hidden ** 2) * 4 * 12
    assert measured["taken"] <= span_cost_bytes([layer] * 6, 64, measured["kv"])


# ── devices and models ──────────────────────────────────────────────────────────────────────────────────────


def test_the_cpu_is_there_and_chosen() -> None:
    assert choose("auto").name == choose("cpu").name == devices()[0].name == "CPU"
    assert devices()[0].memory_bytes > 0


@pytest.mark.parametrize(
    ("setting", "words"), [("NPU", "not supported yet"), ("GPU.7", "no such device"), ("x", "CPU")]
)
def test_a_device_that_cannot_be_used_is_named(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(setting)


def test_exact_asks_for_all_three() -> None:
    """With any one missing, the same question gets another text when it shares a batch."""
    asked = compile_properties("CPU", Precision.EXACT)
    assert asked["INFERENCE_PRECISION_HINT"] == asked["KV_CACHE_PRECISION"] == "f32"
    assert asked["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == 0


def test_a_model_that_is_no_span_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden"):
        PagedShard(graph("llama").embedding(), "CPU", Precision.EXACT, 64)
    with pytest.raises(ModelError, match="unknown input"):
        RowsModel(graph("llama").whole(), "CPU", Precision.EXACT)
    with pytest.raises(CapacityError):
        PagedShard(graph("llama").span(Span(0, 1)), "GPU.9", Precision.EXACT, 64)


def test_broken_rows_never_reach_the_head() -> None:
    _, head = ends("llama")
    with pytest.raises(BadStep):
        head.logits(np.full((1, 64), np.nan, np.float32))
    assert head.logits(rows(3)).shape == (3, 512)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal stacks")
def test_a_signal_after_models_came_and_went_does_not_kill_the_process() -> None:
    """OpenVINO's CPU plugin gives threads a signal stack that may be gone later: Ctrl-C must not end in a crash."""
    program = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from meshinfer.engine.device import core as engine_core\n"
        "from meshinfer.model.reading import core as model_core\n"
        f"xml = Path({str(ZOO / 'llama' / 'openvino_model.xml')!r})\n"
        "for core in (engine_core, model_core, engine_core):\n"
        "    compiled = core().compile_model(core().read_model(xml), 'CPU')\n"
        "    del compiled\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('heard'))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr
