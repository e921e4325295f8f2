"""What a model takes of a PC's memory: the figures that placement computes with, for people and programs."""

from __future__ import annotations

from typing import Final

from meshinfer.engine.blocks import kv_bytes_per_token
from meshinfer.engine.memory import asker_cost_bytes, layer_cost_bytes, span_fixed_bytes
from meshinfer.mesh.placement import LEAST_POOL_TOKENS, Costs, memory_bytes
from meshinfer.values import ModelFacts, Precision, ShardKey, Span

COSTS: Final = Costs(kv_bytes_per_token, layer_cost_bytes, span_fixed_bytes)


def memory_of(facts: ModelFacts) -> dict[str, int]:
    """Bytes that all layers take on one CPU, with KV for one long question, and that asking takes besides."""
    tokens = max(1, min(facts.context, LEAST_POOL_TOKENS))
    whole = ShardKey(facts.model, Span(0, facts.layers), "CPU", tokens)
    return {
        "layers_memory_bytes": memory_bytes(facts, COSTS, (whole,), Precision.AUTO),
        "asking_memory_bytes": asker_cost_bytes(facts),
    }
