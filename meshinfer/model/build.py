"""Describes a whole model that lies on this PC by its manifest, and takes it into the store."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from meshinfer.errors import ModelError
from meshinfer.limits import GRAPH_BYTES, SMALL_CONSTANTS_BYTES, UNKNOWN_CONTEXT_TOKENS, WEIGHTS_BYTES
from meshinfer.model import graph_check, ranges
from meshinfer.model.graph import PagedGraph
from meshinfer.model.graph_check import ELEMENT_BITS, CheckedGraph, ConstantRange
from meshinfer.model.manifest import (
    GRAPH,
    SMALL,
    TEMPLATE,
    TOKENIZER,
    FileEntry,
    Manifest,
    ModelConfig,
    Piece,
)
from meshinfer.model.mapping import mapped_briefly
from meshinfer.model.progress import Progress
from meshinfer.model.sparse import disk_error
from meshinfer.model.textfiles import TextFiles
from meshinfer.model.weights import ModelFiles, read_bounded

_LABELS: Final = {"u4": "int4", "i4": "int4", "u8": "int8", "i8": "int8", "u2": "int2", "i2": "int2"}


def build_manifest(xml: Path, weights: Path, texts: TextFiles, progress: Progress) -> Manifest:
    """The manifest of the IR in `xml` and `weights`, which has to be whole and still.

    Raises ModelError where the graph is refused, cannot be paged or cut, or a file cannot be read.
    """
    try:
        size = weights.stat().st_size
    except OSError as error:
        raise disk_error(error, f"reading the weights {weights}") from error
    if not 0 < size <= WEIGHTS_BYTES:
        raise ModelError(f"the weights {weights} are {size} bytes: the model is damaged, get it again")
    checked = graph_check.check(read_bounded(xml, GRAPH_BYTES), size)
    config, divided = _examine(checked, weights, texts)
    with _opened(weights) as file:
        small = _small(file, checked.constants)
        pieces = _hashed(file, divided, progress)
    owned = [
        tuple(i for i, item in enumerate(divided) if segment in item.segments)
        for segment in range(config.layers + 3)
    ]
    embedding, *layers, head, rest = owned
    return Manifest(
        weights_size=size,
        all_pieces=pieces,
        embedding=embedding,
        layers=tuple(layers),
        head=head,
        rest=rest,
        files=_entries(checked.xml, small, texts),
        config=config,
    )


def adopt(
    store: Path, manifest: Manifest, name: str, xml: Path, weights: Path, texts: TextFiles, progress: Progress
) -> ModelFiles:
    """Takes what `build_manifest` described into `store`. An interrupted adoption resumes where it was.

    Only what the manifest covers is copied, and each piece is checked. Raises ModelError, also where the
    files changed meanwhile.
    """
    files = ModelFiles.create(store, manifest.to_bytes(), name)
    missing = files.missing()
    total = sum(piece.length for piece in missing)
    done = 0
    with _opened(weights) as file:
        for entry in files.missing_files():
            files.write_file(entry.name, _content(entry.name, xml, file, manifest, texts))
        for piece in missing:
            progress.update("copying", done, total)
            files.write_piece(piece, _read(file, piece.offset, piece.length))
            done += piece.length
    progress.update("copying", total, total)
    files.flush()
    return files


def _examine(
    checked: CheckedGraph, weights: Path, texts: TextFiles
) -> tuple[ModelConfig, list[ranges.Range]]:
    with mapped_briefly(weights) as tensor:
        graph = PagedGraph(checked.xml, tensor)
        remaining = {str(node.get_friendly_name()) for node in graph.constant_nodes()}
        divided = ranges.divide(checked.constants, graph.constants(), remaining)
        config = ModelConfig(
            hidden=graph.hidden,
            vocabulary=graph.vocabulary,
            context=texts.context or UNKNOWN_CONTEXT_TOKENS,
            kv=graph.kv,
            # A token that the model cannot say ends nothing.
            eos=tuple(token for token in texts.eos if token < graph.vocabulary),
            bos=texts.bos if texts.bos is not None and texts.bos < graph.vocabulary else None,
            quantization=_label(checked.constants),
        )
        del graph
    return config, divided


def _label(constants: Sequence[ConstantRange]) -> str:
    """What most of the model's numbers are kept as: `int4`, `f16` and so on."""
    numbers: Counter[str] = Counter()
    for constant in constants:
        numbers[_LABELS.get(constant.element, constant.element)] += (
            constant.size * 8 // ELEMENT_BITS[constant.element]
        )
    return numbers.most_common(1)[0][0] if numbers else "none"


def _opened(weights: Path) -> BinaryIO:
    try:
        return weights.open("rb")
    except OSError as error:
        raise disk_error(error, f"reading the weights {weights}") from error


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    try:
        file.seek(offset)
        data = file.read(length)
    except OSError as error:
        raise disk_error(error, f"reading the weights {file.name}") from error
    if len(data) != length:
        raise ModelError(f"the weights {file.name} became shorter while they were read: try again")
    return data


def _small(file: BinaryIO, constants: Sequence[ConstantRange]) -> bytes:
    parts = graph_check.small_ranges(constants)
    size = sum(length for _, length in parts)
    if size > SMALL_CONSTANTS_BYTES:
        raise ModelError(
            f"the model has {size} bytes of small constants, and at most {SMALL_CONSTANTS_BYTES} are "
            f"supported"
        )
    return b"".join(_read(file, offset, length) for offset, length in parts)


def _hashed(file: BinaryIO, divided: Sequence[ranges.Range], progress: Progress) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    total = sum(item.end - item.offset for item in divided)
    done = 0
    for item in divided:
        progress.update("hashing", done, total)
        data = _read(file, item.offset, item.end - item.offset)
        pieces.append(Piece(item.offset, len(data), hashlib.sha256(data).digest()))
        done += len(data)
    progress.update("hashing", total, total)
    return tuple(pieces)


def _entries(xml: bytes, small: bytes, texts: TextFiles) -> tuple[FileEntry, ...]:
    files = {GRAPH: xml, SMALL: small, TOKENIZER: texts.tokenizer, TEMPLATE: texts.template}
    return tuple(
        FileEntry(name, hashlib.sha256(data).digest(), len(data))
        for name, data in sorted(files.items())
        if data is not None
    )


def _content(name: str, xml: Path, weights: BinaryIO, manifest: Manifest, texts: TextFiles) -> bytes:
    if name == SMALL:
        checked = graph_check.check(read_bounded(xml, GRAPH_BYTES), manifest.weights_size)
        return _small(weights, checked.constants)
    if name == GRAPH:
        return read_bounded(xml, GRAPH_BYTES)
    data = texts.tokenizer if name == TOKENIZER else texts.template
    if data is None:
        raise ModelError(f"the model's {name} is gone since it was described: pull it again")
    return data
