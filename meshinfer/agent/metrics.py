"""Counters that are always on: what was refused, what was served, and how long it took."""

from __future__ import annotations

from collections import Counter, deque

from meshinfer.agent.timing import Routes

RECENT = 256
"""Samples kept for a median: a few seconds of decoding, 2 KB."""


class Metrics:
    """Counts by name, recent durations by name in microseconds, and what tokens took along each route."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.routes = Routes()
        self._recent: dict[str, deque[int]] = {}

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] += by

    def took(self, name: str, microseconds: int) -> None:
        recent = self._recent.get(name)
        if recent is None:
            recent = self._recent[name] = deque(maxlen=RECENT)
        recent.append(microseconds)

    def median_us(self, name: str) -> int:
        recent = self._recent.get(name)
        return sorted(recent)[len(recent) // 2] if recent else 0

    def as_json(self) -> dict[str, object]:
        return {
            "counts": dict(sorted(self.counts.items())),
            "median_us": {name: self.median_us(name) for name in sorted(self._recent)},
        }
