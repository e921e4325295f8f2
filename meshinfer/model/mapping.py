"""Weights mapped into memory for OpenVINO, which then reads them where they lie, as far as it needs them.

OpenVINO can map a file itself, but then denies writing to it on Windows, where the bytes of further layers
must still arrive; and it takes a tensor of ours, but does not keep that tensor's memory alive. So a file is
mapped once, and for the life of the process: a compiled model may read its weights whenever it likes. What
this costs is address space; the pages are the file's own, and the system takes them back when it wants to.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from meshinfer.model.sparse import disk_error

_lock: Final = threading.Lock()
_mapped: Final[dict[tuple[str, int, int, int], tuple[mmap.mmap, Any]]] = {}


def weights_tensor(path: Path) -> Any:
    """An `openvino.Tensor`, u8 `[bytes]`, over the file at `path`; read-only in fact, though its type cannot
    say so.

    Raises ModelError where the file cannot be mapped.
    """
    try:
        key = _key(path)
    except OSError as error:
        raise disk_error(error, f"opening the weights {path}") from error
    with _lock:
        if key not in _mapped:
            _mapped[key] = _open(path)
        return _mapped[key][1]


def release(path: Path) -> None:
    """Gives the pages of `path` back to the system, to be read again if they are needed: call once a shard
    has run.

    The first inference repacks the weights, so the file's own pages are rarely read after it (on Linux they
    would count as this process's memory until something else needs room; on Windows they leave with the
    working set).
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    with _lock:
        try:
            mapped = _mapped.get(_key(path))
        except OSError:
            return  # the model was removed: its pages go with its last reader
        if mapped is not None:
            mapped[0].madvise(mmap.MADV_DONTNEED)


@contextmanager
def mapped_briefly(path: Path) -> Iterator[Any]:
    """As `weights_tensor`, for a file that will be removed: nothing that reads the tensor may outlive the
    block.

    Windows removes no file that is mapped.
    """
    memory, tensor = _open(path)
    try:
        yield tensor
    finally:
        del tensor
        memory.close()


def _key(path: Path) -> tuple[str, int, int, int]:
    # A model removed and pulled again is another file under the same path.
    status = path.stat()
    return str(path), status.st_dev, status.st_ino, status.st_size


def _open(path: Path) -> tuple[mmap.mmap, Any]:
    import numpy as np
    import openvino

    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error if isinstance(error, OSError) else OSError(str(error))
        raise disk_error(reason, f"opening the weights {path}") from error
    address = np.frombuffer(memory, np.uint8).ctypes.data
    # openvino.Tensor refuses an array that says it is read-only. A copy-on-write mapping would satisfy it,
    # but systems count one as memory promised, and refuse it for a model larger than that.
    view = np.ctypeslib.as_array((ctypes.c_uint8 * len(memory)).from_address(address))
    return memory, openvino.Tensor(view, shared_memory=True)
