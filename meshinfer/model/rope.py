"""The frequencies of a GGUF model's rotary positions, as llama.cpp computes them.

The converter's own are not to be relied on: it leaves out the factors that Llama 3.1 and later have in a
tensor (`rope_freqs.weight`, each frequency is divided by its own: ggml's `ggml_rope_ext`), and saves most
models' in f16, which at position 4,000 is off by half a radian. So they are computed here, and put into the
converted model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from meshinfer.errors import ModelError
from meshinfer.model.gguf import Header

TENSOR: Final = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Radians per position, [head / 2]: `unscaled` as the converter has them, `wanted` as the model has."""

    unscaled: list[float]
    wanted: list[float]


def frequencies(header: Header, path: Path) -> Frequencies:
    """Of the GGUF file at `path`. Raises `ModelError` where its factors are damaged."""
    size = _head(header)
    base = header.real(f"{header.architecture}.rope.freq_base", 10_000.0)
    if size < 2 or size % 2 or not 1.0 <= base <= 1e12:
        raise ModelError(f"the GGUF file has heads of {size} and a position base of {base}: it is damaged")
    unscaled = base ** (-np.arange(0, size, 2) / size)
    return Frequencies(unscaled.tolist(), (unscaled / _factors(header, path, size // 2)).tolist())


def _factors(header: Header, path: Path, count: int) -> np.ndarray:
    tensor = next((tensor for tensor in header.tensors if tensor.name == TENSOR), None)
    if tensor is None:
        return np.ones(count, np.float32)
    with path.open("rb") as file:
        file.seek(tensor.offset)
        values = (
            np.frombuffer(file.read(tensor.size_bytes), np.float32) if tensor.kind == "F32" else np.zeros(0)
        )
    if values.size != count or not np.isfinite(values).all() or values.min() <= 0:
        raise ModelError(f"the GGUF file's {TENSOR} is damaged: fetch the file again")
    return values


def _head(header: Header) -> int:
    """Numbers in one attention head."""
    prefix = header.architecture
    hidden, heads = (
        header.number(f"{prefix}.embedding_length"),
        header.number(f"{prefix}.attention.head_count"),
    )
    return header.number(f"{prefix}.attention.key_length", hidden // heads)
