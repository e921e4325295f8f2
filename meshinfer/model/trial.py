"""Runs a model, or a piece of one, over a few sequences for `verify`: exact, one sequence at a time, on the
CPU.

The engine is a room that this one does not know; what a trial needs of it is this page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshinfer.errors import ModelError
from meshinfer.model.graph import HIDDEN_NAME, TOKENS
from meshinfer.model.reading import core

Rows: TypeAlias = NDArray[np.float32]
"""f32 `[rows, …]`: hidden states or logits of one step."""
Tokens: TypeAlias = NDArray[np.int64]


EXACT: Final = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
"""All three are needed; with the last at its default, activations are rounded to 8 bits (measured: logits
1.65 apart).
"""


@dataclass(frozen=True, slots=True)
class _Cache:
    port: Any
    memory: NDArray[np.uint8]
    tensor: Any


class PagedModel:
    """A compiled piece: an embedding, a span, a head, or a whole paged model. `longest` is the most tokens
    of a trial.
    """

    def __init__(self, model: Any, longest: int) -> None:
        """Raises ModelError where OpenVINO cannot compile it."""
        self._compiled = _compile(model)
        self._request = self._compiled.create_infer_request()
        self._names = {name for port in self._compiled.inputs for name in port.get_names()}
        self._block = 1
        self._caches = [self._cache(port, longest) for port in self._compiled.inputs if _is_cache(port)]

    def run(self, steps: Sequence[Tokens | Rows]) -> list[Rows]:
        """One sequence from its beginning: for each step its tokens or hidden states in, hidden states or
        logits out.
        """
        outputs: list[Rows] = []
        past = 0
        for rows in steps:
            outputs.append(self._step(rows, past))
            past += len(rows)
        return outputs

    def _step(self, rows: Tokens | Rows, past: int) -> Rows:
        count = len(rows)
        blocks = -(-(past + count) // self._block)
        inputs = {
            TOKENS if rows.dtype == np.int64 else HIDDEN_NAME: rows,
            "past_lens": np.array([past], np.int32),
            "subsequence_begins": np.array([0, count], np.int32),
            "block_indices": np.arange(blocks, dtype=np.int32),
            "block_indices_begins": np.array([0, blocks], np.int32),
            "max_context_len": np.array(past + count, np.int32),
            "position_ids": np.arange(past, past + count, dtype=np.int64),
        }
        self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        return np.array(self._request.get_output_tensor(0).data, np.float32)

    def _cache(self, port: Any, longest: int) -> _Cache:
        import openvino

        shape = list(port.get_partial_shape())
        self._block = int(shape[2].get_length())
        blocks = -(-longest // self._block)
        dimensions = [blocks, *(int(dimension.get_length()) for dimension in shape[1:])]
        # Zeros: what attention reads beyond a sequence's end it multiplies by zero, and NaN would survive
        # that.
        memory = np.zeros(int(np.prod(dimensions)) * int(port.get_element_type().size), np.uint8)
        tensor = openvino.Tensor(memory, openvino.Shape(dimensions), port.get_element_type())
        self._request.set_tensor(port, tensor)
        return _Cache(port, memory, tensor)


class Original:
    """The stateful model as it came."""

    def __init__(self, model: Any) -> None:
        """Raises ModelError where OpenVINO cannot compile it, or it wants what a language model does not
        have.
        """
        self._compiled = _compile(model)
        self._request = self._compiled.create_infer_request()
        self._names = {name for port in self._compiled.inputs for name in port.get_names()}
        foreign = self._names - {TOKENS, "attention_mask", "position_ids", "beam_idx"}
        if foreign:
            raise ModelError(f"the model wants inputs besides its tokens: {', '.join(sorted(foreign))}")

    def answer(self, prompt: Sequence[Tokens], decoded: int) -> tuple[list[Tokens], list[Rows]]:
        """The steps of `prompt` and then `decoded` greedy ones: the tokens of each, and its logits `[rows,
        vocabulary]`.
        """
        self._request.reset_state()
        steps = list(prompt)
        logits: list[Rows] = []
        past = 0
        for number in range(len(prompt) + decoded):
            if number == len(steps):
                steps.append(np.array([np.argmax(logits[-1][-1])], np.int64))
            logits.append(self._step(steps[number], past))
            past += len(steps[number])
        return steps, logits

    def _step(self, tokens: Tokens, past: int) -> Rows:
        end = past + len(tokens)
        inputs = {
            TOKENS: tokens[None],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(past, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        logits = np.array(self._request.get_output_tensor(0).data, np.float32)
        return logits.reshape(-1, logits.shape[-1])


def _is_cache(port: Any) -> bool:
    return any(name.startswith(("key_cache.", "value_cache.")) for name in port.get_names())


def _compile(model: Any) -> Any:
    try:
        return core().compile_model(model, "CPU", EXACT)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO cannot compile the model: {str(error)[-300:]}") from error
