"""Says before a long work that the disk is too small for it, rather than at its end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from meshinfer.errors import ModelError
from meshinfer.limits import GIB, MIB

_SPARE_BYTES: Final = 64 * MIB
"""Left free for all else: logs, tokenizer, rounding of file systems."""


def require(directory: Path, needed_bytes: int, purpose: str) -> None:
    """Raises `ModelError`, with both figures, where `directory`'s disk has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise ModelError(
            f"{purpose} needs {_text(needed_bytes)} and the disk of {directory} has {_text(free_bytes)} free:"
            " make room, or choose another place with --home"
        )


def _text(size_bytes: int) -> str:
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{size_bytes / MIB:.0f} MiB"
