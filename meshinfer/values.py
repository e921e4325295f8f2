"""Ids and small frozen values that every room speaks of; nothing here does anything."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType

PeerId = NewType("PeerId", str)
"""32 lower-case hex digits: the first 16 bytes of SHA-256 over the peer's Ed25519 public key."""
MeshId = NewType("MeshId", str)
"""32 lower-case hex digits: the first 16 bytes of SHA-256 over the mesh's Ed25519 public key."""
ModelId = NewType("ModelId", str)
"""64 lower-case hex digits: SHA-256 over the model's manifest."""
PlanId = NewType("PlanId", str)
"""64 lower-case hex digits: SHA-256 over the plan's canonical bytes."""
SequenceId = NewType("SequenceId", int)
"""Names one sequence of tokens of one asker; unsigned 63 bits, never used twice in an agent's life."""


class Channel(IntEnum):
    """Sockets are separate, so that a long prefill delays no heartbeat and a transfer delays no step."""

    CONTROL = 0
    DATA = 1
    BULK = 2


class Precision(StrEnum):
    """`AUTO` is the device's own default; `EXACT` is f32 throughout, the same text every time."""

    AUTO = "auto"
    EXACT = "exact"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range of layers, `[first, last)`."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"not a span: [{self.first}, {self.last})")

    def __len__(self) -> int:
        return self.last - self.first

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last - 1}"


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of one agent: the door is the one that strangers may knock at."""

    door: int
    control: int
    data: int
    bulk: int

    def of(self, channel: Channel) -> int:
        return (self.control, self.data, self.bulk)[channel]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer's attention keeps for one token: `heads` × (`key` + `value`) numbers."""

    heads: int
    key: int
    value: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What placement needs to know of a model; the manifest derives it. Sizes are bytes."""

    model: ModelId
    name: str
    layer_bytes: tuple[int, ...]
    kv: tuple[KvShape, ...]
    embedding_bytes: int
    head_bytes: int
    hidden: int
    context: int
    vocabulary: int

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class Holding:
    """A model that a peer has on disk; `complete` when it can serve every byte of it to others."""

    model: ModelId
    name: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """One owner of a plan: `pool_tokens` is the KV room, in tokens, that it has for its span."""

    peer: PeerId
    span: Span
    device: str
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """What a plan was computed from, for one peer that it names."""

    peer: PeerId
    incarnation: int
    capacity_bytes: int
    decode_us: int
    precision: Precision


@dataclass(frozen=True, slots=True)
class Plan:
    """Who owns which span of one model, in order of layers, with what it was computed from.

    Its id (`mesh.plan.plan_id`) is the hash of its content.
    """

    model: ModelId
    layers: int
    assignments: tuple[Assignment, ...]
    inputs: tuple[OwnerFacts, ...]
    predicted_us: int

    @property
    def owners(self) -> tuple[PeerId, ...]:
        return tuple(assignment.peer for assignment in self.assignments)


class Readiness(StrEnum):
    """How far an agent is with the plan it holds."""

    ACCEPTED = "accepted"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Standing:
    """The plan that an agent holds, and how far it is with it."""

    plan: Plan
    readiness: Readiness
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Advert:
    """What a peer signs and spreads about itself. A newer (`incarnation`, `version`) wins.

    `capacity_bytes` is what spans may use there: weights, KV and buffers, the asker's own part already taken off.
    `decode_us` is microseconds for one layer and one token as measured on `device`, 0 while unknown.
    `wants` is the model that this peer would have the mesh serve. `holdings` lists every model whose manifest
    is there, weights or not: without it a peer is given no span. `min_owners` is the fewest owners that this
    peer would have a plan use (1: no split where one peer has room); it travels, since all must compute alike.
    """

    peer: PeerId
    name: str
    incarnation: int
    version: int
    addresses: tuple[str, ...]
    ports: Ports
    program: str
    device: str
    precision: Precision
    capacity_bytes: int
    decode_us: int
    holdings: tuple[Holding, ...]
    wants: ModelId | None
    standing: Standing | None
    min_owners: int = 1
