"""One thread for one device: it batches the steps that wait there, and runs what must not overlap them.

All state of the shards is touched in this thread only. What others ask of it travels as a call through one
queue: `SimpleQueue` wakes the thread in 16 µs here, a condition variable or `queue.Queue` in 30.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Protocol, TypeAlias, TypeVar

from meshinfer.engine.batching import BATCH_ROWS, WaitingSteps
from meshinfer.engine.step import Chunk, Overloaded, Rows, StepTiming
from meshinfer.errors import StepError
from meshinfer.limits import WAITING_STEPS

T = TypeVar("T")
Outcome: TypeAlias = "list[Rows] | StepError"
"""f32 `[want, hidden]` for each chunk of a step, memory of its own; or why there is none."""
Done: TypeAlias = Callable[[Outcome, StepTiming], None]

logger = logging.getLogger(__name__)


class Shard(Protocol):
    """What a runner needs of a `PagedShard`."""

    def reserve(self, chunks: Sequence[Chunk], now: float) -> None: ...
    def run(self, chunks: Sequence[Chunk]) -> list[Rows | StepError]: ...
    def free(self, sequence: Hashable) -> bool: ...
    def expire(self, now: float) -> list[Hashable]: ...


class Work:
    """One asker's step through one shard: its chunks run in one batch, and fail together."""

    __slots__ = ("asker", "chunks", "done", "rows", "sequences", "submitted_ns")

    def __init__(self, asker: Hashable, chunks: Sequence[Chunk], done: Done) -> None:
        self.asker = asker
        self.chunks = chunks
        self.done = done
        self.sequences = [chunk.sequence for chunk in chunks]
        self.rows = sum([len(chunk.rows) for chunk in chunks])
        self.submitted_ns = 0


class _Line:
    """What waits for one shard. `admitted` belongs to the runner's lock, the rest to its thread."""

    __slots__ = ("admitted", "free_later", "shard", "waiting")

    def __init__(self, shard: Shard, batch_rows: int) -> None:
        self.shard = shard
        self.waiting: WaitingSteps[Work] = WaitingSteps(batch_rows)
        self.free_later: set[Hashable] = set()
        self.admitted = 0  # steps submitted and not begun, those on their way to the thread included


class Runner:
    """The thread of one device. Any thread may call its methods; what they start happens in the runner's.

    A batch is whatever waits for one shard when the device gets free, by the rules of `batching`; shards take
    turns. A step that cannot run fails alone, and so does one that brings the inference down.
    """

    def __init__(
        self,
        name: str,
        *,
        batch_rows: int = BATCH_ROWS,
        most_waiting: int = WAITING_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch_rows = batch_rows
        self._most_waiting = most_waiting
        self._clock = clock
        self._lock = threading.Lock()  # whoever puts into the inbox holds it, so that nothing follows `_stop`
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lines: dict[Shard, _Line] = {}
        self._closed = False
        self._ready: dict[_Line, None] = {}  # lines with waiting steps, the next one first; the thread's own
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name=f"meshinfer-{name}", daemon=True)
        self._thread.start()

    def add(self, shard: Shard) -> None:
        """Take `shard` over: from now on it is used in the runner's thread only."""
        with self._lock:
            self._lines[shard] = _Line(shard, self._batch_rows)

    def drop(self, shard: Shard, done: Callable[[], None] | None = None) -> None:
        """Give `shard` up: its waiting steps fail; then `done` is called in the thread, to close it."""
        with self._lock:
            line = self._lines.pop(shard, None)
            if line is not None and not self._closed:
                self._inbox.put(functools.partial(self._drop, line, done))

    def submit(self, shard: Shard, work: Work) -> None:
        """Queue a step; `work.done` will be called once.

        Raises `Overloaded` where too many wait, `StepError` for a shard that is not here; then it will not be
        called.
        """
        work.submitted_ns = time.perf_counter_ns()
        with self._lock:
            line = self._lines.get(shard)
            if line is None or self._closed:
                raise StepError("the span is not loaded here any more")
            if line.admitted >= self._most_waiting:
                raise Overloaded(f"{line.admitted} steps wait for this span already")
            line.admitted += 1
            self._inbox.put(functools.partial(self._enqueue, line, work))

    def call(self, run: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run `run` before the next batch and give `done` its result, or the exception, both in the thread.

        It should be short, since nothing else runs meanwhile. Raises `StepError` when the runner is closed.
        """
        with self._lock:
            if self._closed:
                raise StepError("the device's thread has ended")
            self._inbox.put(functools.partial(_perform, run, done))

    def free(self, shard: Shard, sequences: Sequence[Hashable]) -> None:
        """Free the KV of `sequences`, each after its steps that wait already."""
        with self._lock:
            if not self._closed and (line := self._lines.get(shard)):
                self._inbox.put(functools.partial(self._free, line, sequences))

    def expire(self) -> None:
        """Free, on every shard, what nobody stepped for the time of a lease."""
        with self._lock:
            if not self._closed:
                for line in self._lines.values():
                    self._inbox.put(functools.partial(self._expire, line))

    def close(self) -> None:
        """Finish the batch under way, fail what waits, and join the thread; not to be called from it."""
        with self._lock:
            self._closed = True
            self._inbox.put(self._stop)
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopping:
            self._take_in()
            if self._ready and not self._stopping:
                line = next(iter(self._ready))
                del self._ready[line]
                _guarded(functools.partial(self._run_batch, line))
        for line in list(self._lines.values()):
            self._drop(line, None)

    def _take_in(self) -> None:
        """Do what was asked so far; wait for something where there is nothing to run."""
        if not self._ready:
            _guarded(self._inbox.get())
        for _ in range(self._inbox.qsize()):
            _guarded(self._inbox.get())

    def _enqueue(self, line: _Line, work: Work) -> None:
        line.waiting.add(work)
        self._ready.setdefault(line)

    def _free(self, line: _Line, sequences: Sequence[Hashable]) -> None:
        for sequence in sequences:
            if line.waiting.waits_for(sequence):
                line.free_later.add(sequence)
            else:
                line.shard.free(sequence)

    def _expire(self, line: _Line) -> None:
        if late := line.shard.expire(self._clock()):
            logger.info("freed %d sequences that were left behind", len(late))

    def _drop(self, line: _Line, done: Callable[[], None] | None) -> None:
        self._ready.pop(line, None)
        error = StepError("the span is not loaded here any more")
        for work in line.waiting.clear():
            _finish(work, error, StepTiming(_microseconds(work.submitted_ns, time.perf_counter_ns()), 0, 0))
        if done is not None:
            done()

    def _stop(self) -> None:
        self._stopping = True

    def _run_batch(self, line: _Line) -> None:
        batch = line.waiting.take()
        with self._lock:
            line.admitted -= len(batch)
        if len(line.waiting):
            self._ready[line] = None  # behind the other shards
        begun_ns = time.perf_counter_ns()
        outcomes = _compute(line.shard, batch, self._clock())
        compute_us = _microseconds(begun_ns, time.perf_counter_ns())
        rows = sum([work.rows for work in batch])
        for work, outcome in outcomes:
            _finish(work, outcome, StepTiming(_microseconds(work.submitted_ns, begun_ns), compute_us, rows))
        if line.free_later:
            self._free_finished(line, batch)

    def _free_finished(self, line: _Line, batch: Sequence[Work]) -> None:
        ended = line.free_later.intersection(sequence for work in batch for sequence in work.sequences)
        line.free_later -= ended
        self._free(line, list(ended))


def _compute(shard: Shard, batch: Sequence[Work], now: float) -> list[tuple[Work, Outcome]]:
    """Run `batch` in one inference; who cannot take part is refused, who breaks it is found by running each
    alone."""
    outcomes: list[tuple[Work, Outcome]] = []
    taken: list[Work] = []
    for work in batch:
        try:
            shard.reserve(work.chunks, now)
        except Exception as error:
            outcomes.append((work, _step_error(error)))
        else:
            taken.append(work)
    if not taken:
        return outcomes
    try:
        results = shard.run([chunk for work in taken for chunk in work.chunks])
    except Exception as error:
        if len(taken) == 1:
            outcomes.append((taken[0], _step_error(error)))
        else:
            logger.warning("a batch of %d steps failed (%s); each runs alone", len(taken), error)
            for work in taken:
                outcomes += _compute(shard, [work], now)
        return outcomes
    end = 0
    for work in taken:
        begin, end = end, end + len(work.chunks)
        outcomes.append((work, _together(results[begin:end])))
    return outcomes


def _together(results: Sequence[Rows | StepError]) -> Outcome:
    """The results of one step's chunks, or the first error among them."""
    rows: list[Rows] = []
    for result in results:
        if isinstance(result, StepError):
            return result
        rows.append(result)
    return rows


def _step_error(error: Exception) -> StepError:
    if isinstance(error, StepError):
        return error
    logger.error("a step failed", exc_info=error)
    return StepError(f"the span could not compute the step: {type(error).__name__}")


def _perform(run: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
    try:
        result: T | Exception = run()
    except Exception as error:
        result = error
    done(result)


def _finish(work: Work, outcome: Outcome, timing: StepTiming) -> None:
    _guarded(functools.partial(work.done, outcome, timing))


def _guarded(action: Callable[[], None]) -> None:
    """Run what others asked for; a defect in it must not end the thread that serves everybody."""
    try:
        action()
    except Exception:
        logger.exception("a callback in the device's thread failed")


def _microseconds(begin_ns: int, end_ns: int) -> int:
    return (end_ns - begin_ns) // 1000
