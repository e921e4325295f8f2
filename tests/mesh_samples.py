"""A small model, what it costs, and adverts of peers that differ in what a test is about."""

from __future__ import annotations

from meshinfer.limits import MIB
from meshinfer.mesh.placement import Costs
from meshinfer.values import (
    Advert,
    Holding,
    KvShape,
    LinkFacts,
    ModelFacts,
    ModelId,
    Objective,
    PeerId,
    Ports,
    Precision,
    Standing,
)

COSTS = Costs(
    kv_bytes=lambda kv, precision, device: (
        kv.heads * (kv.key + kv.value) * (4 if precision is Precision.EXACT else 2)
    ),
    layer_bytes=lambda weights: weights + weights // 8,
    span_bytes=lambda hidden: 1024 * hidden,
)


def model(letter: str = "a", layers: int = 6, layer_mib: int = 10) -> ModelFacts:
    """A model of equal layers; with the least KV (256 tokens of 256 bytes a layer) a layer takes 11.3 MiB."""
    return ModelFacts(
        model=ModelId(letter * 64),
        name=f"model-{letter}",
        layer_bytes=(layer_mib * MIB,) * layers,
        kv=(KvShape(1, 64, 64),) * layers,
        embedding_bytes=MIB,
        head_bytes=MIB,
        hidden=64,
        context=256,
        vocabulary=1000,
    )


def peer_id(number: int) -> PeerId:
    return PeerId(f"{number:032x}")


def advert(
    number: int,
    capacity_mib: int = 40,
    *,
    whole: ModelId | None = None,
    partial: ModelId | None = None,
    wants: ModelId | None = None,
    incarnation: int = 1,
    version: int = 1,
    decode_us: int = 0,
    min_owners: int = 1,
    links: tuple[int, ...] = (),
    broken: tuple[int, ...] = (),
    doubts: tuple[int, ...] = (),
    standings: tuple[Standing, ...] = (),
    ended: int = 0,
    leaving: bool = False,
) -> Advert:
    """Peer `number`, with peers named by their numbers; `ended` is the last round that is over for it."""
    holdings = [Holding(whole, "m", True)] if whole else []
    holdings += [Holding(partial, "m", False)] if partial else []
    return Advert(
        peer=peer_id(number),
        name=f"pc{number}",
        incarnation=incarnation,
        version=version,
        addresses=(),
        ports=Ports(1, 2, 3, 4),
        program="test",
        rules=1,
        device="CPU",
        precision=Precision.AUTO,
        capacity_bytes=capacity_mib * MIB,
        allocation_bytes=0,
        decode_us=decode_us,
        prefill_us=0,
        holdings=tuple(holdings),
        wants=wants,
        min_owners=min_owners,
        objective=Objective.LATENCY,
        links=tuple(LinkFacts(peer, 1000, 0) for peer in map(peer_id, sorted(links))),
        broken=tuple(map(peer_id, sorted(broken))),
        doubts=tuple(map(peer_id, sorted(doubts))),
        round=ended,
        standings=standings,
        leaving=leaving,
    )
