"""Adverts and plans as canonical bytes: signatures and plan ids are taken over them.

One value has one encoding, the same on every PC: arrays in a fixed order, MessagePack's shortest forms, no
floats, maps or absent fields, text in NFC. What decodes but is not the encoding of what it decodes to is
refused, so nobody can make two byte strings of one meaning.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeVar

from meshinfer.errors import WireError
from meshinfer.limits import (
    DETAIL_CHARS,
    HEADER_BYTES,
    HOLDINGS,
    LAYERS,
    NAME_CHARS,
    PROTOCOL_VERSION,
    ROUTE_HOPS,
)
from meshinfer.text import printable
from meshinfer.values import (
    Advert,
    Assignment,
    Holding,
    ModelId,
    OwnerFacts,
    PeerId,
    Plan,
    Precision,
    Readiness,
    Span,
    Standing,
)
from meshinfer.wire.fields import (
    DIGEST_BYTES,
    ID_BYTES,
    U32,
    addresses,
    announced,
    array,
    boolean,
    integer,
    pack,
    ports,
    raw,
    record,
    text,
    unpack,
)

_PAYLOAD_BYTES: Final = HEADER_BYTES - 128
"""An advert travels in a header with its signature and a few bytes more."""

Word = TypeVar("Word", bound=StrEnum)


def encode_advert(advert: Advert) -> bytes:
    """Canonical bytes, under 64 KiB. Raises WireError for an advert that no peer would accept.

    Text is cleaned. Left out are addresses that mean nothing to another PC, and what is beyond the number of
    holdings and addresses that an advert may list.
    """
    data = pack(_advert_fields(advert))
    _parse_advert(data)
    return data


def decode_advert(data: bytes | memoryview) -> Advert:
    """The advert of a peer. Raises WireError (VersionError never: the message around it has been checked)."""
    if len(data) > _PAYLOAD_BYTES:
        raise WireError("size", f"an advert of {len(data)} bytes: at most {_PAYLOAD_BYTES} are allowed")
    advert = _parse_advert(data)
    if pack(_advert_fields(advert)) != data:
        raise WireError("canonical", "an advert is not in its canonical form")
    return advert


def encode_plan(plan: Plan) -> bytes:
    """Canonical bytes of a plan: what its id is the SHA-256 of."""
    return pack(_plan_fields(plan))


def decode_plan(data: bytes | memoryview) -> Plan:
    """The plan in canonical bytes. Raises WireError."""
    if len(data) > _PAYLOAD_BYTES:
        raise WireError("size", f"a plan of {len(data)} bytes: at most {_PAYLOAD_BYTES} are allowed")
    plan = _parse_plan(unpack(data, longest=ROUTE_HOPS, bin_bytes=DIGEST_BYTES, str_bytes=4 * DETAIL_CHARS))
    if encode_plan(plan) != data:
        raise WireError("canonical", "a plan is not in its canonical form")
    return plan


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────
def _advert_fields(advert: Advert) -> tuple[object, ...]:
    where = advert.ports
    return (
        # The signature covers the version too: an advert of one version cannot be passed off as another's.
        PROTOCOL_VERSION,
        bytes.fromhex(advert.peer),
        printable(advert.name, NAME_CHARS),
        advert.incarnation,
        advert.version,
        announced(advert.addresses),
        (where.door, where.control, where.data, where.bulk),
        printable(advert.program, NAME_CHARS),
        printable(advert.device, NAME_CHARS),
        advert.precision.value,
        advert.capacity_bytes,
        advert.decode_us,
        tuple(
            (bytes.fromhex(holding.model), printable(holding.name, NAME_CHARS), holding.complete)
            for holding in advert.holdings[:HOLDINGS]
        ),
        None if advert.wants is None else bytes.fromhex(advert.wants),
        None if advert.standing is None else _standing_fields(advert.standing),
        advert.min_owners,
    )


def _standing_fields(standing: Standing) -> tuple[object, ...]:
    return _plan_fields(standing.plan), standing.readiness.value, printable(standing.detail, DETAIL_CHARS)


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
    device = printable(one.device, NAME_CHARS)
    return bytes.fromhex(one.peer), one.span.first, one.span.last, device, one.pool_tokens


def _input_fields(one: OwnerFacts) -> tuple[object, ...]:
    return (
        bytes.fromhex(one.peer),
        one.incarnation,
        one.round,
        one.capacity_bytes,
        one.decode_us,
        one.precision.value,
    )


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────
def _parse_advert(data: bytes | memoryview) -> Advert:
    header = unpack(data, longest=ROUTE_HOPS, bin_bytes=DIGEST_BYTES, str_bytes=4 * DETAIL_CHARS)
    (
        version,
        peer,
        name,
        incarnation,
        count,
        hosts,
        where,
        program,
        device,
        precision,
        capacity,
        decode,
        held,
        wants,
        standing,
        fewest,
    ) = record(header, "advert", 16)
    integer(version, "version", PROTOCOL_VERSION, PROTOCOL_VERSION)
    return Advert(
        peer=_peer(peer),
        name=text(name, "name", NAME_CHARS),
        incarnation=integer(incarnation, "incarnation"),
        version=integer(count, "advert version"),
        addresses=addresses(hosts),
        ports=ports(where),
        program=text(program, "program", NAME_CHARS),
        device=text(device, "device", NAME_CHARS),
        precision=_word(Precision, precision, "precision"),
        capacity_bytes=integer(capacity, "capacity"),
        decode_us=integer(decode, "decode time", U32),
        holdings=tuple(_holding(one) for one in array(held, "holdings", HOLDINGS)),
        wants=None if wants is None else _model(wants),
        standing=None if standing is None else _standing(standing),
        min_owners=integer(fewest, "fewest owners", ROUTE_HOPS, 1),
    )


def _holding(value: object) -> Holding:
    model, name, complete = record(value, "holding", 3)
    return Holding(_model(model), text(name, "model name", NAME_CHARS), boolean(complete, "complete"))


def _standing(value: object) -> Standing:
    plan, readiness, detail = record(value, "standing", 3)
    return Standing(
        _parse_plan(plan), _word(Readiness, readiness, "readiness"), text(detail, "detail", DETAIL_CHARS)
    )


def _parse_plan(value: object) -> Plan:
    model, layers, assignments, inputs, predicted = record(value, "plan", 5)
    total = integer(layers, "layers", LAYERS, 1)
    owners = tuple(_assignment(one) for one in array(assignments, "assignments", ROUTE_HOPS))
    facts = tuple(_owner_facts(one) for one in array(inputs, "inputs", ROUTE_HOPS))
    _check_tiling(owners, total)
    if len({one.peer for one in facts}) != len(facts):
        raise WireError("field", "a plan has two inputs of one peer")
    return Plan(_model(model), total, owners, facts, integer(predicted, "predicted time"))


def _check_tiling(owners: tuple[Assignment, ...], layers: int) -> None:
    """The spans follow each other and make up the model, each with an owner of its own."""
    edges = [0, *(one.span.last for one in owners)]
    if [one.span.first for one in owners] != edges[:-1] or edges[-1] != layers:
        raise WireError("field", "a plan's spans leave a gap, overlap, or do not end with the model")
    if len({one.peer for one in owners}) != len(owners):
        raise WireError("field", "a plan names one owner twice")


def _assignment(value: object) -> Assignment:
    peer, first, last, device, pool = record(value, "assignment", 5)
    end = integer(last, "last layer", LAYERS, 1)
    span = Span(integer(first, "first layer", end - 1), end)
    return Assignment(_peer(peer), span, text(device, "device", NAME_CHARS), integer(pool, "pool"))


def _owner_facts(value: object) -> OwnerFacts:
    peer, incarnation, capacity, decode, precision = record(value, "input", 5)
    return OwnerFacts(
        _peer(peer),
        integer(incarnation, "incarnation"),
        integer(capacity, "capacity"),
        integer(decode, "decode time", U32),
        _word(Precision, precision, "precision"),
    )


def _peer(value: object) -> PeerId:
    return PeerId(raw(value, "peer", ID_BYTES).hex())


def _model(value: object) -> ModelId:
    return ModelId(raw(value, "model", DIGEST_BYTES).hex())


def _word(words: type[Word], value: object, name: str) -> Word:
    try:
        return words(value)  # type: ignore[arg-type]
    except ValueError:
        raise WireError("field", f"{name} is not one of {', '.join(words)}") from None
