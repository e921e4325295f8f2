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

import meshinfer
from meshinfer.errors import ModelError
from meshinfer.model import convert

Watch = Callable[[str], None]
"""Called several times a second while a child runs, with the last whole line that it wrote."""

_POLL_S: Final = 0.2
"""How often progress is told while a child runs; its end is seen at once."""

_TAIL_CHARS: Final = 300
_OUTPUT_BYTES: Final = 1024 * 1024


def task(
    arguments: Sequence[str], directory: Path, stdin: str = "", watch: Watch = lambda line: None
) -> dict[str, Any]:
    """One task of `convert.py`, run in `directory`. Raises `ModelError` with its reason, or for its crash."""
    script = Path(convert.__file__).resolve()
    # -P: the script's own directory, full of modules with common names, stays out of its search path.
    status, output, errors = run([sys.executable, "-P", str(script), *arguments], directory, stdin, watch)
    return _result("the conversion", status, output, errors)


def module(name: str, arguments: Sequence[str], directory: Path, watch: Watch) -> dict[str, Any]:
    """A module of this program, run by itself in `directory`. Raises `ModelError` with its reason."""
    root = str(Path(meshinfer.__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", name, *arguments]
    status, output, errors = run(command, directory, watch=watch, environment={"PYTHONPATH": paths})
    return _result("the trial", status, output, errors)


def run(
    command: Sequence[str],
    directory: Path,
    stdin: str = "",
    watch: Watch = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Exit status, standard output and error (the last megabyte of each). `watch` is called while it runs.

    The child never outlives the call, whatever ends it: an exception of `watch`, or Ctrl-C.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        # Files and not pipes: a child that writes much cannot block, and no thread is needed to read.
        given, out, err = (Path(place) / name for name in ("in", "out", "err"))
        given.write_text(stdin, encoding="utf-8")
        with given.open("rb") as reading, out.open("wb") as writing, err.open("wb") as failing:
            process = subprocess.Popen(  # noqa: S603  (no shell; the program is this Python)
                list(command),
                cwd=directory,
                stdin=reading,
                stdout=writing,
                stderr=failing,
                env={**os.environ, "PYTHONIOENCODING": "utf-8", **(environment or {})},
            )
            try:
                status = _waited(process, out, watch)
            except BaseException:
                process.kill()
                process.wait()
                raise
        return status, _tail(out), _tail(err)


def _waited(process: subprocess.Popen[bytes], out: Path, watch: Watch) -> int:
    while True:
        try:
            return process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            whole, _, _ = _tail(out, 4096).rpartition("\n")
            watch(whole.rpartition("\n")[2])


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


def _tail(path: Path, most: int = _OUTPUT_BYTES) -> str:
    # By a handle of its own: the child shares the position of the one that it writes by.
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read().decode("utf-8", "replace")


def _result(what: str, status: int, output: str, errors: str) -> dict[str, Any]:
    if status != 0:
        raise ModelError(f"{what} failed: {_reason(status, errors)}")
    try:
        result = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise ModelError(f"{what} failed: it ended without a result") from error
    if not isinstance(result, dict):
        raise ModelError(f"{what} failed: it ended without a result")
    return result


def _reason(status: int, errors: str) -> str:
    for line in reversed(errors.splitlines()):
        if line.startswith(convert.FAILURE):
            return line.removeprefix(convert.FAILURE)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1][-_TAIL_CHARS:] if lines else "no word of why"
    if status < 0 or status > 255:
        return f"it crashed (status {status}), so the file is damaged or there is too little memory; {last}"
    return last
