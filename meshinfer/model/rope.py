"""Position scaling of Llama 3.1 and later: a tensor of factors in GGUF files, which the converter leaves out.

The converted graph has one constant of inverse frequencies, base^(-2i/head); llama.cpp divides each by its
factor (`rope_freqs.weight`, ggml's `ggml_rope_ext`). So does this, in the converted weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np

from meshinfer.errors import ModelError
from meshinfer.model.gguf import Header
from meshinfer.model.sources import weights_of

TENSOR: Final = "rope_freqs.weight"


def factors(header: Header, path: Path) -> np.ndarray | None:
    """The factors in the GGUF file at `path`, f32 [head / 2], None where it has none. Raises `ModelError`."""
    tensor = next((tensor for tensor in header.tensors if tensor.name == TENSOR), None)
    if tensor is None:
        return None
    with path.open("rb") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.size_bytes), np.float32)
    if (
        tensor.kind != "F32"
        or values.size * 2 != head(header)
        or not np.isfinite(values).all()
        or values.min() <= 0
    ):
        raise ModelError(f"the GGUF file's {TENSOR} is damaged: fetch the file again")
    return values


def head(header: Header) -> int:
    """Numbers in one attention head."""
    prefix = header.architecture
    hidden, heads = (
        header.number(f"{prefix}.embedding_length"),
        header.number(f"{prefix}.attention.head_count"),
    )
    return header.number(f"{prefix}.attention.key_length", hidden // heads)


def scale(xml: Path, header: Header, by: np.ndarray) -> None:
    """Divides the converted model's inverse frequencies by `by`. Raises `ModelError` where it has none."""
    base = header.real(f"{header.architecture}.rope.freq_base", 10_000.0)
    expected = base ** (-np.arange(0, 2 * by.size, 2) / (2 * by.size))
    pattern = re.compile(
        rf'<data element_type="f32" shape="1, {by.size}, 1" offset="(\d+)" size="{4 * by.size}"'
    )
    with weights_of(xml).open("r+b") as weights:
        for match in pattern.finditer(xml.read_text(encoding="utf-8")):
            weights.seek(int(match[1]))
            found = np.frombuffer(weights.read(4 * by.size), np.float32)
            if found.size == by.size and np.allclose(found, expected, rtol=1e-5, atol=0):
                weights.seek(int(match[1]))
                weights.write((expected / by).astype(np.float32).tobytes())
                return
    raise ModelError(
        "the conversion cannot scale this model's positions: take the model's OpenVINO form instead"
    )
