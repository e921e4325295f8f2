"""Who can reach whom: splits, cut cables and one-way links, and the islands that they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from simulation.clock import Clock
from simulation.pc import Pc

MEMORY_S = 10.0
"""Islands are remembered for so long."""


class Paths:
    """Directed ways between PCs. Whoever changes one calls `changed` afterwards, once."""

    def __init__(self, clock: Clock, pcs: Sequence[Pc]) -> None:
        self._clock = clock
        self._pcs = pcs
        self._cuts: dict[tuple[int, int], int] = {}
        self._splits = 0
        self._history: deque[tuple[float, list[int]]] = deque()
        self.changed()

    # ── changing ────────────────────────────────────────────────────────────────────────────────────────────
    def cut(self, a: Pc, b: Pc) -> None:
        """Nothing goes from a to b any more. What was cut twice has to be mended twice."""
        key = (a.number, b.number)
        self._cuts[key] = self._cuts.get(key, 0) + 1

    def mend(self, a: Pc, b: Pc) -> None:
        key = (a.number, b.number)
        left = self._cuts.get(key, 0) - 1
        if left > 0:
            self._cuts[key] = left
        else:
            self._cuts.pop(key, None)

    def split(self, sides: Mapping[int, int]) -> int:
        """PCs by number, with the side that each is on; the others are on side 0. Returns what `heal` takes."""
        self._splits += 1
        for pc in self._pcs:
            pc.sides[self._splits] = sides.get(pc.number, 0)
            pc.side = tuple(pc.sides.items())
        return self._splits

    def heal(self, split: int) -> None:
        for pc in self._pcs:
            pc.sides.pop(split, None)
            pc.side = tuple(pc.sides.items())

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────
    def works(self, a: Pc, b: Pc) -> bool:
        """From a to b."""
        return a.side == b.side and (a.number, b.number) not in self._cuts

    def joined(self, a: Pc, b: Pc) -> bool:
        """Both ways."""
        return self.works(a, b) and self.works(b, a)

    @property
    def whole(self) -> bool:
        """Whether every PC reaches every other."""
        return not self._cuts and all(not pc.sides for pc in self._pcs)

    def changed(self) -> None:
        """A way, or an agent, came or went: note who is on which island from now on."""
        now = self._clock.now
        self._history.append((now, self._labels()))
        while len(self._history) > 1 and self._history[1][0] < now - MEMORY_S:
            self._history.popleft()

    def island(self, pc: Pc) -> int:
        """Equal for running agents that are joined, by others perhaps; -1 for one that does not run."""
        return self._history[-1][1][pc.number]

    def together(self, a: Pc, b: Pc, for_s: float) -> bool:
        """Whether both ran on one island all the time for so long until now."""
        since = self._clock.now - for_s
        for begin, labels in reversed(self._history):
            if labels[a.number] < 0 or labels[a.number] != labels[b.number]:
                return False
            if begin <= since:
                return True
        return False

    def islands(self) -> list[list[Pc]]:
        found: dict[int, list[Pc]] = {}
        for pc in self._pcs:
            label = self.island(pc)
            if label >= 0:
                found.setdefault(label, []).append(pc)
        return list(found.values())

    def _labels(self) -> list[int]:
        labels = [-1] * len(self._pcs)
        if self.whole:
            return [0 if pc.running else -1 for pc in self._pcs]
        for pc in self._pcs:
            if pc.running and labels[pc.number] < 0:
                self._mark(pc, labels)
        return labels

    def _mark(self, first: Pc, labels: list[int]) -> None:
        labels[first.number] = first.number
        reached = [first]
        while reached:
            pc = reached.pop()
            for other in self._pcs:
                if labels[other.number] < 0 and other.running and self.joined(pc, other):
                    labels[other.number] = first.number
                    reached.append(other)
