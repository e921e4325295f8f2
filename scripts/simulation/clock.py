"""Virtual time: what is due next happens next, and nothing takes any time by itself."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

START_S = 1000.0
"""Not zero, so that nobody mistakes a time for a duration."""


class Clock:
    """A queue of calls. Those for the same moment are made in the order in which they were asked for."""

    __slots__ = ("_count", "_queue", "events", "now")

    def __init__(self) -> None:
        self.now = START_S
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    @property
    def elapsed_s(self) -> float:
        return self.now - START_S

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        self._count = count = self._count + 1
        heapq.heappush(self._queue, (time if time > self.now else self.now, count, act, arguments))

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self._count = count = self._count + 1
        heapq.heappush(self._queue, (self.now + delay_s, count, act, arguments))

    def run(self, until: float) -> None:
        """All that is due until then; it is `until` afterwards."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, act, arguments = pop(queue)
            self.events += 1
            act(*arguments)
        self.now = until
