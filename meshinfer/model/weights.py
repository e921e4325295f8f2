"""The files of one model on disk: what is there, what is missing, and taking in only what its hash
confirms.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from meshinfer.errors import ModelError
from meshinfer.limits import MANIFEST_BYTES, MIB, NAME_CHARS, SMALL_CONSTANTS_BYTES
from meshinfer.model import graph_check
from meshinfer.model.manifest import (
    GRAPH,
    SMALL,
    TEMPLATE,
    TOKENIZER,
    FileEntry,
    Manifest,
    Piece,
    segments_of,
)
from meshinfer.model.sparse import create_sparse, disk_error, replace_durably, sync
from meshinfer.text import is_printable
from meshinfer.values import ModelId, Span

MANIFEST_FILE: Final = "manifest.json"
WEIGHTS_FILE: Final = "weights.bin"
HAVE_FILE: Final = "have.json"
NAME_FILE: Final = "name"
_FILE_NAMES: Final[Mapping[str, str]] = {
    GRAPH: "model.xml",
    SMALL: "small.bin",
    TOKENIZER: TOKENIZER,
    TEMPLATE: TEMPLATE,
}

RECORD_BYTES: Final = 64 * MIB
"""Pieces are recorded after so many bytes: an fsync each would halve the speed of a disk, and what a crash
leaves unrecorded is found again by its hash."""

_SAMPLE_BYTES: Final = 64


class ModelFiles:
    """One directory of the store, named by the model's id. Safe to use from several threads; one process at
    a time.

    A piece counts as held once its hash was right; it is recorded in `have.json` only after its bytes are on
    the disk.
    """

    def __init__(self, directory: Path) -> None:
        """Opens what is there. Raises ModelError where the directory holds no model or one of another id."""
        self.directory = directory
        self.manifest = Manifest.parse(read_bounded(directory / MANIFEST_FILE, MANIFEST_BYTES))
        if directory.name != self.manifest.model:
            raise ModelError(
                f"{directory} holds a model of another id ({self.manifest.model[:12]}…): remove the "
                f"directory and pull again"
            )
        # What is held is asked for from the agent's loop, which must not wait for a disk: hence two locks.
        self._lock = threading.Lock()
        self._recording = threading.Lock()
        self._held_files: set[str] = set()
        self._held: set[int] = set()
        self._unrecorded_bytes = 0
        self._index = {piece: number for number, piece in enumerate(self.manifest.all_pieces)}
        self._by_digest: dict[bytes, list[int]] = {}
        for number, piece in enumerate(self.manifest.all_pieces):
            self._by_digest.setdefault(piece.digest, []).append(number)
        self._recover()

    @classmethod
    def create(cls, store: Path, manifest: bytes, name: str) -> ModelFiles:
        """The directory for `manifest` under `store`, made if it is not there: sparse weights, nothing held.

        Raises ModelError for a manifest that is damaged or a disk that refuses.
        """
        parsed = Manifest.parse(manifest)
        directory = store / parsed.model
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / MANIFEST_FILE).exists():
                # The manifest is written last, so without one all else is what a crash left.
                for leftover in (WEIGHTS_FILE, HAVE_FILE):
                    (directory / leftover).unlink(missing_ok=True)
                create_sparse(directory / WEIGHTS_FILE, parsed.weights_size)
                replace_durably(directory / NAME_FILE, name.encode("utf-8"))
                replace_durably(directory / MANIFEST_FILE, manifest)
        except OSError as error:
            raise disk_error(error, f"making room for {name}") from error
        return cls(directory)

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def model(self) -> ModelId:
        return self.manifest.model

    @property
    def name(self) -> str:
        """What the person called it; never used for a path."""
        try:
            text = read_bounded(self.directory / NAME_FILE, 4 * NAME_CHARS).decode("utf-8")
        except (ModelError, UnicodeDecodeError):
            text = ""
        return text if text and is_printable(text, NAME_CHARS) else self.model[:12]

    def rename(self, name: str) -> None:
        """Raises ModelError where the disk refuses."""
        try:
            replace_durably(self.directory / NAME_FILE, name[:NAME_CHARS].encode("utf-8"))
        except OSError as error:
            raise disk_error(error, f"naming the model {name[:NAME_CHARS]}") from error

    @property
    def weights_path(self) -> Path:
        return self.directory / WEIGHTS_FILE

    @property
    def complete(self) -> bool:
        """Whether every byte of the model can be served from here."""
        with self._lock:
            whole = len(self._held) == len(self.manifest.all_pieces)
        return whole and not self.missing_files()

    def missing(self, span: Span | None = None, asker: bool = False) -> list[Piece]:
        """The pieces of weights still to be fetched to run `span`, to ask, or both; without arguments,
        all.
        """
        everything = span is None and not asker
        segments = self.manifest.segments if everything else segments_of(span, asker)
        with self._lock:
            return [piece for piece in self.manifest.pieces(segments) if self._index[piece] not in self._held]

    def missing_files(self, asker: bool = True) -> list[FileEntry]:
        """The other files still to be fetched, in the order to fetch them; the text's are needed by the
        asker only.
        """
        wanted = (GRAPH, SMALL, TOKENIZER, TEMPLATE) if asker else (GRAPH, SMALL)
        entries = (self.manifest.file(name) for name in wanted)
        with self._lock:
            return [entry for entry in entries if entry is not None and entry.name not in self._held_files]

    def ready(self, span: Span | None, asker: bool) -> bool:
        """Whether nothing is missing to run `span`, to ask, or both."""
        if self.missing_files(asker):
            return False
        return not (span or asker) or not self.missing(span, asker)

    def read_file(self, name: str) -> bytes | None:
        """A file of the model besides its weights, None where the model has none. Raises ModelError if not
        yet here.
        """
        entry = self.manifest.file(name)
        if entry is None:
            return None
        with self._lock:
            if name not in self._held_files:
                raise ModelError(
                    f"the model's {name} has not arrived yet: try again when the transfer is done"
                )
        data = read_bounded(self.directory / _FILE_NAMES[name], entry.size)
        if hashlib.sha256(data).digest() != entry.digest:
            raise ModelError(
                f"the model's {name} was changed on disk: remove {self.directory} and pull again"
            )
        return data

    def drop_damaged(self, span: Span | None = None, asker: bool = False) -> int:
        """Reads what is held of `span`, of what asking needs, or both, and gives up what its hash no longer confirms.

        Call before it is used: a disk rots, and a file can be changed. Returns how many pieces are missing because of
        it. Takes about a second for each gigabyte. Raises ModelError where the weights cannot be read.
        """
        wanted = [self._index[piece] for piece in self.manifest.pieces(segments_of(span, asker))]
        damaged = set()
        try:
            with self.weights_path.open("rb") as file:
                for number in wanted:
                    piece = self.manifest.all_pieces[number]
                    with self._lock:
                        held = number in self._held
                    if (
                        held
                        and hashlib.sha256(_read_at(file, piece.offset, piece.length)).digest()
                        != piece.digest
                    ):
                        damaged.add(number)
        except OSError as error:
            raise disk_error(error, f"reading the weights of {self.name}") from error
        if damaged:
            with self._lock:
                self._held -= damaged
            self.flush()
        return len(damaged)

    # ── serving others ──────────────────────────────────────────────────────────────────────────────────────

    def blob_size(self, digest: bytes) -> int | None:
        """How many bytes hash to `digest`, if they are here: the manifest (whose hash is the model's id), a
        file or a piece.
        """
        located = self._locate(digest)
        return located[2] if located else None

    def read_blob(self, digest: bytes, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` of what hashes to `digest`. Raises ModelError where it is not
        here.

        What is served was checked when it arrived; who receives it checks it again.
        """
        located = self._locate(digest)
        if located is None:
            raise ModelError("that part of the model is not here: ask another peer")
        path, start, size = located
        if offset < 0 or length < 0 or offset > size:
            raise ModelError(
                f"that part of the model has {size} bytes, and bytes from {offset} were asked for"
            )
        try:
            with path.open("rb") as file:
                file.seek(start + offset)
                return file.read(min(length, size - offset))
        except OSError as error:
            raise disk_error(error, f"reading {path.name}") from error

    def _locate(self, digest: bytes) -> tuple[Path, int, int] | None:
        if digest.hex() == self.model:
            return self.directory / MANIFEST_FILE, 0, len(self.manifest.to_bytes())
        with self._lock:
            for number in self._by_digest.get(digest, ()):
                if number in self._held:
                    piece = self.manifest.all_pieces[number]
                    return self.weights_path, piece.offset, piece.length
            for entry in self.manifest.files:
                if entry.digest == digest and entry.name in self._held_files:
                    return self.directory / _FILE_NAMES[entry.name], 0, entry.size
        return None

    # ── taking in ───────────────────────────────────────────────────────────────────────────────────────────

    def write_piece(self, piece: Piece, data: bytes | memoryview) -> None:
        """Takes `data` in for `piece`. Raises ModelError, nothing changed, where its hash differs or the
        disk is full.
        """
        number = self._index.get(piece)
        if number is None:
            raise ModelError("that piece of weights is not of this model")
        if len(data) != piece.length or hashlib.sha256(data).digest() != piece.digest:
            raise ModelError(
                f"weights from {piece.offset} arrived damaged: they are fetched again, from elsewhere"
            )
        with self._lock:
            if number in self._held:
                return
        try:
            with self.weights_path.open("r+b") as file:
                file.seek(piece.offset)
                file.write(data)
        except OSError as error:
            raise disk_error(error, f"storing weights of {self.name}") from error
        with self._lock:
            self._held.add(number)
            self._unrecorded_bytes += piece.length
            due = self._unrecorded_bytes >= RECORD_BYTES or len(self._held) == len(self.manifest.all_pieces)
        if due:
            self.flush()

    def write_file(self, name: str, data: bytes) -> None:
        """Takes in the graph, the small constants, the tokenizer or the template, by its name in the
        manifest.

        The small constants come after the graph, which says where they belong. Raises ModelError, nothing
        changed, where the hash differs, the graph is refused by `graph_check`, or the disk is full.
        """
        entry = self.manifest.file(name)
        if entry is None:
            raise ModelError(f"the model has no file {name!r}")
        if len(data) != entry.size or hashlib.sha256(data).digest() != entry.digest:
            raise ModelError(f"the model's {name} arrived damaged: it is fetched again, from elsewhere")
        if name == GRAPH:
            graph_check.check(data, self.manifest.weights_size)
        try:
            if name == SMALL:
                self._scatter(data)
            replace_durably(self.directory / _FILE_NAMES[name], data)
        except OSError as error:
            raise disk_error(error, f"storing {name} of {self.name}") from error
        with self._lock:
            self._held_files.add(name)
        self.flush()

    def flush(self) -> None:
        """Records all that is held, after its bytes reached the disk. Call at the end of a transfer. Raises
        ModelError.
        """
        with self._recording:
            with self._lock:
                files, pieces = sorted(self._held_files), set(self._held)
                self._unrecorded_bytes = 0
            # Only what was written before the sync may be recorded after it.
            record = {"files": files, "pieces": f"{sum(1 << number for number in pieces):x}"}
            try:
                with self.weights_path.open("r+b") as file:
                    sync(file)
                replace_durably(self.directory / HAVE_FILE, json.dumps(record).encode("ascii"))
            except OSError as error:
                raise disk_error(error, f"recording what has arrived of {self.name}") from error

    def _scatter(self, data: bytes) -> None:
        graph = self.read_file(GRAPH)
        assert graph is not None, "every manifest names a graph"
        ranges = graph_check.small_ranges(graph_check.check(graph, self.manifest.weights_size).constants)
        if sum(length for _, length in ranges) != len(data):
            raise ModelError("the model's small constants do not fit its graph: pull the model again")
        taken = 0
        with self.weights_path.open("r+b") as file:
            for offset, length in ranges:
                file.seek(offset)
                file.write(data[taken : taken + length])
                taken += length
            sync(file)

    # ── after a crash ───────────────────────────────────────────────────────────────────────────────────────

    def _recover(self) -> None:
        """Believes the record, which is written only after its bytes; whatever else is there is checked by
        its hash.
        """
        try:
            recorded_files, bits = _parse_record(read_bounded(self.directory / HAVE_FILE, MANIFEST_BYTES))
        except ModelError:
            recorded_files, bits = frozenset(), 0
        for entry in self.manifest.files:
            path = self.directory / _FILE_NAMES[entry.name]
            if path.exists() and (entry.name in recorded_files or _hashes_to(path, entry)):
                self._held_files.add(entry.name)
        try:
            with self.weights_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size != self.manifest.weights_size:
                    raise ModelError(
                        f"{self.weights_path} has {size} bytes instead of {self.manifest.weights_size}:"
                        f" remove {self.directory} and pull again"
                    )
                for number, piece in enumerate(self.manifest.all_pieces):
                    if bits >> number & 1 or _arrived(file, piece):
                        self._held.add(number)
            if {GRAPH, SMALL} <= self._held_files and SMALL not in recorded_files:
                # Its copy arrived; whether it was spread over the weights, nobody recorded.
                self._scatter(read_bounded(self.directory / _FILE_NAMES[SMALL], SMALL_CONSTANTS_BYTES))
        except OSError as error:
            raise disk_error(error, f"opening the weights of {self.name}") from error


def _arrived(file: BinaryIO, piece: Piece) -> bool:
    # A hole reads as zeros; looking at its ends first spares reading and hashing gigabytes of nothing.
    ends = (piece.offset, max(piece.offset, piece.end - _SAMPLE_BYTES))
    if not any(_read_at(file, offset, min(_SAMPLE_BYTES, piece.length)).strip(b"\0") for offset in ends):
        return False
    return hashlib.sha256(_read_at(file, piece.offset, piece.length)).digest() == piece.digest


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _hashes_to(path: Path, entry: FileEntry) -> bool:
    try:
        return hashlib.sha256(read_bounded(path, entry.size)).digest() == entry.digest
    except ModelError:
        return False


def _parse_record(data: bytes) -> tuple[frozenset[str], int]:
    try:
        record = json.loads(data)
        return frozenset(str(name) for name in record["files"]), int(record["pieces"], 16)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError("the record of what has arrived is damaged") from None


def read_bounded(path: Path, most: int) -> bytes:
    """The bytes of `path`, at most `most`. Raises ModelError where it is not there or longer."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror or error}): pull the model again"
        ) from error
    if len(data) > most:
        raise ModelError(f"{path} is longer than {most} bytes: pull the model again")
    return data
