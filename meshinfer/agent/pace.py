"""How fast the real steps of one shard are: cheap to note, calm in what it says.

Of each minute that had enough steps the fastest one counts: it says what the device could do beside its other work,
as the measurement at loading does. Like is compared with like: tokens alone in their batch and chunks of at least
`PREFILL_ROWS`, none of them far into its sequence, where attention takes longer.
"""

from __future__ import annotations

from array import array
from statistics import median_low
from typing import Final

from meshinfer.agent.speeds import differs
from meshinfer.engine.speed import PREFILL_ROWS, Speed
from meshinfer.limits import (
    DRIFT_DECODE_STEPS,
    DRIFT_POSITION,
    DRIFT_PREFILL_STEPS,
    DRIFT_WINDOW_S,
    DRIFT_WINDOWS,
)

_RECENT: Final = 256
"""Single tokens for a median, 2 KB: a few seconds of decoding."""


class _Kind:
    """Steps of one kind: the fastest of the window under way, and those of the last windows, newest last."""

    __slots__ = ("count", "enough", "fastest_ns", "windows")

    def __init__(self, enough: int) -> None:
        self.enough = enough
        self.count = 0
        self.fastest_ns = 0
        self.windows: tuple[int, ...] = ()

    def note(self, took_ns: int) -> None:
        if not self.count or took_ns < self.fastest_ns:
            self.fastest_ns = took_ns
        self.count += 1

    def close(self) -> None:
        """A window with too few steps says nothing."""
        if self.count >= self.enough:
            self.windows = (*self.windows, self.fastest_ns)[-DRIFT_WINDOWS:]
        self.count = 0

    @property
    def newest_ns(self) -> int:
        return self.windows[-1] if self.windows else self.fastest_ns

    def drifted_us(self, known_us: int, layers: float) -> int:
        """What it has come to, where every one of the last windows says that it is slower than is known, or every one
        that it is faster; else 0. Once told, it takes as many windows again to tell more."""
        if len(self.windows) < DRIFT_WINDOWS:
            return 0
        found = [_us(took_ns, layers) for took_ns in self.windows]
        if not all(differs(us, known_us) for us in found) or len({us > known_us for us in found}) > 1:
            return 0
        self.windows = ()
        return median_low(found)


class Pace:
    """Belongs to the loop; `now` is seconds of one monotonic clock."""

    def __init__(self, layers: float) -> None:
        """`layers` is the work of the shard, in layers of average size."""
        self._layers = layers
        self._decode = _Kind(DRIFT_DECODE_STEPS)
        self._prefill = _Kind(DRIFT_PREFILL_STEPS)
        self._closes_at: float | None = None
        self._recent = array("L", bytes(_RECENT * array("L").itemsize))
        self._noted = 0

    def note(self, now: float, compute_us: int, rows: int, position: int) -> bool:
        """Rows of one sequence from `position` on, alone in their batch. True when a window has just ended."""
        if rows == 1:
            self._recent[self._noted % _RECENT] = compute_us
            self._noted += 1
        if position > DRIFT_POSITION:
            return False
        ended = self._closes_at is not None and now >= self._closes_at
        if ended:
            self._decode.close()
            self._prefill.close()
        if ended or self._closes_at is None:
            self._closes_at = now + DRIFT_WINDOW_S
        if rows == 1:
            self._decode.note(compute_us * 1000)
        elif rows >= PREFILL_ROWS:
            self._prefill.note(compute_us * 1000 // rows)
        return ended

    def drifted(self, known: Speed) -> Speed | None:
        """What has become of the speed, its figures 0 where they have not changed; None where none has."""
        decode_us = self._decode.drifted_us(known.decode_us, self._layers)
        prefill_us = self._prefill.drifted_us(known.prefill_us, self._layers)
        return Speed(decode_us, prefill_us) if decode_us or prefill_us else None

    @property
    def observed(self) -> Speed | None:
        """Of the newest window that had enough steps, or of the one under way; a figure is 0 where there were none."""
        decode_ns, prefill_ns = self._decode.newest_ns, self._prefill.newest_ns
        if not decode_ns and not prefill_ns:
            return None
        return Speed(_us(decode_ns, self._layers), _us(prefill_ns, self._layers))

    @property
    def step_us(self) -> int | None:
        """The median of the recent single tokens through the whole shard."""
        recent = sorted(self._recent[: min(self._noted, _RECENT)])
        return recent[len(recent) // 2] if recent else None


def _us(took_ns: int, layers: float) -> int:
    """For one layer and token; 0 for nothing."""
    return max(1, round(took_ns / 1000 / layers)) if took_ns else 0
