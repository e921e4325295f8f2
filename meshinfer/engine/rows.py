"""The asker's two ends of a model: token ids to hidden states, and hidden states to logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshinfer.engine.device import compile_properties, core
from meshinfer.engine.step import BadStep, Rows
from meshinfer.engine.tensors import RowsTensor
from meshinfer.errors import CapacityError, ModelError
from meshinfer.limits import STEP_TOKENS
from meshinfer.values import Precision

KNOWN = frozenset({"hidden", "input_ids", "position_ids"})


class RowsModel:
    """An embedding or a head: a model that treats each row by itself and keeps nothing between calls.

    It may be made in any thread; then one thread at a time may use it. Raises `CapacityError` where the
    device cannot hold it, `ModelError` for inputs that it should not have.
    """

    def __init__(self, model: Any, device: str, precision: Precision, threads: int | None = None) -> None:
        if any("input_ids" in port.get_names() for port in model.inputs):
            threads = 1  # a row is looked up in 30 µs; with two threads on busy cores, one in ten took 3 ms
        try:
            compiled = core().compile_model(model, device, compile_properties(device, precision, threads))
        except RuntimeError as error:
            raise CapacityError(f"{device} cannot compile the model's end: {error}") from error
        self._request = compiled.create_infer_request()
        self._inputs: dict[str, RowsTensor] = {}
        for port in compiled.inputs:
            name = next(iter(KNOWN.intersection(port.get_names())), None)
            if name is None:
                raise ModelError(f"the model's end wants an unknown input: {port.get_names()}")
            self._inputs[name] = RowsTensor.reading(self._request, port, _trailing(port))
        port = compiled.outputs[0]
        self.width = _trailing(port)[-1]
        self._out = RowsTensor.writing(self._request, port, _trailing(port))

    def embed(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Rows:
        """Hidden states of tokens `ids` `[n]` at `positions` `[n]`: f32 `[n, hidden]`, memory of its own."""
        inputs = {"input_ids": ids, "position_ids": positions}
        return self._run({name: inputs[name] for name in self._inputs}, len(ids)).copy()

    def logits(self, rows: Rows) -> Rows:
        """Logits for hidden states `rows` `[n, hidden]`: f32 `[n, vocabulary]`.

        A view that the next call overwrites: at a vocabulary of 150,000 and 64 sequences a copy would be 38
        MB a step. Raises `BadStep` where `rows` or the logits hold NaN or infinity.
        """
        if not np.isfinite(rows).all():
            raise BadStep("the last span returned rows that hold NaN or infinity")
        return self._run({"hidden": rows}, len(rows))

    def warm(self) -> None:
        """Run it once, since the first inference repacks the weights."""
        self._infer(1)

    def close(self) -> None:
        """Let go of the device's memory. Nothing else may be called afterwards."""
        del self._request, self._inputs, self._out

    def _run(self, inputs: dict[str, NDArray[Any]], count: int) -> Rows:
        if not 0 < count <= STEP_TOKENS:
            raise BadStep(f"{count} rows at once: from 1 to {STEP_TOKENS} are taken")
        for name, values in inputs.items():
            view = self._inputs[name].view(count)
            view.reshape(count, -1)[:] = values.reshape(count, -1)
        return self._infer(count)

    def _infer(self, count: int) -> Rows:
        for tensor in self._inputs.values():
            tensor.view(count)
        out = self._out.view(count)
        self._request.infer(share_outputs=True)
        return out.reshape(count, self.width)


def _trailing(port: Any) -> tuple[int, ...]:
    """The dimensions of `port` after its rows."""
    dimensions = list(port.partial_shape)[1:]
    if any(dimension.is_dynamic for dimension in dimensions):
        raise ModelError(f"the model's end has rows of no fixed shape: {port.partial_shape}")
    return tuple(dimension.get_length() for dimension in dimensions)
