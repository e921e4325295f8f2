"""If these fail, a step is lost, one person's failure ends others' answers, or an agent does not stop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engine_models import rows, run, shard

from meshinfer.engine.runner import Outcome, Runner, Work
from meshinfer.engine.shard import PagedShard
from meshinfer.engine.step import BadStep, Chunk, MissingKv, Overloaded, PoolFull, Rows, StepTiming
from meshinfer.errors import StepError
from meshinfer.limits import LEASE_S

WAIT_S = 20.0


class Answers:
    """Collects what a runner calls back with, in order."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[str, Outcome, StepTiming]] = queue.SimpleQueue()
        self.order: list[str] = []
        self.of: dict[str, tuple[Outcome, StepTiming]] = {}

    def work(self, name: str, *chunks: Chunk, asker: str = "a") -> Work:
        return Work(asker, chunks, lambda outcome, timing: self._arrived.put((name, outcome, timing)))

    def wait(self, count: int) -> None:
        for _ in range(count):
            name, outcome, timing = self._arrived.get(timeout=WAIT_S)
            self.order.append(name)
            self.of[name] = outcome, timing

    def rows(self, name: str) -> Rows:
        outcome = self.of[name][0]
        assert isinstance(outcome, list)
        return np.concatenate(outcome)

    def error(self, name: str) -> StepError:
        outcome = self.of[name][0]
        assert isinstance(outcome, StepError)
        return outcome


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fragile:
    """A real shard that breaks down whenever a sequence named "culprit" is in the batch, as a device may."""

    def __init__(self, real: PagedShard) -> None:
        self.real = real
        self.reserve, self.free, self.expire = real.reserve, real.free, real.expire

    def run(self, chunks: Sequence[Chunk]) -> list[Rows | StepError]:
        if any(chunk.sequence == "culprit" for chunk in chunks):
            self.real._pool.abandon(chunks)
            raise RuntimeError("the device has had enough")
        return self.real.run(chunks)


@pytest.fixture
def span() -> PagedShard:
    return shard(pool_tokens=1024)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runner(span: PagedShard, clock: Clock) -> Iterator[Runner]:
    before = threading.active_count()
    made = Runner("test", clock=clock)
    made.add(span)
    yield made
    made.close()
    assert threading.active_count() == before, "a thread was left behind"


class Held:
    """Keeps the runner's thread busy, so that what is submitted meanwhile waits together."""

    def __init__(self, runner: Runner) -> None:
        self._go = threading.Event()
        entered = threading.Event()

        def wait() -> None:
            entered.set()
            assert self._go.wait(WAIT_S)

        runner.call(wait, lambda _: None)
        assert entered.wait(WAIT_S)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._go.set()


def test_what_waits_runs_in_one_batch(span: PagedShard, runner: Runner) -> None:
    expected = [run(span, n, rows(4, n), want=1) for n in range(5)]
    for n in range(5):
        span.free(n)
    answers = Answers()
    with Held(runner):
        for n in range(5):
            runner.submit(span, answers.work(str(n), Chunk(n, 0, rows(4, n), 1), asker=f"asker {n}"))
    answers.wait(5)
    for n in range(5):
        assert np.abs(answers.rows(str(n)) - expected[n]).max() < 1e-4
        timing = answers.of[str(n)][1]
        assert timing.batch_tokens == 20
        assert timing.compute_us > 0
        assert timing.queue_us >= 0


def test_steps_of_a_sequence_keep_their_order(span: PagedShard, runner: Runner) -> None:
    data = rows(40)
    expected = run(span, "other", data)
    answers = Answers()
    with Held(runner):
        runner.submit(span, answers.work("prompt", Chunk(1, 0, data[:30], 0)))
        for n in range(30, 40):
            runner.submit(span, answers.work(str(n), Chunk(1, n, data[n : n + 1], 1)))
    answers.wait(11)
    assert answers.order == ["prompt", *map(str, range(30, 40))]
    assert answers.rows("prompt").shape == (0, 64)
    got = np.concatenate([answers.rows(str(n)) for n in range(30, 40)])
    assert np.abs(got - expected[30:]).max() < 1e-4


def test_whoever_cannot_run_fails_alone(span: PagedShard, runner: Runner) -> None:
    nan = rows(2)
    nan[0, 0] = np.nan
    answers = Answers()
    with Held(runner):
        runner.submit(span, answers.work("good", Chunk(1, 0, rows(3), 1), asker="a"))
        runner.submit(span, answers.work("missing", Chunk(2, 9, rows(1), 1), asker="b"))
        runner.submit(span, answers.work("width", Chunk(3, 0, rows(1, hidden=8), 1), asker="c"))
        runner.submit(span, answers.work("nan", Chunk(4, 0, nan, 1), Chunk(5, 0, rows(2), 1), asker="d"))
        runner.submit(span, answers.work("full", Chunk(6, 0, rows(1025), 1), asker="e"))
        runner.submit(
            span, answers.work("twice", Chunk(7, 0, rows(1), 1), Chunk(7, 0, rows(1), 1), asker="f")
        )
        runner.submit(span, answers.work("also good", Chunk(8, 0, rows(3), 1), asker="g"))
    answers.wait(7)
    assert np.abs(answers.rows("good") - answers.rows("also good")).max() < 1e-4
    kinds = {name: type(answers.error(name)) for name in ("missing", "width", "nan", "full", "twice")}
    assert kinds == {
        "missing": MissingKv,
        "width": BadStep,
        "nan": BadStep,
        "full": PoolFull,
        "twice": BadStep,
    }


def test_whoever_breaks_the_device_fails_alone(span: PagedShard, runner: Runner) -> None:
    fragile = Fragile(span)
    runner.add(fragile)
    answers = Answers()
    run(span, "b", rows(3))
    with Held(runner):
        runner.submit(fragile, answers.work("a", Chunk("a", 0, rows(3), 1), asker="a"))
        runner.submit(fragile, answers.work("bad", Chunk("culprit", 0, rows(3), 1), asker="b"))
        runner.submit(fragile, answers.work("b", Chunk("b", 3, rows(1), 1), asker="c"))
    answers.wait(3)
    assert "RuntimeError" in str(answers.error("bad"))
    assert answers.rows("a").shape == answers.rows("b").shape == (1, 64)
    assert (span.position("a"), span.position("b"), span.position("culprit")) == (3, 4, 0)


def test_a_callback_that_raises_harms_nobody(
    span: PagedShard, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(outcome: Outcome, timing: StepTiming) -> None:
        raise ValueError("a defect elsewhere")

    answers = Answers()
    runner.submit(span, Work("a", [Chunk(1, 0, rows(1), 1)], fail))
    runner.submit(span, answers.work("next", Chunk(2, 0, rows(1), 1)))
    answers.wait(1)
    assert answers.rows("next").shape == (1, 64)
    assert "a callback in the device's thread failed" in caplog.text


def test_too_many_waiting_steps_are_refused_at_once(span: PagedShard) -> None:
    runner = Runner("small", most_waiting=3)
    runner.add(span)
    answers = Answers()
    with Held(runner):
        for n in range(3):
            runner.submit(span, answers.work(str(n), Chunk(n, 0, rows(1), 1)))
        with pytest.raises(Overloaded):
            runner.submit(span, answers.work("3", Chunk(3, 0, rows(1), 1)))
    answers.wait(3)
    runner.submit(span, answers.work("later", Chunk(4, 0, rows(1), 1)))
    answers.wait(1)
    runner.close()


def test_shards_take_turns(span: PagedShard, runner: Runner) -> None:
    other = shard(first=0, last=1, pool_tokens=512)
    runner.add(other)
    answers = Answers()
    with Held(runner):
        for n in range(3):
            runner.submit(span, answers.work(f"one {n}", Chunk(1, n, rows(1), 1)))
        for n in range(3):
            runner.submit(other, answers.work(f"other {n}", Chunk(1, n, rows(1), 1)))
    answers.wait(6)
    assert answers.order == ["one 0", "other 0", "one 1", "other 1", "one 2", "other 2"]


def test_kv_is_freed_after_the_steps_that_wait(span: PagedShard, runner: Runner) -> None:
    """Cancelled: else a step that was already queued takes the memory again, until its lease runs out."""
    answers = Answers()
    run(span, 9, rows(5))
    with Held(runner):
        runner.submit(span, answers.work("0", Chunk(1, 0, rows(40), 0)))
        runner.submit(span, answers.work("1", Chunk(1, 40, rows(1), 1)))
        runner.free(span, [1, 9, "unknown"])
    answers.wait(2)
    called = threading.Event()
    runner.call(lambda: span.sequences, lambda left: called.set() if left == () else None)
    assert called.wait(WAIT_S)
    assert answers.rows("1").shape == (1, 64)
    assert span.blocks_free == span.blocks_total


def test_leases_run_out_by_the_clock(span: PagedShard, runner: Runner, clock: Clock) -> None:
    answers = Answers()
    runner.submit(span, answers.work("x", Chunk(1, 0, rows(3), 1)))
    answers.wait(1)
    clock.now = LEASE_S
    runner.expire()
    result: queue.SimpleQueue[object] = queue.SimpleQueue()
    runner.call(lambda: span.sequences, result.put)
    assert result.get(timeout=WAIT_S) == ()


def test_calls_run_in_the_thread_and_report_what_they_raise(runner: Runner) -> None:
    result: queue.SimpleQueue[object] = queue.SimpleQueue()
    runner.call(threading.current_thread, result.put)
    assert result.get(timeout=WAIT_S).name == "meshinfer-test"  # type: ignore[attr-defined]
    runner.call(lambda: 1 // 0, result.put)
    assert isinstance(result.get(timeout=WAIT_S), ZeroDivisionError)


def test_a_shard_is_compiled_elsewhere_while_steps_run(span: PagedShard, runner: Runner) -> None:
    """A new plan's span is loaded while the old one serves: its steps must not wait for the compilation."""
    loaded: list[PagedShard] = []
    loading = threading.Thread(target=lambda: loaded.append(shard("gpt2")))
    loading.start()
    answers = Answers()
    steps = 0
    while loading.is_alive():
        runner.submit(span, answers.work("x", Chunk(1, 0, rows(1), 1)))
        answers.wait(1)
        steps += 1
    loading.join()
    assert steps > 3
    runner.add(loaded[0])
    runner.submit(loaded[0], answers.work("new", Chunk(1, 0, rows(2), 1)))
    answers.wait(1)
    assert answers.rows("new").shape == (1, 64)


def test_a_dropped_shard_fails_its_steps_and_takes_no_more(span: PagedShard, runner: Runner) -> None:
    answers = Answers()
    closed = threading.Event()
    with Held(runner):
        runner.submit(span, answers.work("waiting", Chunk(1, 0, rows(1), 1)))
        runner.drop(span, closed.set)
        with pytest.raises(StepError):
            runner.submit(span, answers.work("late", Chunk(1, 0, rows(1), 1)))
    answers.wait(1)
    assert closed.wait(WAIT_S)
    assert "not loaded" in str(answers.error("waiting"))


def test_closing_answers_everybody_and_ends_the_thread(span: PagedShard) -> None:
    before = threading.active_count()
    runner = Runner("short")
    runner.add(span)
    answers = Answers()
    held = Held(runner)
    for n in range(4):
        runner.submit(span, answers.work(str(n), Chunk(n, 0, rows(1), 1)))
    closing = threading.Thread(target=runner.close)
    closing.start()
    held.__exit__()
    closing.join(WAIT_S)
    answers.wait(4)
    assert threading.active_count() == before
    with pytest.raises(StepError):
        runner.submit(span, answers.work("late", Chunk(9, 0, rows(1), 1)))
    with pytest.raises(StepError):
        runner.call(lambda: None, lambda _: None)
    runner.free(span, [1])
    runner.expire()
