"""If these fail, plans give layers to the wrong PCs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from engine_models import shard

from meshinfer.engine import speed as speeds
from meshinfer.engine.speed import Speed, measure


def test_a_token_alone_costs_more_than_one_of_a_long_prompt() -> None:
    one = shard()
    one.warm()
    speed = measure(one, 6)
    for _ in range(4):  # other work on this PC
        speed = speed.best(measure(one, 6))
    assert 0 < speed.prefill_us < speed.decode_us
    assert one.blocks_free == one.blocks_total, "the measurement leaves nothing behind"


def test_prompts_need_not_be_tried() -> None:
    one = shard()
    assert measure(one, 6, prompts=False).prefill_us == 0
    assert Speed(5, 0).best(Speed(7, 3)) == Speed(7, 0).best(Speed(5, 3)) == Speed(5, 3)


def test_figures_are_for_one_layer_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes 6 ms: a sixth for a layer, and of a chunk a 128th of that for a token."""
    now_ns = itertools.count(0, 6_000_000)
    clock = SimpleNamespace(perf_counter_ns=lambda: next(now_ns), monotonic=lambda: 0.0)
    monkeypatch.setattr(speeds, "time", clock)
    assert measure(shard(), 6) == Speed(1000, 8)
    assert measure(shard(), 1.5) == Speed(4000, 31)


@pytest.mark.parametrize(("pool_tokens", "context"), [(1, 2048), (1024, 4)])
def test_the_smallest_pool_and_context_are_measured_too(pool_tokens: int, context: int) -> None:
    one = shard(pool_tokens=pool_tokens, context=context)
    speed = measure(one, 6)
    assert speed.decode_us > 0
    assert speed.prefill_us > 0
