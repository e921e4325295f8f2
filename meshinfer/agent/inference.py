"""What the asker has the inference thread do: there and back, and how long each part of the way took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeVar

from meshinfer.agent.metrics import Metrics
from meshinfer.engine.runner import Runner
from meshinfer.errors import StepError

T = TypeVar("T")


class Inference:
    """Belongs to the loop that made it."""

    def __init__(self, runner: Runner, metrics: Metrics) -> None:
        self._runner = runner
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    def run(
        self, what: str, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        """Run `work` in the inference thread, then one of the others in the loop. `what` names it in the metrics."""
        asked_ns = perf_counter_ns()
        begun_ns = ended_ns = asked_ns

        def timed() -> T:
            nonlocal begun_ns, ended_ns
            begun_ns = perf_counter_ns()
            try:
                return work()
            finally:
                ended_ns = perf_counter_ns()

        def back(outcome: T | Exception) -> None:
            self._metrics.took(f"{what}.wait", (begun_ns - asked_ns) // 1000)
            self._metrics.took(f"{what}.run", (ended_ns - begun_ns) // 1000)
            self._metrics.took(f"{what}.return", (perf_counter_ns() - ended_ns) // 1000)
            if isinstance(outcome, Exception):
                failed(outcome)
            else:
                done(outcome)

        def finished(outcome: T | Exception) -> None:
            self._loop.call_soon_threadsafe(back, outcome)

        try:
            self._runner.call(timed, finished)
        except StepError as error:
            failed(error)
