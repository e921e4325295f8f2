"""Makes the project's virtual environment with nothing but a Python, and installs the project when it must.

What was installed is remembered by the hash of pyproject.toml, so that a second run costs no time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import venv
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / ".venv"
OLDEST = (3, 11)
_TAIL_LINES = 30
_QUIET_S = 10.0
"""pip is silent while it unpacks; a line at least this often shows that it lives."""


class EnvironmentFailure(Exception):
    """One sentence for the person."""


def program(name: str) -> Path:
    """A program of the environment, such as "python" or "meshinfer"."""
    return (
        DIRECTORY / ("Scripts" if os.name == "nt" else "bin") / (f"{name}.exe" if os.name == "nt" else name)
    )


def ensure(extra: str = "") -> Path:
    """The environment's Python, with the project and its optional dependencies `extra` installed.

    Raises EnvironmentFailure.
    """
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise EnvironmentFailure(f"Python {wanted} or newer is needed; this is {sys.version.split()[0]}")
    if not _works():
        _create()
    if not _is_installed(extra):
        _install(extra)
    return program("python")


def _works() -> bool:
    """False too where the Python that it was made with has gone."""
    try:
        return (
            subprocess.run([program("python"), "-m", "pip", "--version"], capture_output=True).returncode == 0
        )
    except OSError:
        return False


def _create() -> None:
    print(f"making the environment {DIRECTORY.name} …", flush=True)
    try:
        venv.EnvBuilder(clear=True, with_pip=True, symlinks=os.name != "nt").create(DIRECTORY)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentFailure(
            f"{DIRECTORY} could not be made ({error}); on Debian and Ubuntu: apt install python3-venv"
        ) from error


def _stamp(extra: str) -> Path:
    return DIRECTORY / f"installed-{extra or 'project'}"


def _fingerprint() -> str:
    """What decides over the content of the environment; a project that was moved must be installed anew."""
    content = (ROOT / "pyproject.toml").read_bytes() + str(ROOT).encode() + sys.version.encode()
    return hashlib.sha256(content).hexdigest()


def _is_installed(extra: str) -> bool:
    stamps = {_stamp(extra)} if extra else {_stamp(""), _stamp("dev")}
    return any(stamp.is_file() and stamp.read_text() == _fingerprint() for stamp in stamps)


def _install(extra: str) -> None:
    target = f"{ROOT}[{extra}]" if extra else str(ROOT)
    print("installing meshinfer and what it needs (some minutes the first time) …", flush=True)
    command = [str(program("python")), "-m", "pip", "install", "--disable-pip-version-check"]
    code, tail = _run_showing([*command, "--progress-bar", "off", "--editable", target])
    if code != 0:
        raise EnvironmentFailure("pip failed:\n" + "\n".join(tail))
    _stamp(extra).write_text(_fingerprint())


def _run_showing(command: list[str]) -> tuple[int, list[str]]:
    """Shows what pip is at, in short; returns its exit code and its last lines."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    shown_s = 0.0
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in map(str.strip, process.stdout):
            tail.append(line)
            now_s = time.monotonic()
            first_word = line.partition(" ")[0]
            if first_word in ("Downloading", "Installing", "Successfully") or now_s - shown_s > _QUIET_S:
                print(f"  {line[:100]}", flush=True)
                shown_s = now_s
    return process.returncode, list(tail)
