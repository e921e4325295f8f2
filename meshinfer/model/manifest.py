"""What a model consists of, down to the hash of each range of its weights; its own hash is the model's id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NoReturn, TypeAlias

from meshinfer.errors import ModelError
from meshinfer.limits import (
    CONTEXT_TOKENS,
    GRAPH_BYTES,
    HIDDEN,
    LAYERS,
    MANIFEST_BYTES,
    PIECE_BYTES,
    SMALL_CONSTANTS_BYTES,
    STOP_TOKENS,
    TEMPLATE_BYTES,
    TOKENIZER_BYTES,
    VOCABULARY,
    WEIGHTS_BYTES,
)
from meshinfer.values import KvShape, ModelFacts, ModelId, Span

FORMAT: Final = 1

Segment: TypeAlias = int | Literal["embedding", "head", "rest"]
"""A part of the model that has weights of its own: a layer by its number, or one of

- `embedding` and `head`: what the asker runs before the first and after the last layer;
- `rest`: what none of these needs, but the model as it came does (a mask, say); only `verify` reads it.
"""

EMBEDDING: Final = "embedding"
HEAD: Final = "head"
REST: Final = "rest"

GRAPH: Final = "graph"
SMALL: Final = "small"
TOKENIZER: Final = "tokenizer.json"
TEMPLATE: Final = "chat_template.jinja"

FILE_BYTES: Final[Mapping[str, int]] = {
    GRAPH: GRAPH_BYTES,
    SMALL: SMALL_CONSTANTS_BYTES,
    TOKENIZER: TOKENIZER_BYTES,
    TEMPLATE: TEMPLATE_BYTES,
}
"""The files that a model may have besides its weights, and the most bytes each may be. No other name is
accepted.

`small` is the concatenation, in order of offset, of the ranges of `graph_check.small_ranges`.
"""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """`length` bytes of the weights from `offset`, and their SHA-256."""

    offset: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file that belongs to a model besides its weights: its name in `FILE_BYTES`, SHA-256 and size in
    bytes.
    """

    name: str
    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is known of a model beyond its bytes. `context` is in tokens; `eos` are the tokens that end an
    answer.
    """

    hidden: int
    vocabulary: int
    context: int
    kv: tuple[KvShape, ...]
    eos: tuple[int, ...]
    bos: int | None
    quantization: str

    @property
    def layers(self) -> int:
        return len(self.kv)


@dataclass(frozen=True)
class Manifest:
    """All of a model, without its name: the same weights have the same id, whatever they are called.

    `all_pieces` are sorted and do not overlap; a segment is an ascending tuple of indices into them, so
    that tied embedding and head share theirs. `layers[i]` is the segment of layer i.
    """

    weights_size: int
    all_pieces: tuple[Piece, ...]
    embedding: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    head: tuple[int, ...]
    rest: tuple[int, ...]
    files: tuple[FileEntry, ...]
    config: ModelConfig

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """The manifest that `data` is the canonical form of. Raises ModelError for anything else."""
        if len(data) > MANIFEST_BYTES:
            _refuse(f"it is {len(data)} bytes long, and at most {MANIFEST_BYTES} are accepted")
        manifest = _manifest(_json(data))
        if manifest.to_bytes() != data:
            _refuse("it is not in canonical form")
        return manifest

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII, digests in lower-case hex."""
        config = self.config
        tree = {
            "format": FORMAT,
            "weights": self.weights_size,
            "pieces": [[piece.offset, piece.length, piece.digest.hex()] for piece in self.all_pieces],
            "embedding": self.embedding,
            "layers": self.layers,
            "head": self.head,
            "rest": self.rest,
            "files": {entry.name: [entry.digest.hex(), entry.size] for entry in self.files},
            "config": {
                "hidden": config.hidden,
                "vocabulary": config.vocabulary,
                "context": config.context,
                "kv": [[shape.heads, shape.key, shape.value] for shape in config.kv],
                "eos": config.eos,
                "bos": config.bos,
                "quantization": config.quantization,
            },
        }
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @cached_property
    def model(self) -> ModelId:
        return ModelId(hashlib.sha256(self.to_bytes()).hexdigest())

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (EMBEDDING, *range(len(self.layers)), HEAD, REST)

    def pieces(self, segments: Iterable[Segment]) -> tuple[Piece, ...]:
        """The pieces of all these segments, in order of offset, each once. Raises ModelError for a layer it
        lacks.
        """
        wanted = {index for segment in segments for index in self._indices(segment)}
        return tuple(self.all_pieces[index] for index in sorted(wanted))

    def bytes_of(self, segments: Iterable[Segment]) -> int:
        return sum(piece.length for piece in self.pieces(segments))

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    def facts(self, name: str) -> ModelFacts:
        """What placement needs to know, under the name that the person uses."""
        return ModelFacts(
            model=self.model,
            name=name,
            layer_bytes=tuple(self.bytes_of([layer]) for layer in range(len(self.layers))),
            kv=self.config.kv,
            embedding_bytes=self.bytes_of([EMBEDDING]),
            head_bytes=self.bytes_of([HEAD]),
            hidden=self.config.hidden,
            context=self.config.context,
            vocabulary=self.config.vocabulary,
        )

    def _indices(self, segment: Segment) -> tuple[int, ...]:
        if segment == EMBEDDING:
            return self.embedding
        if segment == HEAD:
            return self.head
        if segment == REST:
            return self.rest
        if isinstance(segment, int) and 0 <= segment < len(self.layers):
            return self.layers[segment]
        raise ModelError(f"the model has no segment {segment!r}: it has {len(self.layers)} layers")


def segments_of(span: Span | None, asker: bool) -> tuple[Segment, ...]:
    """What a peer must hold that runs `span`, that asks, or both."""
    layers: tuple[Segment, ...] = tuple(range(span.first, span.last)) if span else ()
    return (EMBEDDING, *layers, HEAD) if asker else layers


# ── parsing: everything is hostile until checked ────────────────────────────────────────────────────────────


def _refuse(why: str) -> NoReturn:
    raise ModelError(f"the model's manifest is damaged: {why}; pull the model again")


def _json(data: bytes) -> object:
    def unwanted(_text: str) -> NoReturn:
        _refuse("it holds a number that is not an integer")

    try:
        return json.loads(data.decode("ascii"), parse_float=unwanted, parse_constant=unwanted)
    except (ValueError, RecursionError):
        _refuse("it is not JSON")


def _manifest(tree: object) -> Manifest:
    fields = _fields(
        tree,
        "manifest",
        {"format", "weights", "pieces", "embedding", "layers", "head", "rest", "files", "config"},
    )
    if fields["format"] != FORMAT:
        _refuse(f"its format is {_brief(fields['format'])}, this program reads {FORMAT}")
    weights_size = _integer(fields["weights"], "weights", 1, WEIGHTS_BYTES)
    pieces = _pieces(fields["pieces"], weights_size)
    config = _config(fields["config"])
    layers = _list(fields["layers"], "layers", LAYERS)
    if len(layers) != config.layers:
        _refuse(f"it has {len(layers)} layers and {config.layers} KV shapes")
    manifest = Manifest(
        weights_size=weights_size,
        all_pieces=pieces,
        embedding=_segment(fields["embedding"], len(pieces)),
        layers=tuple(_segment(layer, len(pieces)) for layer in layers),
        head=_segment(fields["head"], len(pieces)),
        rest=_segment(fields["rest"], len(pieces)),
        files=_files(fields["files"]),
        config=config,
    )
    if len(manifest.pieces(manifest.segments)) != len(pieces):
        _refuse("a piece belongs to no segment")
    return manifest


def _pieces(value: object, weights_size: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    end = 0
    for item in _list(value, "pieces", MANIFEST_BYTES):
        offset, length, digest = _tuple(item, "piece", 3)
        first = _integer(offset, "piece offset", end, weights_size)
        size = _integer(length, "piece length", 1, min(PIECE_BYTES, weights_size - first))
        pieces.append(Piece(first, size, _digest(digest)))
        end = first + size
    return tuple(pieces)


def _segment(value: object, pieces: int) -> tuple[int, ...]:
    indices: list[int] = []
    for item in _list(value, "segment", pieces):
        indices.append(_integer(item, "piece index", indices[-1] + 1 if indices else 0, pieces - 1))
    return tuple(indices)


def _files(value: object) -> tuple[FileEntry, ...]:
    if not isinstance(value, dict):
        _refuse("its files are not a table")
    entries: list[FileEntry] = []
    for name in sorted(value):
        if name not in FILE_BYTES:
            _refuse(f"it names a file {_brief(name)} that no model has")
        digest, size = _tuple(value[name], "file", 2)
        entries.append(FileEntry(name, _digest(digest), _integer(size, name, 0, FILE_BYTES[name])))
    if not {GRAPH, SMALL} <= value.keys():
        _refuse("it lacks the graph or its small constants")
    return tuple(entries)


def _config(value: object) -> ModelConfig:
    fields = _fields(value, "config", {"hidden", "vocabulary", "context", "kv", "eos", "bos", "quantization"})
    vocabulary = _integer(fields["vocabulary"], "vocabulary", 1, VOCABULARY)
    bos = fields["bos"]
    return ModelConfig(
        hidden=_integer(fields["hidden"], "hidden", 1, HIDDEN),
        vocabulary=vocabulary,
        context=_integer(fields["context"], "context", 1, CONTEXT_TOKENS),
        kv=tuple(_kv(item) for item in _list(fields["kv"], "kv", LAYERS)),
        eos=tuple(
            _integer(item, "eos", 0, vocabulary - 1) for item in _list(fields["eos"], "eos", STOP_TOKENS)
        ),
        bos=None if bos is None else _integer(bos, "bos", 0, vocabulary - 1),
        quantization=_label(fields["quantization"]),
    )


def _kv(value: object) -> KvShape:
    heads, key, width = (_integer(item, "KV shape", 1, HIDDEN) for item in _tuple(value, "KV shape", 3))
    return KvShape(heads, key, width)


def _fields(value: object, what: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        _refuse(f"its {what} does not have the fields {', '.join(sorted(names))}")
    return value


def _list(value: object, what: str, most: int) -> Sequence[object]:
    if not isinstance(value, list) or len(value) > most:
        _refuse(f"its {what} is not a list of at most {most}")
    return value


def _tuple(value: object, what: str, length: int) -> Sequence[object]:
    if not isinstance(value, list) or len(value) != length:
        _refuse(f"a {what} is not a list of {length}")
    return value


def _integer(value: object, what: str, least: int, most: int) -> int:
    # type() and not isinstance: True is an int to Python, and would make two spellings of one manifest.
    if type(value) is not int or not least <= value <= most:
        _refuse(f"its {what} is {_brief(value)} where {least} to {most} is expected")
    return value


def _digest(value: object) -> bytes:
    if isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef"):
        return bytes.fromhex(value)
    _refuse(f"{_brief(value)} is no SHA-256")


def _label(value: object) -> str:
    if isinstance(value, str) and len(value) <= 32 and value.isascii() and value.isprintable():
        return value
    _refuse(f"{_brief(value)} is no quantization label")


def _brief(value: object) -> str:
    """What stood there, short enough for one sentence; a huge integer is not even printed."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    text = repr(value) if isinstance(value, (str, int, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "…'"
