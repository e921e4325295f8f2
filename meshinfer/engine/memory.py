"""What a loaded span takes of a device's memory, before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from meshinfer.engine.batching import BATCH_ROWS
from meshinfer.limits import ANSWERS_RUNNING, MIB, PREFILL_CHUNK_TOKENS
from meshinfer.values import ModelFacts

LAYER_BYTES = 4 * MIB
"""What OpenVINO holds for one layer beyond its weights: compiled kernels, one per shape seen, and buffers."""

ACTIVATION_BYTES = 64
"""Working memory for one row and one unit of width: 16 numbers of f32 live at once, the gated MLP's among
them."""

PEAK_ROWS = BATCH_ROWS + PREFILL_CHUNK_TOKENS


def layer_cost_bytes(weights_bytes: int) -> int:
    """Bytes that one layer with `weights_bytes` of weights takes when it has run.

    The first inference copies the weights into the kernels' own order, and the file's pages may then be given
    back. Measured as anonymous memory: SmolLM2 4-bit, 30 layers of 57 MiB in all: 187 MiB; 15 of 29: 106; a
    1.1B model of int4, 22 layers of 634 MB: 716 MB. Rounded up, in both precisions, which differ by KV alone.
    """
    return weights_bytes + weights_bytes // 20 + LAYER_BYTES


def span_fixed_bytes(hidden: int) -> int:
    """Bytes that a span takes once, however many layers it has: inputs, outputs and activations of a full
    batch."""
    return PEAK_ROWS * hidden * ACTIVATION_BYTES


def span_cost_bytes(layer_bytes: Sequence[int], hidden: int, kv_bytes: int) -> int:
    """Bytes of a span in all: weights of each of its layers on disk, its width, and its whole KV pool."""
    return sum(map(layer_cost_bytes, layer_bytes)) + span_fixed_bytes(hidden) + kv_bytes


def asker_cost_bytes(facts: ModelFacts) -> int:
    """Bytes that asking takes: the embedding is read from its mapped file row by row, the head is repacked
    like a layer, and each running answer has a row of logits."""
    logits = ANSWERS_RUNNING * facts.vocabulary * 4
    return facts.embedding_bytes + layer_cost_bytes(facts.head_bytes) + logits
