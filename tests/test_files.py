"""A power cut leaves the old file whole, secrets are their owner's, and a home has one agent."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshinfer.agent import files
from meshinfer.agent.files import HomeLock, agent_runs, read_bounded, restrict_by_access_list, write_atomic
from meshinfer.errors import MeshinferError, UserError

posix = pytest.mark.skipif(os.name != "posix", reason="mode bits are POSIX's; Windows has access lists")


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    tree = Path(files.__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tree,
        timeout=60,
        check=False,
    )


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "größe.bin"
    write_atomic(path, b"first, and longer")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["größe.bin"]


# Kills the writer at a point of its work, as a power cut would: `os._exit` runs no handler, flushes nothing.
_KILLED = """
import os, sys
from pathlib import Path
from meshinfer.agent import files
where, path = sys.argv[1], Path(sys.argv[2])
def die(*_): os._exit(9)
if where == "in the middle of the data":
    real = os.fdopen
    def opened(*arguments):
        file = real(*arguments)
        class Half:
            def __enter__(self): return self
            def __exit__(self, *_): pass
            def write(self, data): file.write(data[: len(data) // 2]); file.flush(); die()
        return Half()
    os.fdopen = opened
elif where == "before the data are on disk":
    os.fsync = die
elif where == "before the name is":
    Path.replace = die
elif where == "after the name is":
    files.sync_directory = die
files.write_atomic(path, b"new" * 1000, secret=True)
"""


@pytest.mark.parametrize(
    ("where", "content"),
    [
        ("in the middle of the data", b"old"),
        ("before the data are on disk", b"old"),
        ("before the name is", b"old"),
        ("after the name is", b"new" * 1000),
    ],
)
def test_a_torn_write_leaves_the_old_file_or_the_new_one(tmp_path: Path, where: str, content: bytes) -> None:
    path = tmp_path / "identity.key"
    write_atomic(path, b"old", secret=True)
    assert run_python(_KILLED, where, path).returncode == 9
    assert path.read_bytes() == content
    write_atomic(path, b"next", secret=True)
    assert path.read_bytes() == b"next"


def test_what_a_killed_writer_left_is_removed_in_time(tmp_path: Path) -> None:
    run_python(_KILLED, "before the name is", tmp_path / "mesh.key")
    (left,) = tmp_path.iterdir()
    (tmp_path / "notes.tmp").write_text("a person's")
    now = left.stat().st_mtime
    assert files.remove_leftovers(tmp_path, now + 60) == 0
    assert files.remove_leftovers(tmp_path, now + 7200) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.tmp"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_atomic(tmp_path / "taken", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


@posix
def test_a_secret_is_private_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = os.fsync

    def watch(descriptor: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        real(descriptor)

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "fsync", watch)
        write_atomic(tmp_path / "key", b"secret", secret=True)
    finally:
        os.umask(before)
    assert seen[0] == 0o600
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@posix
def test_a_secret_replaces_one_that_was_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_atomic(path, b"new", secret=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@posix
def test_a_link_in_the_place_of_a_secret_is_replaced_and_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"theirs")
    (tmp_path / "key").symlink_to(elsewhere)
    write_atomic(tmp_path / "key", b"secret", secret=True)
    assert elsewhere.read_bytes() == b"theirs"
    assert not (tmp_path / "key").is_symlink()


@posix
def test_a_new_home_is_private(tmp_path: Path) -> None:
    home = files.private_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="is a file"):
        files.private_directory(tmp_path / "file")


def test_windows_access_lists_name_the_owner_whatever_the_letters(tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> int:
        commands.append(command)
        return 0

    path = tmp_path / "ключ.key"
    path.write_bytes(b"")
    restrict_by_access_list(path, run, lambda: "BÜRO\\Jürgen Łukasz 田中")
    restrict_by_access_list(tmp_path, run, lambda: "PC\\x")
    assert commands[0][0].endswith("icacls.exe")
    assert commands[0][1:] == [
        str(path),
        "/inheritance:r",
        "/grant:r",
        "BÜRO\\Jürgen Łukasz 田中:F",
        "*S-1-5-18:F",
        "/q",
    ]
    assert "PC\\x:(OI)(CI)F" in commands[1]


def test_a_secret_that_cannot_be_made_private_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MeshinferError, match="private"):
        restrict_by_access_list(tmp_path / "key", lambda _: 5, lambda: "PC\\x")


def test_reading_is_bounded(tmp_path: Path) -> None:
    assert read_bounded(tmp_path / "none") is None
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(UserError, match="larger"):
        read_bounded(tmp_path / "file", 4)


_LOCK = """
import sys
from pathlib import Path
from meshinfer.agent.files import HomeLock
from meshinfer.errors import UserError
try:
    HomeLock(Path(sys.argv[1])).acquire()
except UserError as error:
    print(error); sys.exit(2)
"""


def test_two_agents_do_not_share_a_home(tmp_path: Path) -> None:
    assert not agent_runs(tmp_path)
    with HomeLock(tmp_path):
        assert agent_runs(tmp_path)
        second = run_python(_LOCK, tmp_path)
        assert second.returncode == 2
        assert str(os.getpid()) in second.stdout
        assert "--home" in second.stdout
    assert not agent_runs(tmp_path)
    assert run_python(_LOCK, tmp_path).returncode == 0


def test_the_lock_of_a_killed_agent_is_free(tmp_path: Path) -> None:
    code = _LOCK + "\nprint('held', flush=True); sys.stdin.read()"
    tree = Path(files.__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"held"
        assert agent_runs(tmp_path)
        holder.kill()
        holder.wait()
        assert not agent_runs(tmp_path)


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """Or an agent that crashed could not be restarted while something it had started still ran."""
    code = (
        _LOCK
        + "\nimport os, subprocess"
        + "\nsubprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read(); print(1)'])"
        + "\nos._exit(0)"
    )
    tree = Path(files.__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.wait(30) == 0
        assert not agent_runs(tmp_path)
        # The child was alive all the while: it answers now.
        assert parent.communicate(timeout=30)[0].strip() == b"1"
