"""Memory that a compiled model reads and writes, set once and reused from step to step.

What has a dynamic first dimension is one tensor, given to the request once. A step writes into its memory and
sets the tensor's shape, which allocates nothing while it fits: 1 µs, where a new tensor for each step costs
6. Outputs likewise: to ask the request for its own output tensor costs 4 µs a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

CACHE_LINE_BYTES = 64


class RowsTensor:
    """An input or output of shape `[rows, *trailing]` for any number of rows."""

    __slots__ = ("_bind", "_full", "_rows", "_tensor", "_trailing", "_type", "_view")

    def __init__(
        self, bind: Callable[[Any], None], element_type: Any, trailing: tuple[int, ...] = (), rows: int = 64
    ) -> None:
        """`bind` gives a tensor to the request: once now, and again whenever more rows are needed than ever
        before."""
        self._bind = bind
        self._type = element_type
        self._trailing = trailing
        self._rows = 0
        self._grow(rows)

    @classmethod
    def reading(cls, request: Any, port: Any, trailing: tuple[int, ...] = ()) -> RowsTensor:
        """The memory that input `port` is read from."""
        return cls(functools.partial(request.set_tensor, port), port.element_type, trailing)

    @classmethod
    def writing(cls, request: Any, port: Any, trailing: tuple[int, ...] = ()) -> RowsTensor:
        """The memory that the one output, `port`, is written to."""
        return cls(functools.partial(request.set_output_tensor, 0), port.element_type, trailing)

    def view(self, rows: int) -> NDArray[Any]:
        """The memory of the first `rows` rows; the next inference reads (or writes) just these."""
        if rows != self._rows:
            if rows > len(self._full):
                self._grow(max(rows, 2 * len(self._full)))
            self._tensor.shape = [rows, *self._trailing]
            self._rows = rows
            self._view = self._full[:rows]
        return self._view

    def _grow(self, rows: int) -> None:
        self._tensor = ov.Tensor(self._type, ov.Shape([rows, *self._trailing]))
        self._full: NDArray[Any] = self._tensor.data
        self._full.fill(0)
        self._view = self._full
        self._rows = rows
        self._bind(self._tensor)


class ScalarInput:
    """An input of shape `[]`."""

    __slots__ = ("_tensor", "_value")

    def __init__(self, request: Any, port: Any) -> None:
        self._tensor = ov.Tensor(port.element_type, ov.Shape([]))
        self._value: NDArray[Any] = self._tensor.data
        request.set_tensor(port, self._tensor)

    def set(self, value: int) -> None:
        self._value[...] = value


class KvMemory:
    """The key and value caches of a shard's layers: `blocks` blocks each, of the shapes that the compiled
    model has.

    On CPU the memory is of zero pages that the system provides when a block is first written, so a large pool
    costs nothing before it is used. Zero it must be: vector code multiplies a block's unwritten tail by zero,
    and NaN times zero is NaN (OpenVINO GenAI zeroes its cache for the same reason). On GPU it lies in the
    device's memory; that path could not be tried on a real one.
    """

    def __init__(self, request: Any, ports: Iterable[Any], blocks: int, device: str) -> None:
        self._host: list[
            NDArray[np.uint8]
        ] = []  # OpenVINO does not keep numpy's memory alive: this list does
        self._tensors = []
        self.size_bytes = 0
        for port in ports:
            shape = ov.Shape(
                [blocks, *(dimension.get_length() for dimension in list(port.partial_shape)[1:])]
            )
            tensor = self._on_host(port, shape) if device == "CPU" else _on_device(port, shape, device)
            request.set_tensor(port, tensor)
            self._tensors.append(tensor)
            self.size_bytes += tensor.byte_size

    def scrub(self, blocks: Iterable[int]) -> None:
        """Zero `blocks`, so that what a broken sequence left in them meets no other. Does nothing on GPU."""
        indices = list(blocks)
        for memory in self._host:
            memory[indices] = 0

    def _on_host(self, port: Any, shape: Any) -> Any:
        size = int(np.prod(shape, dtype=np.int64)) * int(port.element_type.size)
        memory = np.zeros(size + CACHE_LINE_BYTES, np.uint8)
        offset = -memory.ctypes.data % CACHE_LINE_BYTES
        memory = memory[offset : offset + size]
        self._host.append(memory.reshape(shape[0], -1))
        return ov.Tensor(memory, shape, port.element_type)


def _on_device(port: Any, shape: Any, device: str) -> Any:
    from meshinfer.engine.device import core

    return core().get_default_context(device).create_tensor(port.element_type, shape, {})
