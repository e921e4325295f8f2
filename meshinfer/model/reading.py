"""Brings a model's graph into OpenVINO: as it came, and after the paged-attention pass.

The graph was found harmless by `graph_check` before; what only the reader can know, how large its tensors
are, is checked here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from meshinfer.errors import ModelError
from meshinfer.limits import GRAPH_UNPACKED, GRAPH_UNPACKED_LEAST
from meshinfer.model.cuts import Topology

IrModel: TypeAlias = Any
"""An `openvino.Model`; the library comes without types."""


@functools.cache
def core() -> Any:
    """This room's one `openvino.Core`, kept for the life of the process.

    Not only for speed: each Core with a CPU plugin gives its thread a signal stack of its own, and unmaps that when it
    goes; of two that do not end in reverse order one leaves the thread with a stack that is gone, and the next
    signal (Ctrl-C) kills the process. Seen with 2026.4.1.
    """
    import openvino

    return openvino.Core()


def read_stateful(xml: bytes, weights: Any) -> IrModel:
    """The model as it came, from checked XML and an `openvino.Tensor` of its weights. Raises ModelError."""
    try:
        model = core().read_model(model=xml, weights=weights)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO cannot read the model's graph: {_first_line(error)}") from error
    most = max(GRAPH_UNPACKED_LEAST, GRAPH_UNPACKED * int(weights.byte_size))
    for operation in model.get_ops():
        if operation.get_type_name() != "Constant":  # those lie within the weights
            for number in range(operation.get_output_size()):
                _check_size(operation.get_output_partial_shape(number), most)
    return model


def _check_size(shape: Any, most: int) -> None:
    """What depends on no open dimension is computed while the graph is transformed, so it has to be
    bounded.
    """
    if shape.is_static and math.prod(dimension.get_length() for dimension in shape) > most:
        raise ModelError(
            f"the model's graph is refused: it makes a tensor of more than {most} elements of little"
        )


def read_paged(xml: bytes, weights: Any) -> IrModel:
    """The same after the paged-attention pass. Raises ModelError, which says why, where it cannot be
    paged.
    """
    from openvino._offline_transformations import paged_attention_transformation

    model = read_stateful(xml, weights)
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise ModelError(
            f"the model cannot keep its keys and values in pages, so it cannot be shared: "
            f"{_first_line(error)}"
        ) from error
    kinds = {operation.get_type_name() for operation in model.get_ops()}
    if kinds & {"ReadValue", "Assign"}:
        raise ModelError(
            "the model keeps a state besides keys and values (convolution or state-space layers), so it "
            "cannot be shared"
        )
    return model


def constant_value(output: Any) -> Any | None:
    """The array that `output` always is; None where it depends on an input, or cannot be computed here."""
    import numpy as np
    import openvino

    node = output.get_node()
    if node.get_type_name() == "Constant":
        return node.data
    values = [constant_value(source) for source in node.input_values()]
    if not values or any(value is None for value in values) or output.get_partial_shape().is_dynamic:
        return None
    result = openvino.Tensor(output.get_element_type(), output.get_shape())
    computed = node.evaluate([result], [openvino.Tensor(np.ascontiguousarray(value)) for value in values])
    return np.array(result.data) if computed else None


def topology(operations: Sequence[Any]) -> Topology:
    """What `cuts` needs to know of OpenVINO's operations, given in topological order."""
    number = {operation.get_name(): index for index, operation in enumerate(operations)}
    return Topology(
        [operation.get_type_name() for operation in operations],
        [
            [
                (number[source.get_node().get_name()], source.get_index())
                for source in operation.input_values()
            ]
            for operation in operations
        ],
    )


def _first_line(error: BaseException) -> str:
    """OpenVINO's messages carry a stack of C++ places; the last sentence of them says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
