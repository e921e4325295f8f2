"""If these fail, plans flicker with every burst of other work on a PC, or go on by speeds that no longer hold."""

from __future__ import annotations

import tracemalloc

from meshinfer.agent.pace import Pace
from meshinfer.engine.speed import Speed
from meshinfer.limits import DRIFT_DECODE_STEPS, DRIFT_POSITION, DRIFT_WINDOW_S

KNOWN = Speed(100, 10)
LAYERS = 10


class Minutes:
    """A shard of ten layers that is stepped ten times a minute; each call is a minute."""

    def __init__(self) -> None:
        self.pace = Pace(LAYERS)
        self.now = 0.0

    def __call__(
        self, *, decode_us: int = 0, prefill_us: int = 0, steps: int = 10, position: int = 5
    ) -> Speed | None:
        """What the owner of a layer's speed hears in that minute, if anything."""
        heard = None
        for number in range(steps):
            # One in ten is undisturbed; the others meet other work.
            slower = 1 if number == steps // 2 else 3
            at = self.now + number
            for took_us, rows in ((decode_us, 1), (prefill_us * 200, 200)):
                if took_us and self.pace.note(at, took_us * LAYERS * slower, rows, position):
                    heard = self.pace.drifted(KNOWN) or heard
        self.now += DRIFT_WINDOW_S + 1
        return heard


def test_a_pc_that_became_slower_is_noticed_after_minutes() -> None:
    minute = Minutes()
    heard = [minute(decode_us=us, prefill_us=10) for us in (101, 99, 150, 160, 155, 150)]
    assert heard == [None, None, None, None, None, Speed(155, 0)]


def test_one_that_became_faster_too() -> None:
    minute = Minutes()
    assert [minute(decode_us=50, prefill_us=5) for _ in range(4)] == [None, None, None, Speed(50, 5)]


def test_small_differences_are_none() -> None:
    minute = Minutes()
    assert not any(minute(decode_us=us, prefill_us=11) for us in (120, 125, 80, 75, 124, 76, 110))


def test_a_burst_of_other_work_is_no_drift() -> None:
    minute = Minutes()
    assert not any(minute(decode_us=us) for us in (300, 300, 100, 300, 300, 100, 300, 100))


def test_up_and_down_is_no_drift() -> None:
    minute = Minutes()
    assert not any(minute(decode_us=us) for us in (150, 60, 150, 60, 150, 60))


def test_once_told_it_takes_as_long_to_tell_more() -> None:
    minute = Minutes()
    assert [minute(decode_us=200) is not None for _ in range(7)] == [
        False,
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_minutes_with_too_few_steps_say_nothing() -> None:
    minute = Minutes()
    assert not any(minute(decode_us=900, steps=DRIFT_DECODE_STEPS - 1) for _ in range(6))
    assert not any(minute(prefill_us=900, steps=1) for _ in range(6))


def test_tokens_behind_a_long_context_are_no_measure_of_a_layer() -> None:
    minute = Minutes()
    assert not any(minute(decode_us=900, prefill_us=900, position=DRIFT_POSITION + 1) for _ in range(6))
    assert minute.pace.observed is None
    assert minute.pace.step_us == 900 * LAYERS * 3, "but people are told what they take"


def test_what_was_observed_is_the_newest_whole_minute() -> None:
    minute = Minutes()
    assert minute.pace.observed is None
    minute(decode_us=120, steps=3)
    assert minute.pace.observed == Speed(120, 0), "until there is one, what there is"
    minute(decode_us=140)
    minute(decode_us=160)
    assert minute.pace.observed == Speed(140, 0)


def test_a_step_costs_no_memory() -> None:
    pace = Pace(LAYERS)
    for number in range(1000):
        pace.note(0.001 * number, 1000 + number, 1, 5)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1000):
            pace.note(1.0, 1000 + number % 7, 1, 5)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000
