"""Files of a model's full size that occupy only what was written into them: the one place where systems
differ.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from meshinfer.errors import ModelError

FSCTL_SET_SPARSE: Final = 0x000900C4
_WINDOWS_DISK_FULL: Final = 112
_WINDOWS_FILE_TOO_LARGE: Final = 223
_FULL: Final = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}

MarkSparse = Callable[[BinaryIO], None]


def mark_sparse(file: BinaryIO) -> None:
    """Tells the file system that holes in `file` take no room. POSIX file systems need no telling.

    On Windows a file without this mark is filled with zeros up to the first write beyond its end. A file
    system that knows no sparse files (FAT32, exFAT) refuses with OSError.
    """
    if sys.platform == "win32":
        import ctypes
        import msvcrt
        from ctypes import wintypes

        control = ctypes.WinDLL("kernel32", use_last_error=True).DeviceIoControl
        control.argtypes = [
            wintypes.HANDLE, wintypes.DWORD, wintypes.LPVOID, wintypes.DWORD,
            wintypes.LPVOID, wintypes.DWORD, ctypes.POINTER(wintypes.DWORD), wintypes.LPVOID,
        ]  # fmt: skip
        control.restype = wintypes.BOOL
        returned = wintypes.DWORD()
        handle = msvcrt.get_osfhandle(file.fileno())
        if not control(handle, FSCTL_SET_SPARSE, None, 0, None, 0, ctypes.byref(returned), None):
            raise ctypes.WinError(ctypes.get_last_error())


def create_sparse(path: Path, size: int, mark: MarkSparse = mark_sparse) -> None:
    """Makes `path`, `size` bytes of zeros that occupy nothing. Raises OSError."""
    with path.open("xb") as file:
        mark(file)
        file.truncate(size)
        sync(file)


def sync(file: BinaryIO) -> None:
    """Returns when all written to `file` would survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Writes `path` so that after a power cut it holds either what it held before or all of `data`."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(data)
        sync(file)
    fresh.replace(path)
    if sys.platform != "win32":
        # The rename itself lies in the directory, which POSIX syncs separately; Windows cannot open one.
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def disk_error(error: OSError, doing: str) -> ModelError:
    """One sentence for a person about a disk that refuses."""
    if error.errno in _FULL or getattr(error, "winerror", None) == _WINDOWS_DISK_FULL:
        return ModelError(
            f"the disk is full while {doing}: make room and try again, nothing that had arrived is lost"
        )
    if error.errno == errno.EFBIG or getattr(error, "winerror", None) == _WINDOWS_FILE_TOO_LARGE:
        return ModelError(
            f"the file system does not take files of this size while {doing}: choose another home"
        )
    return ModelError(f"the disk refuses while {doing} ({error.strerror or error}): check it and try again")
