"""What is written down when this program fails by its own fault: where and what kind, not what was asked.

An exception's message may quote a prompt or a key, so it is left out; frames and type tell where to look.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Final

ERROR_LOG: Final = "error.log"
_LOG_BYTES: Final = 1024 * 1024
"""Past this size the log begins anew: a defect in a loop must not fill the disk."""


def trace(error: BaseException) -> str:
    """The frames of `error` and of what caused it, oldest cause first, each with its type."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"{frames}{_describe(current)}\n")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "which led to\n".join(reversed(parts))


def _describe(error: BaseException) -> str:
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, OSError) and error.strerror:
        return f"{kind}: {error.strerror}"
    return kind


def record(home: Path, error: BaseException) -> Path | None:
    """Appends to the home's error log; returns where, or None where nothing could be written."""
    path = home / ERROR_LOG
    entry = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n{trace(error)}\n"
    try:
        home.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists() or path.stat().st_size > _LOG_BYTES
        with path.open("w" if fresh else "a", encoding="utf-8") as log:
            log.write(entry)
    except OSError:
        return None
    return path
