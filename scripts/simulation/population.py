"""Models, what they cost, and the PCs of an office: as unequal as those of real ones."""

from __future__ import annotations

from random import Random

from meshinfer.limits import MIB
from meshinfer.mesh.placement import Costs
from meshinfer.values import Holding, KvShape, ModelFacts, ModelId, Objective, Precision
from simulation.pc import Pc

COSTS = Costs(
    kv_bytes=lambda kv, precision, device: (
        kv.heads * (kv.key + kv.value) * (4 if precision is Precision.EXACT else 2)
    ),
    layer_bytes=lambda weights: weights + weights // 8,
    span_bytes=lambda hidden: 1024 * hidden,
)
"""Simple, and of the same kind as the engine's."""


def _model(letter: str, layer_mib: tuple[int, ...]) -> ModelFacts:
    """With the least KV (256 tokens of 256 bytes a layer), a layer of 10 MiB takes 11.3 MiB."""
    return ModelFacts(
        model=ModelId(letter * 64),
        name=f"model-{letter}",
        layer_bytes=tuple(size * MIB for size in layer_mib),
        kv=(KvShape(1, 64, 64),) * len(layer_mib),
        embedding_bytes=MIB,
        head_bytes=MIB,
        hidden=64,
        context=256,
        vocabulary=1000,
    )


MODELS = {
    facts.model: facts
    for facts in (
        _model("a", (10,) * 6),
        _model("b", (10,) * 4),
        _model("c", (14, *(7,) * 6, 18)),
    )
}
_FIRST, _SMALL, _UNEQUAL = MODELS


def office(random: Random, count: int, *, defects: bool, multicast: bool) -> list[Pc]:
    """PCs of very unequal memory and speed, a model or two among them; the first has a model whole.

    `defects`: some have a full disk, an agent that accepts nothing, slow loads, a wrong clock. Without `multicast`,
    each knows the address of one other, and nothing else.
    """
    main = random.choice((_FIRST, _FIRST, _UNEQUAL))
    models = [main] if random.random() < 0.7 else [main, _SMALL]
    pcs = [_pc(random, number, models) for number in range(count)]
    if random.random() < 0.2:
        random.choice(pcs).min_owners = random.choice((2, 2, 3))
    if random.random() < 0.2:
        for pc in pcs:
            pc.objective = Objective.THROUGHPUT
    if defects:
        _spoil(random, pcs, main)
    if not multicast:
        for pc in pcs[1:]:
            pc.contact = pcs[random.randrange(pc.number)]
    return pcs


def _pc(random: Random, number: int, models: list[ModelId]) -> Pc:
    # The room for a whole model is rare; some lend nothing, or less than a layer.
    capacity = random.choice((0, 8, 25, 25, 40, 40, 60, 90))
    pc = Pc(number, (capacity + (25 if number == 0 else 0)) * MIB)
    speed_us = random.choice((100, 200, 200, 300, 800))
    pc.true_decode_us = speed_us
    pc.decode_us = random.choice((0, 0, speed_us))
    pc.load_s = random.choice((0.02, 0.1, 0.1, 0.4))
    if number == 0 or random.random() < 0.2:
        model = models[0] if number == 0 else random.choice(models)
        pc.holdings = (Holding(model, MODELS[model].name, True),)
        pc.wants = model
    elif random.random() < 0.2:
        pc.wants = random.choice(models)
    if random.random() < 0.1:
        pc.precision = Precision.EXACT
    if random.random() < 0.1:
        pc.allocation_bytes = random.choice((12, 20, 40)) * MIB
    return pc


def _spoil(random: Random, pcs: list[Pc], main: ModelId) -> None:
    # The first one keeps its health: some model can be had, and somebody accepts.
    for pc in pcs[1:]:
        pc.disk_full = random.random() < 0.05
        pc.stubborn = random.random() < 0.03
        pc.forging = random.random() < 0.03
        if (pc.stubborn or pc.forging) and not pc.holdings:
            # So that it is counted on.
            pc.holdings = (Holding(main, MODELS[main].name, False),)
        pc.wall_s += random.choice((0.0, 0.0, random.uniform(-1e6, 1e6)))
        if random.random() < 0.1:
            pc.load_s = 1.5


def bystanders(random: Random, first: int, count: int) -> list[Pc]:
    """PCs that no plan can use: they lend nothing, or less than a layer takes."""
    return [
        Pc(
            number,
            random.choice((0, 0, 6)) * MIB,
            true_decode_us=200,
            wants=random.choice((None, None, _FIRST)),
        )
        for number in range(first, first + count)
    ]
