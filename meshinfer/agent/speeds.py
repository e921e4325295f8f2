"""The speeds that were measured on this PC, kept for the next start: plans are computed from them.

A plan's inputs must not flicker, so a speed is coarse, and is replaced only by one that differs by a quarter.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from meshinfer.agent.files import read_bounded, write_atomic
from meshinfer.errors import UserError
from meshinfer.values import ModelId, Precision

SPEEDS_FILE: Final = "speeds.json"
_KEPT: Final = 64
"""Entries; the oldest go. 10 KB."""

_log = logging.getLogger(__name__)


class Speeds:
    """Microseconds per layer and token, by model, device, precision and threads."""

    def __init__(self, home: Path) -> None:
        self._path = home / SPEEDS_FILE
        self._known = _read(self._path)

    def get(self, model: ModelId, device: str, precision: Precision, threads: int | None) -> int:
        """0 while it was not measured."""
        return self._known.get(_key(model, device, precision, threads), 0)

    def put(
        self, model: ModelId, device: str, precision: Precision, threads: int | None, measured_us: int
    ) -> None:
        """Keeps a measurement where it tells something new. A disk that refuses costs only the memory of it."""
        key = _key(model, device, precision, threads)
        known = self._known.get(key, 0)
        if known and abs(measured_us - known) * 4 <= known:
            return
        self._known.pop(key, None)
        self._known[key] = coarse(measured_us)
        for oldest in list(self._known)[:-_KEPT]:
            del self._known[oldest]
        try:
            write_atomic(self._path, json.dumps(self._known, indent=1).encode())
        except OSError as error:
            _log.warning("the speed that was measured cannot be kept: %s", error)


def coarse(microseconds: int) -> int:
    """Rounded to two digits."""
    unit = int(10 ** max(0, len(str(microseconds)) - 2))
    return (microseconds + unit // 2) // unit * unit


def _key(model: ModelId, device: str, precision: Precision, threads: int | None) -> str:
    return f"{model} {device} {precision.value} {threads or 'auto'}"


def _read(path: Path) -> dict[str, int]:
    """What was kept; nothing where the file is missing or damaged, for it can be measured again."""
    try:
        kept = json.loads(read_bounded(path) or b"{}")
    except (ValueError, UserError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {str(key): value for key, value in kept.items() if type(value) is int and 0 < value < 2**32}
