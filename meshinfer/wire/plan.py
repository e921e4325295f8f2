"""Plans as canonical bytes, which their ids are taken over: see `advert`, in which they travel."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Final

from meshinfer.errors import WireError
from meshinfer.limits import (
    DEVICE_CHARS,
    LAYERS,
    PLAN_BYTES,
    PLAN_PEERS,
    PLAN_STANDBYS,
    PLANS_READ,
    ROUTE_HOPS,
)
from meshinfer.text import printable
from meshinfer.values import Assignment, OwnerFacts, Plan, PlanId, Precision, Span
from meshinfer.wire.fields import (
    DIGEST_BYTES,
    U32,
    array,
    integer,
    model_id,
    pack,
    peer_id,
    raw,
    record,
    text,
    unpack,
    word,
)


def encode_plan(plan: Plan) -> bytes:
    """Canonical bytes of a plan, sound or not: what its id is the SHA-256 of."""
    return pack(_plan_fields(plan))


def decode_plan(data: bytes | memoryview) -> Plan:
    """The plan in canonical bytes. Raises WireError."""
    if len(data) > PLAN_BYTES:
        raise WireError("size", f"a plan of {len(data)} bytes: at most {PLAN_BYTES} are allowed")
    fields = unpack(data, longest=PLAN_PEERS, bin_bytes=DIGEST_BYTES, str_bytes=4 * DEVICE_CHARS)
    plan = _parse_plan(fields)
    if pack(fields) != data:
        raise WireError("canonical", "a plan is not in its canonical form")
    return plan


read_plan: Final = lru_cache(maxsize=PLANS_READ)(decode_plan)
"""Equal bytes give the same plan, in the memory of the first."""


def _plan_fields(plan: Plan) -> tuple[object, ...]:
    return (
        bytes.fromhex(plan.model),
        plan.layers,
        plan.round,
        None if plan.replaces is None else bytes.fromhex(plan.replaces),
        tuple(map(_assignment_fields, plan.assignments)),
        tuple(map(_assignment_fields, plan.standbys)),
        tuple(map(_input_fields, plan.inputs)),
        plan.predicted_us,
        plan.stage_us,
    )


def _assignment_fields(one: Assignment) -> tuple[object, ...]:
    device = printable(one.device, DEVICE_CHARS)
    return bytes.fromhex(one.peer), one.span.first, one.span.last, device, one.pool_tokens


def _input_fields(one: OwnerFacts) -> tuple[object, ...]:
    return (
        bytes.fromhex(one.peer),
        one.incarnation,
        one.capacity_bytes,
        one.decode_us,
        one.precision.value,
    )


def _parse_plan(value: object) -> Plan:
    model, layers, order, replaced, owners, others, inputs, predicted, stage = record(value, "plan", 9)
    plan = Plan(
        model=model_id(model),
        layers=integer(layers, "layers", LAYERS, 1),
        round=integer(order, "round", lowest=1),
        replaces=None if replaced is None else PlanId(raw(replaced, "replaced plan", DIGEST_BYTES).hex()),
        assignments=tuple(map(_assignment, array(owners, "assignments", ROUTE_HOPS))),
        standbys=tuple(map(_assignment, array(others, "standbys", PLAN_STANDBYS))),
        inputs=tuple(map(_owner_facts, array(inputs, "inputs", PLAN_PEERS))),
        predicted_us=integer(predicted, "predicted time"),
        stage_us=integer(stage, "time of the slowest stage"),
    )
    _check_tiling(plan.assignments, plan.layers)
    _check_standbys(plan.assignments, plan.standbys)
    _check_inputs(plan)
    return plan


def _check_tiling(owners: tuple[Assignment, ...], layers: int) -> None:
    """The spans follow each other and make up the model, each with an owner of its own."""
    edges = [0, *(one.span.last for one in owners)]
    if [one.span.first for one in owners] != edges[:-1] or edges[-1] != layers:
        raise WireError("field", "a plan's spans leave a gap, overlap, or do not end with the model")
    if len({one.peer for one in owners}) != len(owners):
        raise WireError("field", "a plan names one owner twice")


def _check_standbys(owners: tuple[Assignment, ...], standbys: tuple[Assignment, ...]) -> None:
    """In order of layers, those for one owner's span make it up, or it has none."""
    at = 0
    for owner in owners:
        reached = owner.span.first
        while at < len(standbys) and standbys[at].span.first < owner.span.last:
            one = standbys[at]
            if one.span.first != reached or one.span.last > owner.span.last or one.peer == owner.peer:
                raise WireError("field", "a standby stands by for itself, or out of place")
            reached = one.span.last
            at += 1
        if owner.span.first < reached < owner.span.last:
            raise WireError("field", "standbys cover a part of an owner's span only")
    if at < len(standbys):
        raise WireError("field", "a standby stands by for layers that the model does not have")


def _check_inputs(plan: Plan) -> None:
    named = sorted({one.peer for one in chain(plan.assignments, plan.standbys)})
    if [one.peer for one in plan.inputs] != named:
        raise WireError(
            "field", "a plan's inputs are not those of the peers that it names, in order of peer id"
        )


def _assignment(value: object) -> Assignment:
    peer, first, last, device, pool = record(value, "assignment", 5)
    end = integer(last, "last layer", LAYERS, 1)
    span = Span(integer(first, "first layer", end - 1), end)
    return Assignment(peer_id(peer), span, text(device, "device", DEVICE_CHARS), integer(pool, "pool"))


def _owner_facts(value: object) -> OwnerFacts:
    peer, incarnation, capacity, decode, precision = record(value, "input", 5)
    return OwnerFacts(
        peer_id(peer),
        integer(incarnation, "incarnation"),
        integer(capacity, "capacity"),
        integer(decode, "decode time", U32),
        word(Precision, precision, "precision"),
    )
