"""Measured speeds are kept, coarse and calm, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshinfer.agent.speeds import SPEEDS_FILE, UNKNOWN, Speeds, coarse
from meshinfer.engine.speed import Speed
from meshinfer.values import ModelId, Precision

MODEL = ModelId("ab" * 32)
AUTO = Precision.AUTO


def test_a_speed_is_known_at_the_next_start(tmp_path: Path) -> None:
    assert Speeds(tmp_path).put(MODEL, "CPU", AUTO, None, Speed(847, 52))
    again = Speeds(tmp_path)
    assert again.get(MODEL, "CPU", AUTO, None) == Speed(850, 52)
    assert again.get(MODEL, "CPU", Precision.EXACT, None) == UNKNOWN
    assert again.get(MODEL, "CPU", AUTO, 2) == UNKNOWN


def test_small_changes_change_no_plan(tmp_path: Path) -> None:
    speeds = Speeds(tmp_path)
    for measured, known in ((800, 800), (990, 800), (620, 800), (1100, 1100), (500, 500)):
        changed = speeds.get(MODEL, "CPU", AUTO, None).decode_us != known
        assert speeds.put(MODEL, "CPU", AUTO, None, Speed(measured, measured)) == changed
        assert speeds.get(MODEL, "CPU", AUTO, None) == Speed(known, known)


def test_each_figure_changes_by_itself(tmp_path: Path) -> None:
    """One of a step of prompts says nothing about single tokens, and the other way round."""
    speeds = Speeds(tmp_path)
    speeds.put(MODEL, "CPU", AUTO, None, Speed(800, 50))
    speeds.put(MODEL, "CPU", AUTO, None, Speed(0, 90))
    assert speeds.get(MODEL, "CPU", AUTO, None) == Speed(800, 90)
    speeds.put(MODEL, "CPU", AUTO, None, Speed(300, 91))
    assert speeds.get(MODEL, "CPU", AUTO, None) == Speed(300, 90)
    assert not speeds.put(MODEL, "CPU", AUTO, None, UNKNOWN)


def test_a_microsecond_more_or_less_is_rounding(tmp_path: Path) -> None:
    speeds = Speeds(tmp_path)
    speeds.put(MODEL, "CPU", AUTO, None, Speed(3, 2))
    assert not speeds.put(MODEL, "CPU", AUTO, None, Speed(2, 3))


def test_what_an_earlier_version_kept_is_still_known(tmp_path: Path) -> None:
    """It measured single tokens only."""
    (tmp_path / SPEEDS_FILE).write_text(json.dumps({f"{MODEL} CPU auto auto": 850}))
    speeds = Speeds(tmp_path)
    assert speeds.get(MODEL, "CPU", AUTO, None) == Speed(850, 0)
    assert speeds.put(MODEL, "CPU", AUTO, None, Speed(840, 60))
    assert Speeds(tmp_path).get(MODEL, "CPU", AUTO, None) == Speed(850, 60)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'{"a": "b"}',
        b'{"a": -1, "b": true, "c": 1e9}',
        b'{"a": {}, "b": {"decode_us": "5"}, "c": {"decode_us": -5, "prefill_us": 1e3}, "d": [1]}',
        b"\xff",
    ],
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SPEEDS_FILE).write_bytes(content)
    speeds = Speeds(tmp_path)
    assert speeds.get(MODEL, "CPU", AUTO, None) == UNKNOWN
    speeds.put(MODEL, "CPU", AUTO, None, Speed(5, 1))
    assert Speeds(tmp_path).get(MODEL, "CPU", AUTO, None) == Speed(5, 1)


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
