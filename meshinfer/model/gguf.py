"""Reads and judges a GGUF file before the converter's C++ sees it: every length is checked before it is
believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). What
can be converted is what OpenVINO GenAI's GGUF reader takes; `check` refuses all that it would reject,
ignore or read wrongly.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshinfer import limits
from meshinfer.errors import ModelError

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
INSTEAD: Final = "take the model's OpenVINO form instead (meshinfer pull hf:OpenVINO/…)"
MATRIX_TYPES: Final = ("F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
VECTOR_TYPES: Final = ("F32", "F16")

# id: (name, numbers in a block, bytes of a block); ggml's `type_traits`.
TENSOR_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_DIMENSIONS: Final = 4

_BLOCK_MATRICES: Final = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_BLOCK_VECTORS: Final = ("attn_norm", "ffn_norm")
_BLOCK_OPTIONAL: Final = ("attn_q_norm", "attn_k_norm")
# The converter looks up these (and `rope` the last) and leaves out whatever else the file holds in silence.
_KNOWN_TENSOR: Final = re.compile(
    r"token_embd\.weight|output_norm\.weight|output\.(weight|bias)|rope_freqs\.weight"
    rf"|blk\.\d+\.({'|'.join(_BLOCK_MATRICES)})\.(weight|bias)"
    rf"|blk\.\d+\.({'|'.join(_BLOCK_VECTORS + _BLOCK_OPTIONAL)})\.weight"
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` is in the file's order, innermost first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """All of a GGUF file but its weights."""

    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"the GGUF file's {key} is no text: the file is damaged")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(
                f"the GGUF file says nothing usable for {key}: it is damaged or of an unknown kind"
            )
        return value

    def real(self, key: str, default: float) -> float:
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"the GGUF file's {key} is no number: the file is damaged")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(key, default))

    def texts(self, key: str) -> list[str]:
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"the GGUF file's {key} is no list of texts: the file is damaged")
        return [str(item) for item in value]

    def numbers(self, key: str) -> list[int]:
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ModelError(f"the GGUF file's {key} is no list of numbers: the file is damaged")
        return [int(item) for item in value]

    @property
    def quantization(self) -> str:
        """The tensor type that most bytes of the weights have, such as `Q4_1`."""
        bytes_of: Counter[str] = Counter()
        for tensor in self.tensors:
            bytes_of[tensor.kind] += tensor.size_bytes
        return bytes_of.most_common(1)[0][0]


def read_header(path: Path) -> Header:
    """The header of the file at `path`; `ModelError` for whatever is not a whole, well-formed GGUF file."""
    size = path.stat().st_size
    if size < 24:
        raise ModelError(f"{path.name} is no GGUF file: it has just {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data, size, path.name).header()


class _Reader:
    """A cursor that never passes the end of the file or the bound on headers."""

    def __init__(self, data: mmap.mmap, size: int, name: str) -> None:
        self._data = data
        self._size = size
        self._end = min(size, limits.GGUF_HEADER_BYTES)
        self._name = name
        self._at = 0

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise self._bad("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self._name} is GGUF version {version}; this program reads versions 2 and 3, little-endian:"
                " get a newer conversion of the model"
            )
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        if tensors > limits.GGUF_TENSORS or pairs > limits.GGUF_PAIRS:
            raise self._bad(f"it announces {tensors} tensors and {pairs} metadata entries")
        metadata = self._metadata(pairs)
        return Header(metadata, self._tensors(tensors, metadata))

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise self._bad(f"its metadata names {key[:64]!r} twice")
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind in _SCALARS:
            value: int | float | bool = self._unpack(_SCALARS[kind], 1)[0]
            return value
        raise self._bad(f"a metadata value has the unknown type {kind}")

    def _array(self) -> Value:
        kind, count = self._scalar("I"), self._scalar("Q")
        if count > limits.VOCABULARY:
            raise self._bad(f"a metadata list has {count} entries")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind in _SCALARS:
            values: Value = list(self._unpack(_SCALARS[kind], count))
            return values
        raise self._bad(f"a metadata list has entries of the unknown type {kind}")

    def _tensors(self, count: int, metadata: dict[str, Value]) -> tuple[Tensor, ...]:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 64 * limits.KIB:
            raise self._bad(f"its alignment is {alignment!r}")
        described = [self._tensor() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        placed = tuple(
            Tensor(name, shape, kind, start + offset, size) for name, shape, kind, offset, size in described
        )
        if len({tensor.name for tensor in placed}) != count:
            raise self._bad("two of its tensors have one name")
        end = max((tensor.offset + tensor.size_bytes for tensor in placed), default=start)
        if end > self._size:
            raise ModelError(
                f"{self._name} is cut short: its weights need {end:,} bytes and it has {self._size:,};"
                " fetch it again"
            )
        return placed

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name, rank = self._string(), self._scalar("I")
        if not 1 <= rank <= _DIMENSIONS:
            raise self._bad(f"tensor {name[:64]!r} has {rank} dimensions")
        shape = self._unpack("Q", rank)
        kind_id, offset = self._scalar("I"), self._scalar("Q")
        if kind_id not in TENSOR_TYPES:
            raise ModelError(
                f"{self._name} holds tensors of type {kind_id}, which is not known here:"
                " choose another file of this model"
            )
        kind, block, block_bytes = TENSOR_TYPES[kind_id]
        count = 1
        for dimension in shape:
            count *= dimension
        if not all(shape) or shape[0] % block or count // block * block_bytes > self._size:
            raise self._bad(f"tensor {name[:64]!r} cannot have the shape {list(shape)}")
        return name, tuple(int(dimension) for dimension in shape), kind, offset, count // block * block_bytes

    def _string(self) -> str:
        # Real files hold broken UTF-8 in descriptions; where it matters (vocabulary) the result is checked
        # again.
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _scalar(self, code: str) -> int:
        return int(self._unpack(code, 1)[0])

    def _unpack(self, code: str, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}")))

    def _take(self, count: int) -> bytes:
        if count > self._end - self._at:
            raise self._bad(f"its header does not end within {self._end:,} bytes")
        self._at += count
        return self._data[self._at - count : self._at]

    def _bad(self, what: str) -> ModelError:
        return ModelError(
            f"{self._name} is no GGUF file that can be read: {what}; fetch it again or choose another"
        )


def check(header: Header) -> None:
    """Raises `ModelError`, naming the reason, for a model that the converter would not turn into the same
    model.
    """
    architecture = header.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"GGUF files of architecture {architecture[:64]!r} cannot be converted,"
            f" only {', '.join(ARCHITECTURES)}: {INSTEAD}"
        )
    if header.number("split.count", 1) > 1:
        raise ModelError("this GGUF file is one of several parts: join them first (llama-gguf-split --merge)")
    _check_types(header)
    _check_tensors(header)
    _check_attention(header)


def _check_types(header: Header) -> None:
    for tensor in header.tensors:
        matrix = len(tensor.shape) > 1
        supported = MATRIX_TYPES if matrix else VECTOR_TYPES
        if tensor.kind not in supported:
            raise ModelError(
                f"the GGUF file holds {tensor.name} as {tensor.kind}, which cannot be converted:"
                f" {', '.join(supported)} can be, as in files named Q4_0, Q4_1, Q8_0, Q4_K_M or F16"
            )


def _check_tensors(header: Header) -> None:
    names = {tensor.name for tensor in header.tensors}
    for name in sorted(names):
        if not _KNOWN_TENSOR.fullmatch(name):
            raise ModelError(
                f"the GGUF file holds {name[:64]!r}, which the conversion would leave out,"
                f" so that the model would answer wrongly: {INSTEAD}"
            )
    layers = header.number(f"{header.architecture}.block_count")
    if not 1 <= layers <= limits.LAYERS:
        raise ModelError(f"the GGUF file announces {layers} layers: it is damaged")
    blocks = (
        f"blk.{layer}.{part}.weight" for layer in range(layers) for part in _BLOCK_MATRICES + _BLOCK_VECTORS
    )
    for name in ("token_embd.weight", "output_norm.weight", *blocks):
        if name not in names:
            raise ModelError(f"the GGUF file lacks {name}: it is damaged or holds only a part of the model")
    beyond = f"blk.{layers}."
    if any(name.startswith(beyond) for name in names):
        raise ModelError(f"the GGUF file announces {layers} layers and holds more: it is damaged")


def _check_attention(header: Header) -> None:
    """Variants of attention that llama.cpp knows and the conversion ignores."""
    prefix = header.architecture
    heads = header.number(f"{prefix}.attention.head_count")
    hidden = header.number(f"{prefix}.embedding_length")
    kv_heads = header.number(f"{prefix}.attention.head_count_kv", heads)
    if not 1 <= kv_heads <= heads <= hidden <= limits.HIDDEN or heads % kv_heads:
        raise ModelError(
            f"the GGUF file announces {heads} heads, {kv_heads} for keys, of {hidden} in all: it is damaged"
        )
    head = header.number(f"{prefix}.attention.key_length", hidden // heads)
    _check_shapes(header, hidden, heads * head, kv_heads * head)
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.number(f"{prefix}.{key}", head) != head:
            raise ModelError(
                f"the GGUF file has {key} apart from the size of a head ({head}),"
                f" which the conversion would ignore: {INSTEAD}"
            )
    scaling = header.text(f"{prefix}.rope.scaling.type", "none")
    if scaling not in ("none", "") and header.real(f"{prefix}.rope.scaling.factor", 1.0) != 1.0:
        raise ModelError(
            f"the GGUF file scales positions ({scaling[:32]}), which the conversion would ignore: {INSTEAD}"
        )


def _check_shapes(header: Header, hidden: int, queries: int, keys: int) -> None:
    """Metadata and weights must mean one model: the converter reads what fits neither without a word."""
    inner = header.number(f"{header.architecture}.feed_forward_length")
    shapes = {
        "attn_q": (hidden, queries),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_output": (queries, hidden),
        "ffn_gate": (hidden, inner),
        "ffn_up": (hidden, inner),
        "ffn_down": (inner, hidden),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    for tensor in header.tensors:
        block, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        expected = shapes.get(part) if block.startswith("blk.") else None
        if tensor.name in ("token_embd.weight", "output.weight"):
            expected = (hidden, tensor.shape[-1])
        if expected is not None and tensor.shape != expected:
            raise ModelError(
                f"the GGUF file's {tensor.name} has the shape {list(tensor.shape)} where its metadata"
                f" mean {list(expected)}: it is damaged, fetch it again"
            )
