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
    """Who owns, and who stands by for, which span of one model, with what that was computed from.

    `assignments` are the owners in order of layers; their spans tile the model. `standbys` are in order of layers
    too; together those for one owner's span cover it wholly, or there are none for it, and none of them is that
    owner. `inputs` are those of every peer named, in order of peer id. `round` orders the plans that one peer accepts:
    each is greater than all that it accepted before. `replaces` is the plan that this one takes over from.
    `predicted_us` is the time of one token; `stage_us` that of its slowest stage, hop included, so that 10^6 divided
    by it are the tokens per second that the pipeline passes at best. The plan's id (`mesh.plan.plan_id`) is the hash
    of its content.
    """

    model: ModelId
    layers: int
    round: int
    replaces: PlanId | None
    assignments: tuple[Assignment, ...]
    standbys: tuple[Assignment, ...]
    inputs: tuple[OwnerFacts, ...]
    predicted_us: int
    stage_us: int

    def __hash__(self) -> int:
        # Plans are looked up at every turn, and all of one would take long: this tells nearly all of them apart.
        return hash((self.round, self.replaces, self.predicted_us, self.stage_us, self.model))

    @property
    def owners(self) -> tuple[PeerId, ...]:
        return tuple(assignment.peer for assignment in self.assignments)

    @property
    def named(self) -> tuple[PeerId, ...]:
        """Owners and standbys, each once, in order of peer id."""
        return tuple(facts.peer for facts in self.inputs)


@dataclass(frozen=True, slots=True)
class ShardKey:
    """What makes a shard: plans that name the same one for a peer share it, and its memory is promised once."""

    model: ModelId
    span: Span
    device: str
    pool_tokens: int


class Readiness(StrEnum):
    """How far an agent is with a plan that it stands by."""

    ACCEPTED = "accepted"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class Objective(StrEnum):
    """What a plan is to be best at: one person's next token, or tokens for many."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Standing:
    """A plan that an agent stands by, and how far it is with it.

    `spans` are those that it has loaded and serves under the plan, as owner or as standby. An owner is READY when its
    own span is among them, a mere standby when all of its spans are.
    """

    plan: Plan
    readiness: Readiness
    detail: str = ""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A peer that the author of an advert hears now. 0 stands for what was not measured yet."""

    peer: PeerId
    round_trip_us: int
    kbit_s: int


@dataclass(frozen=True, slots=True)
class Advert:
    """What a peer signs and spreads about itself. A newer (`incarnation`, `version`) wins.

    `rules` numbers the way in which it computes plans: only agents with equal rules plan together.
    `capacity_bytes` is what shards may use there: weights, KV and buffers, the asker's own part already taken off;
    `allocation_bytes` is the largest single allocation of the device, 0 where there is no such bound.
    `decode_us` and `prefill_us` are microseconds for one layer and one token, alone and in a chunk of a long prompt, as
    measured on `device`, 0 while unknown. `wants` is the model that this peer would have the mesh serve. `holdings`
    lists every model whose manifest is there, weights or not: without it a peer is given no span. `min_owners` is the
    fewest owners that this peer would have a plan use (1: no split where one peer alone is faster), `objective` what
    it would have it be best at; both travel, since all must compute alike.
    `links` are the peers that it watches and hears, in order of peer id; `broken` those that no route should join it
    to, because the way between them failed lately, heard or not. `doubts` are peers that it waited for in vain to
    accept a plan. `round` is the last round that is over for it. `leaving` is its last word.
    """

    peer: PeerId
    name: str
    incarnation: int
    version: int
    addresses: tuple[str, ...]
    ports: Ports
    program: str
    rules: int
    device: str
    precision: Precision
    capacity_bytes: int
    allocation_bytes: int
    decode_us: int
    prefill_us: int
    holdings: tuple[Holding, ...]
    wants: ModelId | None
    min_owners: int
    objective: Objective
    links: tuple[LinkFacts, ...] = ()
    broken: tuple[PeerId, ...] = ()
    doubts: tuple[PeerId, ...] = ()
    round: int = 0
    standings: tuple[Standing, ...] = ()
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """How new an advert is: what two peers compare before they send each other adverts."""

    peer: PeerId
    incarnation: int
    version: int
