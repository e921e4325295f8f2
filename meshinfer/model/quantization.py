"""How a model's weights are stored, in one word, and the fewer bits that a person may ask for."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import openvino as ov


class Compression(StrEnum):
    """What `--quantize` takes. INT4 halves INT8's bytes once more, at a loss that shows in small models."""

    INT8 = "int8"
    INT4 = "int4"


_LABELS: Final = {
    "u4": "int4",
    "i4": "int4",
    "nf4": "nf4",
    "u8": "int8",
    "i8": "int8",
    "f8e4m3": "f8",
    "f8e5m2": "f8",
    "f4e2m1": "f4",
    "bf16": "bf16",
    "f16": "f16",
    "f32": "f32",
    "f64": "f64",
}
UNCOMPRESSED: Final = ("f16", "bf16", "f32", "f64")
"""Labels of models that may still be compressed; once more would lose more than it saves."""


def label(model: ov.Model) -> str:
    """The type that most of the model's weights have: `int4`, `int8`, `f16`, …, or `other`.

    By number of weights and not by bytes: an int4 model's embedding is often int8 and larger than all else.
    """
    weights: Counter[str] = Counter()
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and len(node.shape) > 1:
            count = 1
            for dimension in node.shape:
                count *= dimension
            weights[node.get_element_type().get_type_name()] += count
    return _LABELS.get(weights.most_common(1)[0][0], "other") if weights else "other"
