"""The one place that knows how a file is written whole and kept private, and how a home is kept to one agent.

Windows and POSIX differ here: permissions (access lists, mode bits), locks (`msvcrt`, `fcntl`), and what
makes a rename durable.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from meshinfer.errors import MeshinferError, UserError
from meshinfer.limits import SECRET_BYTES

_WINDOWS: Final[bool] = os.name == "nt"
_O_BINARY: Final[int] = getattr(os, "O_BINARY", 0)

_LEFTOVER_AGE_S: Final = 3600.0
_LOCK_FILE: Final = "agent.lock"
_LOCK_OFFSET: Final = 1 << 30
"""The locked byte lies far behind the text: Windows lets nobody read a locked byte, and the pid is read."""

_LOCK_ATTEMPTS: Final = 10
_LOCK_PAUSE_S: Final = 0.02

_REPLACE_ATTEMPTS: Final = 20
_REPLACE_PAUSE_S: Final = 0.05
"""On Windows a virus scanner or a reader may hold the target for a moment; a second covers that."""


def write_atomic(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Replaces `path` by `data` wholly or not at all, whenever the power goes. A secret is its owner's only.

    The data reach the disk before the name does, and the name before this returns. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _O_BINARY, 0o600 if secret else 0o666
        )
        with os.fdopen(descriptor, "wb") as file:
            if secret and _WINDOWS:
                # Before the first byte is in it: the access list stays with the file when it is renamed.
                restrict_by_access_list(temporary)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _replace(source: Path, target: Path) -> None:
    for attempt in range(_REPLACE_ATTEMPTS):
        try:
            source.replace(target)
            return
        except PermissionError:
            if not _WINDOWS or attempt == _REPLACE_ATTEMPTS - 1:
                raise
            time.sleep(_REPLACE_PAUSE_S)


def sync_directory(directory: Path) -> None:
    """Makes a rename in `directory` durable. Windows has no such call: its journal orders renames."""
    if _WINDOWS:
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, limit: int = SECRET_BYTES) -> bytes | None:
    """The file's bytes, or None where there is none. Raises UserError if it is larger than `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    if len(data) > limit:
        raise UserError(f"{path} is larger than {limit} bytes: it is damaged, or not a file of this program")
    return data


def private_directory(path: Path) -> Path:
    """Makes `path` and its parents where missing; only its owner may look into a directory made here."""
    if path.is_dir():
        return path
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{path} is a file, and a directory is needed there") from None
    if _WINDOWS:
        restrict_by_access_list(path)
    return path


def remove_leftovers(directory: Path, now: float | None = None) -> int:
    """Deletes temporary files that a killed program left here over an hour ago; returns how many."""
    moment = time.time() if now is None else now
    removed = 0
    for path in directory.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if moment - path.stat().st_mtime > _LEFTOVER_AGE_S:
                path.unlink()
                removed += 1
    return removed


# ── owner only ──────────────────────────────────────────────────────────────────────────────────


def _run_quietly(command: Sequence[str]) -> int:
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode  # noqa: S603


def restrict_by_access_list(
    path: Path,
    run: Callable[[Sequence[str]], int] = _run_quietly,
    account: Callable[[], str] | None = None,
) -> None:
    """On Windows: takes away what `path` inherited, and gives its owner and the system full control.

    The account is named with its domain, so that a local and a domain account of one name are told apart. It
    goes to `icacls` as UTF-16 (`CreateProcessW`), so any letters will do. Raises MeshinferError if `icacls`
    refuses: a key that others can read must not be written.
    """
    owner = (account or _windows_account)()
    inherit = "(OI)(CI)" if path.is_dir() else ""
    command = [
        str(_system_program("icacls.exe")),
        str(path),
        "/inheritance:r",
        "/grant:r",
        f"{owner}:{inherit}F",
        # Well-known id of the local system, whatever its name in the system's language.
        f"*S-1-5-18:{inherit}F",
        "/q",
    ]
    if run(command) != 0:
        raise MeshinferError(f"{path} could not be made private to {owner}; check who owns its directory")


def _system_program(name: str) -> Path:
    """By its full path: a program of that name in the current directory would be run first."""
    return Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / name


def _windows_account() -> str:
    domain = os.environ.get("USERDOMAIN", "")
    user = getpass.getuser()
    return f"{domain}\\{user}" if domain else user


# ── one agent per home ──────────────────────────────────────────────────────────────────────────


class HomeLock:
    """Held by the agent that runs on a home. The system lets go of it however the process ends."""

    def __init__(self, home: Path) -> None:
        self._path = home / _LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises UserError, naming the other's process id, if an agent runs on this home already."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | _O_BINARY, 0o600)
        try:
            if not _lock_soon(descriptor):
                raise UserError(self._taken(descriptor))
            os.ftruncate(descriptor, 0)
            os.write(descriptor, b"%d\n" % os.getpid())
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _taken(self, descriptor: int) -> str:
        pid = os.read(descriptor, 20).decode("ascii", "replace").strip()
        holder = f" (process {pid})" if pid.isdigit() else ""
        home = self._path.parent
        return f"an agent already runs on {home}{holder}; stop it, or give this one another --home"

    def release(self) -> None:
        """The file stays: to delete it would let two others lock two different files of that name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def agent_runs(home: Path) -> bool:
    """Whether some process holds the lock of `home`."""
    try:
        descriptor = os.open(home / _LOCK_FILE, os.O_RDWR | _O_BINARY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock_soon(descriptor: int) -> bool:
    """`agent_runs` of another process may hold the lock for an instant; an agent holds it for good."""
    for _ in range(_LOCK_ATTEMPTS):
        if _lock(descriptor):
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
