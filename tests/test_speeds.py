"""Measured speeds are kept, coarse and calm, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshinfer.agent.speeds import SPEEDS_FILE, Speeds, coarse
from meshinfer.values import ModelId, Precision

MODEL = ModelId("ab" * 32)
AUTO = Precision.AUTO


def test_a_speed_is_known_at_the_next_start(tmp_path: Path) -> None:
    Speeds(tmp_path).put(MODEL, "CPU", AUTO, None, 847)
    again = Speeds(tmp_path)
    assert again.get(MODEL, "CPU", AUTO, None) == 850
    assert again.get(MODEL, "CPU", Precision.EXACT, None) == 0
    assert again.get(MODEL, "CPU", AUTO, 2) == 0


def test_small_changes_change_no_plan(tmp_path: Path) -> None:
    speeds = Speeds(tmp_path)
    for measured, known in ((800, 800), (990, 800), (620, 800), (1100, 1100), (500, 500)):
        speeds.put(MODEL, "CPU", AUTO, None, measured)
        assert speeds.get(MODEL, "CPU", AUTO, None) == known


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"a": "b"}', b'{"a": -1, "b": true, "c": 1e9}', b"\xff"]
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SPEEDS_FILE).write_bytes(content)
    speeds = Speeds(tmp_path)
    assert speeds.get(MODEL, "CPU", AUTO, None) == 0
    speeds.put(MODEL, "CPU", AUTO, None, 5)
    assert Speeds(tmp_path).get(MODEL, "CPU", AUTO, None) == 5


def test_two_digits_are_kept() -> None:
    assert [coarse(value) for value in (1, 9, 10, 99, 104, 105, 847, 12_345)] == [
        1,
        9,
        10,
        99,
        100,
        110,
        850,
        12_000,
    ]
