"""Raw bodies of hidden states: which dtypes may travel, and bytes to `[rows, hidden]` without a copy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from meshinfer.errors import WireError
from meshinfer.limits import BODY_BYTES, HIDDEN
from meshinfer.wire.fields import integer
from meshinfer.wire.messages import Rows

DTYPES: Final[dict[int, np.dtype[np.floating[Any]]]] = {1: np.dtype("<f4"), 2: np.dtype("<f2")}
"""Number on the wire → dtype, little-endian. 3 (bf16) and 4 (int8) are reserved."""

_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def pack_rows(rows: Rows, expected: int) -> tuple[int, int, bytes | memoryview]:
    """(dtype code, hidden, body). The body is the array's own memory: leave it alone until it is sent.

    Raises ValueError for an array that is not `[expected, hidden]` in a dtype of the table: a defect.
    """
    code = _CODES.get(rows.dtype)
    if code is None or rows.ndim != 2 or rows.shape[0] != expected:
        raise ValueError(f"rows are {rows.dtype} {rows.shape}, not f32 or f16 [{expected}, hidden]")
    # A memoryview with a zero in its shape cannot be cast.
    body = np.ascontiguousarray(rows).data.cast("B") if expected else b""
    return code, rows.shape[1], body


def parse_rows(code: object, hidden: object, expected: int, body: bytes | memoryview) -> Rows:
    """A read-only use of `body` as `[expected, hidden]`, after its length was found to be exactly right."""
    dtype = DTYPES.get(integer(code, "dtype"))
    if dtype is None:
        raise WireError("rows", "the rows' dtype is not one of the table")
    width = integer(hidden, "hidden", HIDDEN, 1)
    size = expected * width * dtype.itemsize
    if size > BODY_BYTES or len(body) != size:
        raise WireError(
            "rows", f"the body has {len(body)} bytes where {expected} rows of {width} take {size}"
        )
    if not expected:  # numpy refuses an empty buffer
        return np.empty((0, width), dtype)
    return np.frombuffer(body, dtype).reshape(expected, width)


def finite(rows: Rows) -> bool:
    """Whether no number is NaN or infinite; an owner asks before the engine sees them.

    4 µs for a row of 4,096 and 2 ms for 1,024 of them; takes a quarter of the rows' memory for as long.
    """
    return bool(np.isfinite(rows).all())
