"""Checks a graph's XML before OpenVINO's reader sees it, and says where in the weights its constants lie.

The reader is C++ that trusts its input: it follows edges, resolves names, and maps offsets. So everything
it would act upon is checked here first, streaming, by a parser (expat) that is given no entity, no DTD and
no other file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeAlias
from xml.parsers import expat

from meshinfer.errors import ModelError
from meshinfer.limits import (
    GRAPH_BYTES,
    GRAPH_DEPTH,
    GRAPH_DIMENSION,
    GRAPH_ELEMENTS,
    GRAPH_RANK,
    SMALL_CONSTANT_BYTES,
)

ELEMENT_BITS: Final = {
    "boolean": 8, "u1": 1, "u2": 2, "u3": 3, "u4": 4, "u6": 6, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "i2": 2, "i4": 4, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "nf4": 4, "f4e2m1": 4, "f8e4m3": 8,
    "f8e5m2": 8, "f8e8m0": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
}  # fmt: skip
"""Bits of one element of each type that weights may have. Strings and dynamic types are not among them."""

_WORD: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_DIGITS: Final = re.compile(r"[0-9]{1,19}")
_RANGE: Final = re.compile(r"[0-9]{0,19}\.\.[0-9]{0,19}")
_PACKED_IN_GROUPS: Final = {"u3", "u6"}  # stored in groups of three bytes, so that sizes round up to 3
_CONTAINERS: Final = {
    "body",
    "then_body",
    "else_body",
    "port_map",
    "back_edges",
    "then_port_map",
    "else_port_map",
}
_NAME_CHARS: Final = 4096
_ID_MOST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ConstantRange:
    """One constant of the graph: its name there, and which bytes of the weights it is."""

    name: str
    offset: int
    size: int
    element: str

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def small(self) -> bool:
        return self.size < SMALL_CONSTANT_BYTES


@dataclass(frozen=True, slots=True)
class CheckedGraph:
    """XML that was found harmless, and the constants in it in the order in which they stand there."""

    xml: bytes
    constants: tuple[ConstantRange, ...]
    operations: frozenset[str]


def check(xml: bytes, weights_size: int) -> CheckedGraph:
    """The graph in `xml`, whose weights are `weights_size` bytes long. Raises ModelError, and nothing
    else.
    """
    if len(xml) > GRAPH_BYTES:
        _refuse(f"it is {len(xml)} bytes long, and at most {GRAPH_BYTES} are accepted")
    if b"\0" in xml:
        _refuse("it is not UTF-8")  # expat would follow a mark of UTF-16, whatever it is told
    reading = _Reading(weights_size)
    # No namespaces: with them expat would accept, under another name, what the reader then sees as an
    # element.
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler = reading.start
    parser.EndElementHandler = reading.end
    reading.hear_text = _text_switch(parser, reading)
    parser.StartDoctypeDeclHandler = lambda *_: _refuse("it has a document type, which no graph needs")
    parser.EntityDeclHandler = lambda *_: _refuse("it declares entities, which no graph needs")
    parser.ProcessingInstructionHandler = lambda *_: _refuse("it has processing instructions")
    try:
        parser.Parse(xml, True)
    except (expat.ExpatError, ValueError, UnicodeError) as error:
        raise ModelError(f"the model's graph is damaged: it is not well-formed XML ({error})") from None
    reading.finish()
    return CheckedGraph(xml, tuple(reading.constants), frozenset(reading.operations))


def small_ranges(constants: Iterable[ConstantRange]) -> tuple[tuple[int, int], ...]:
    """`(offset, length)` of the bytes that every peer has: those of all small constants, merged, in order."""
    merged: list[tuple[int, int]] = []
    for offset, end in sorted({(constant.offset, constant.end) for constant in constants if constant.small}):
        if merged and offset <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((offset, end))
    return tuple((offset, end - offset) for offset, end in merged)


def _refuse(why: str) -> NoReturn:
    raise ModelError(f"the model's graph is refused: {why}")


@dataclass(slots=True)
class _Node:
    """What is known of the layer element that is being read."""

    identity: int
    name: str
    kind: str
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    has_data: bool = False
    parts: set[str] = field(default_factory=set)


class _Reading:
    """The state of one pass over the XML. Paths are element names from the root down."""

    def __init__(self, weights_size: int) -> None:
        self.weights_size = weights_size
        self.constants: list[ConstantRange] = []
        self.operations: set[str] = set()
        self._path: list[str] = []
        self._sections: set[str] = set()
        self._node: _Node | None = None
        self._dims = 0
        self.hear_text: Callable[[bool], None] = lambda _hear: None
        self._ports: dict[int, tuple[set[int], set[int]]] = {}
        self._edges: set[tuple[int, int]] = set()
        self._successors: dict[int, list[int]] = {}
        self._names: set[str] = set()

    # The few elements that the reader acts upon, by where they stand; rt_info is only kept by it, never
    # followed.
    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._path.append(tag)
        depth = len(self._path)
        if depth > GRAPH_DEPTH:
            _refuse(f"its elements are nested deeper than {GRAPH_DEPTH}")
        if tag in _CONTAINERS:
            _refuse("it has loops or branches with graphs of their own, which are not supported")
        handler = _STARTS.get(tuple(self._path)) if depth <= 6 else None
        if handler is not None:
            handler(self, attributes)
        elif depth <= 2 and tag not in _KNOWN_SECTIONS:
            _refuse(f"it has an element <{_brief(tag)}> where none is expected")

    def end(self, tag: str) -> None:
        if tag == "dim":
            self.hear_text(False)
        elif tag == "layer" and len(self._path) == 3:
            self._finish_node()
        self._path.pop()

    def finish(self) -> None:
        if not {"layers", "edges"} <= self._sections:
            _refuse("it has no layers or no edges")
        self._check_order()

    def _section(self, attributes: dict[str, str]) -> None:
        name = self._path[-1]
        if name in self._sections:
            _refuse(f"it has two elements <{name}>")
        if name == "edges" and "layers" not in self._sections:
            _refuse("its edges stand before its layers")
        self._sections.add(name)

    def _net(self, attributes: dict[str, str]) -> None:
        if attributes.get("version") not in {"10", "11"}:
            _refuse(f"its format version is {_brief(attributes.get('version', ''))}, 10 and 11 are known")

    def _layer(self, attributes: dict[str, str]) -> None:
        identity = _number(attributes.get("id", ""), "layer id", _ID_MOST)
        name, kind = attributes.get("name", ""), attributes.get("type", "")
        if identity in self._ports:
            _refuse(f"two layers have the id {identity}")
        if not name or len(name) > _NAME_CHARS or name in self._names:
            _refuse(f"a layer's name is missing, too long or there twice: {_brief(name)}")
        if not _WORD.fullmatch(kind) or not _WORD.fullmatch(attributes.get("version", "")):
            _refuse(f"layer {identity} has no type and version that could be known")
        self._names.add(name)
        self.operations.add(kind)
        self._node = _Node(identity, name, kind)
        self._ports[identity] = (self._node.inputs, self._node.outputs)

    def _finish_node(self) -> None:
        assert self._node is not None
        if self._node.kind in {"Const", "Parameter"} and not self._node.has_data:
            _refuse(f"layer {_brief(self._node.name)} has no data")
        self._node = None

    def _data(self, attributes: dict[str, str]) -> None:
        node = self._node
        assert node is not None
        if node.has_data:
            _refuse(f"layer {_brief(node.name)} has two data elements")
        node.has_data = True
        if node.kind == "Const":
            self._constant(node.name, attributes)
        elif node.kind == "Parameter":
            _shape(attributes.get("shape", ""), attributes.get("element_type", ""), dynamic=True)
        elif "offset" in attributes or "size" in attributes:
            _refuse(f"layer {_brief(node.name)} reads weights and is no constant")

    def _constant(self, name: str, attributes: dict[str, str]) -> None:
        element = attributes.get("element_type", "")
        elements = _shape(attributes.get("shape", ""), element, dynamic=False)
        offset = _number(attributes.get("offset", ""), "offset", self.weights_size)
        size = _number(attributes.get("size", ""), "size", self.weights_size)
        if offset + size > self.weights_size:
            _refuse(
                f"constant {_brief(name)} ends at {offset + size}, beyond its weights' {self.weights_size} "
                f"bytes"
            )
        if size != _stored_bytes(elements, element):
            _refuse(f"constant {_brief(name)} has {size} bytes for {elements} elements of {element}")
        self.constants.append(ConstantRange(name, offset, size, element))

    def _ports_part(self, attributes: dict[str, str]) -> None:
        assert self._node is not None
        if self._path[3] in self._node.parts:
            _refuse(f"layer {_brief(self._node.name)} has two lists of {self._path[3]}s")
        self._node.parts.add(self._path[3])

    def _port(self, attributes: dict[str, str]) -> None:
        assert self._node is not None
        port = _number(attributes.get("id", ""), "port id", _ID_MOST)
        ports = self._node.inputs if self._path[3] == "input" else self._node.outputs
        if port in self._node.inputs or port in self._node.outputs:
            _refuse(f"layer {_brief(self._node.name)} has port {port} twice")
        ports.add(port)
        self._dims = 0

    def _dim(self, attributes: dict[str, str]) -> None:
        self._dims += 1
        if self._dims > GRAPH_RANK:
            _refuse(f"it has a tensor of more than {GRAPH_RANK} dimensions")
        self.hear_text(True)

    def dim_text(self, text: str) -> None:
        if text.strip():
            _dimension(text.strip(), dynamic=True)

    def _edge(self, attributes: dict[str, str]) -> None:
        source = _number(attributes.get("from-layer", ""), "edge", _ID_MOST)
        target = _number(attributes.get("to-layer", ""), "edge", _ID_MOST)
        out = _number(attributes.get("from-port", ""), "edge", _ID_MOST)
        into = _number(attributes.get("to-port", ""), "edge", _ID_MOST)
        if source not in self._ports or out not in self._ports[source][1]:
            _refuse(f"an edge leaves port {out} of layer {source}, which there is not")
        if target not in self._ports or into not in self._ports[target][0]:
            _refuse(f"an edge enters port {into} of layer {target}, which there is not")
        if (target, into) in self._edges:
            _refuse(f"two edges enter port {into} of layer {target}")
        self._edges.add((target, into))
        self._successors.setdefault(source, []).append(target)

    def _check_order(self) -> None:
        """No circles: what is computed in order of its edges would never end."""
        waiting = dict.fromkeys(self._ports, 0)
        for targets in self._successors.values():
            for target in targets:
                waiting[target] += 1
        ready = [node for node, count in waiting.items() if not count]
        done = 0
        while ready:
            done += 1
            for target in self._successors.get(ready.pop(), ()):
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
        if done != len(self._ports):
            _refuse("its edges form a circle")


_Handler: TypeAlias = Callable[[_Reading, dict[str, str]], None]
_KNOWN_SECTIONS: Final = {"net", "layers", "edges", "rt_info", "meta_data"}
_STARTS: Final[dict[tuple[str, ...], _Handler]] = {
    ("net",): _Reading._net,
    ("net", "layers"): _Reading._section,
    ("net", "edges"): _Reading._section,
    ("net", "layers", "layer"): _Reading._layer,
    ("net", "layers", "layer", "data"): _Reading._data,
    ("net", "layers", "layer", "input"): _Reading._ports_part,
    ("net", "layers", "layer", "output"): _Reading._ports_part,
    ("net", "layers", "layer", "input", "port"): _Reading._port,
    ("net", "layers", "layer", "output", "port"): _Reading._port,
    ("net", "layers", "layer", "input", "port", "dim"): _Reading._dim,
    ("net", "layers", "layer", "output", "port", "dim"): _Reading._dim,
    ("net", "edges", "edge"): _Reading._edge,
}


def _text_switch(parser: expat.XMLParserType, reading: _Reading) -> Callable[[bool], None]:
    """Text is heard inside dimensions only: elsewhere it is white space, a call for each line of a long
    file.
    """

    def switch(hear: bool) -> None:
        parser.CharacterDataHandler = reading.dim_text if hear else None

    return switch


def _number(text: str, what: str, most: int) -> int:
    if not _DIGITS.fullmatch(text) or int(text) > most:
        _refuse(f"its {what} is {_brief(text)} where a number up to {most} is expected")
    return int(text)


def _dimension(text: str, dynamic: bool) -> int | None:
    """The dimension in `text`; None where it is open (`?`, `-1`, `1..8`), which only `dynamic` shapes may
    have.
    """
    if dynamic and (text in {"?", "-1"} or _RANGE.fullmatch(text)):
        return None
    return _number(text, "dimension", GRAPH_DIMENSION)


def _shape(text: str, element: str, dynamic: bool) -> int:
    """How many elements a tensor of this shape has, open dimensions counted as 1."""
    if element not in ELEMENT_BITS and not (dynamic and element == "dynamic"):
        _refuse(f"its element type {_brief(element)} is not known")
    if dynamic and text == "...":
        return 1
    dimensions = [_dimension(part.strip(), dynamic) for part in text.split(",")] if text else []
    if len(dimensions) > GRAPH_RANK:
        _refuse(f"it has a tensor of more than {GRAPH_RANK} dimensions")
    if math.prod(dimension or 1 for dimension in dimensions) > GRAPH_ELEMENTS:
        _refuse(f"it has a tensor of more than {GRAPH_ELEMENTS} elements")
    return math.prod(1 if dimension is None else dimension for dimension in dimensions)


def _stored_bytes(elements: int, element: str) -> int:
    bits = elements * ELEMENT_BITS[element]
    return -(-bits // 24) * 3 if element in _PACKED_IN_GROUPS else -(-bits // 8)


def _brief(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
