"""If these fail, plans give layers to the wrong PCs."""

from __future__ import annotations

import pytest
from engine_models import shard

from meshinfer.engine.speed import measure


def test_a_token_alone_costs_more_than_one_of_a_long_prompt() -> None:
    one = shard()
    one.warm()
    speed = measure(one, 6)
    assert 0 < speed.prefill_us < speed.decode_us
    assert one.blocks_free == one.blocks_total, "the measurement leaves nothing behind"


def test_figures_are_for_one_layer() -> None:
    """Half the work is taken to be twice as slow a layer."""
    one = shard()
    one.warm()
    whole, half = (min(measure(one, layers).decode_us for _ in range(5)) for layers in (6, 3))
    assert half == pytest.approx(2 * whole, rel=0.5)


@pytest.mark.parametrize(("pool_tokens", "context"), [(1, 2048), (1024, 4)])
def test_the_smallest_pool_and_context_are_measured_too(pool_tokens: int, context: int) -> None:
    one = shard(pool_tokens=pool_tokens, context=context)
    speed = measure(one, 6)
    assert speed.decode_us > 0
    assert speed.prefill_us > 0
