"""Runs another program as part of a pull: its crash is an error here, its growing files are the progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from meshinfer.errors import ModelError
from meshinfer.model import convert

_POLL_S: Final = 0.2
"""How often progress is told while a child runs; its end is seen at once."""

_TAIL_CHARS: Final = 300
_OUTPUT_BYTES: Final = 1024 * 1024


def task(
    arguments: Sequence[str], directory: Path, stdin: str = "", watch: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One task of `convert.py`, run in `directory`. Raises `ModelError` with its reason, or for its crash."""
    script = Path(convert.__file__).resolve()
    # -P: the script's own directory, full of modules with common names, stays out of its search path.
    status, output, errors = run([sys.executable, "-P", str(script), *arguments], directory, stdin, watch)
    if status != 0:
        raise ModelError(f"the conversion failed: {_reason(status, errors)}")
    try:
        result = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise ModelError("the conversion failed: it ended without a result") from error
    if not isinstance(result, dict):
        raise ModelError("the conversion failed: it ended without a result")
    return result


def run(
    command: Sequence[str],
    directory: Path,
    stdin: str = "",
    watch: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Exit status, standard output and error (the last megabyte of each). `watch` is called while it runs.

    The child never outlives the call, whatever ends it: an exception of `watch`, or Ctrl-C.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
        # Files and not pipes: a child that writes much cannot block, and no thread is needed to read.
        given.write(stdin.encode("utf-8"))
        given.seek(0)
        process = subprocess.Popen(  # noqa: S603  (no shell; the program is this Python)
            list(command),
            cwd=directory,
            stdin=given,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **(environment or {})},
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    watch()
        except BaseException:
            process.kill()
            process.wait()
            raise
        return status, _tail(out), _tail(err)


def size_of(directory: Path) -> int:
    """Bytes of all files under `directory`, some of which may come and go meanwhile."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:
                continue  # Renamed or removed since it was listed.
    return total


def _tail(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _OUTPUT_BYTES))
    return str(file.read().decode("utf-8", "replace"))


def _reason(status: int, errors: str) -> str:
    for line in reversed(errors.splitlines()):
        if line.startswith(convert.FAILURE):
            return line.removeprefix(convert.FAILURE)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1][-_TAIL_CHARS:] if lines else "no word of why"
    if status < 0 or status > 255:
        return f"it crashed (status {status}), so the file is damaged or there is too little memory; {last}"
    return last
