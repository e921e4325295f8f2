"""Storing a model's weights in fewer bits, where a person asks for it."""

from __future__ import annotations

from enum import StrEnum


class Compression(StrEnum):
    """What `--quantize` takes: INT8 is near the original, INT4 half of it at a loss that small models show.

    INT8 keeps a scale per row of a matrix, INT4 one per 64 weights (nncf's weight compression, without data).
    """

    INT8 = "int8"
    INT4 = "int4"
