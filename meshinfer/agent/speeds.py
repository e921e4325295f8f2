"""The speeds that were measured on this PC, kept for the next start: plans are computed from them.

A plan's inputs must not flicker, so a speed is coarse, and is replaced only by one that differs by a quarter.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from meshinfer.agent.files import read_bounded, write_atomic
from meshinfer.engine.speed import Speed
from meshinfer.errors import UserError
from meshinfer.values import ModelId, Precision

SPEEDS_FILE: Final = "speeds.json"
_KEPT: Final = 64
"""Entries; the oldest go. 10 KB."""

UNKNOWN: Final = Speed(0, 0)

_log = logging.getLogger(__name__)


class Speeds:
    """By model, device, precision and threads."""

    def __init__(self, home: Path) -> None:
        self._path = home / SPEEDS_FILE
        self._known = _read(self._path)

    def get(self, model: ModelId, device: str, precision: Precision, threads: int | None) -> Speed:
        """Each figure is 0 while it was not measured."""
        return self._known.get(_key(model, device, precision, threads), UNKNOWN)

    def put(
        self, model: ModelId, device: str, precision: Precision, threads: int | None, measured: Speed
    ) -> bool:
        """Keeps a measurement where it tells something new, and says whether it did; a figure of 0 tells nothing.

        A disk that refuses costs only the memory of it.
        """
        key = _key(model, device, precision, threads)
        known = self._known.get(key, UNKNOWN)
        then = Speed(_kept(known.decode_us, measured.decode_us), _kept(known.prefill_us, measured.prefill_us))
        if then == known:
            return False
        self._known.pop(key, None)
        self._known[key] = then
        for oldest in list(self._known)[:-_KEPT]:
            del self._known[oldest]
        self._write()
        return True

    def _write(self) -> None:
        kept = {
            key: {"decode_us": speed.decode_us, "prefill_us": speed.prefill_us}
            for key, speed in self._known.items()
        }
        try:
            write_atomic(self._path, json.dumps(kept, indent=1).encode())
        except OSError as error:
            _log.warning("the speed that was measured cannot be kept: %s", error)


def differs(measured_us: int, known_us: int) -> bool:
    """By more than a quarter of what is known, and by more than what rounding to whole microseconds makes."""
    difference_us = abs(measured_us - known_us)
    return difference_us * 4 > known_us and (difference_us > 1 or not known_us)


def coarse(microseconds: int) -> int:
    """Rounded to two digits."""
    unit = int(10 ** max(0, len(str(microseconds)) - 2))
    return (microseconds + unit // 2) // unit * unit


def _kept(known_us: int, measured_us: int) -> int:
    return coarse(measured_us) if measured_us and differs(measured_us, known_us) else known_us


def _key(model: ModelId, device: str, precision: Precision, threads: int | None) -> str:
    return f"{model} {device} {precision.value} {threads or 'auto'}"


def _read(path: Path) -> dict[str, Speed]:
    """What was kept; nothing where the file is missing or damaged, for it can be measured again."""
    try:
        kept = json.loads(read_bounded(path) or b"{}")
    except (ValueError, UserError):
        return {}
    if not isinstance(kept, dict):
        return {}
    speeds = {str(key): _speed(value) for key, value in kept.items()}
    return {key: speed for key, speed in speeds.items() if speed != UNKNOWN}


def _speed(value: object) -> Speed:
    """A plain number is what earlier versions kept: the time of a token alone."""
    if isinstance(value, dict):
        return Speed(_figure(value.get("decode_us")), _figure(value.get("prefill_us")))
    return Speed(_figure(value), 0)


def _figure(value: object) -> int:
    return value if type(value) is int and 0 < value < 2**32 else 0
