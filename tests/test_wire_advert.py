"""If these fail, two PCs see different plans in the same facts, or a forged or odd advert is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import ADVERT, ANN, BARE_ADVERT, BOB, MODEL, PLAN, VECTORS

from meshinfer.errors import WireError
from meshinfer.limits import ADDRESSES, HEADER_BYTES, HOLDINGS, NAME_CHARS, ROUTE_HOPS
from meshinfer.text import is_printable, printable
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
from meshinfer.wire.advert import decode_advert, decode_plan, encode_advert, encode_plan

PINNED = json.loads(VECTORS.read_text(encoding="utf-8"))

PEERS = st.binary(min_size=16, max_size=16).map(lambda raw: PeerId(raw.hex()))
MODELS = st.binary(min_size=32, max_size=32).map(lambda raw: ModelId(raw.hex()))
NAMES = st.text().map(lambda text: printable(text, NAME_CHARS))
U63 = st.integers(0, 2**63 - 1)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    peers = draw(st.lists(PEERS, min_size=1, max_size=6, unique=True))
    lengths = draw(st.lists(st.integers(1, 100), min_size=len(peers), max_size=len(peers)))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    spans = [Span(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return Plan(
        draw(MODELS),
        sum(lengths),
        tuple(
            Assignment(peer, span, draw(NAMES), draw(U63)) for peer, span in zip(peers, spans, strict=True)
        ),
        tuple(
            OwnerFacts(
                peer, draw(U63), draw(U63), draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(Precision))
            )
            for peer in peers
        ),
        draw(U63),
    )


STANDINGS = st.builds(Standing, plans(), st.sampled_from(Readiness), NAMES)
ADVERTS = st.builds(
    Advert,
    peer=PEERS,
    name=NAMES,
    incarnation=U63,
    version=U63,
    addresses=st.sampled_from([(), ("10.0.0.1",), ("::1", "127.0.0.1")]),
    ports=st.just(ADVERT.ports),
    program=NAMES,
    device=NAMES,
    precision=st.sampled_from(Precision),
    capacity_bytes=U63,
    decode_us=st.integers(0, 2**32 - 1),
    holdings=st.lists(st.builds(Holding, MODELS, NAMES, st.booleans()), max_size=4).map(tuple),
    wants=st.none() | MODELS,
    standing=st.none() | STANDINGS,
    min_owners=st.integers(1, 64),
)


def packed(value: object) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def test_the_pinned_bytes_hold() -> None:
    for advert, vector in zip((ADVERT, BARE_ADVERT), PINNED["adverts"], strict=True):
        assert encode_advert(advert).hex() == vector["bytes"]
        assert decode_advert(bytes.fromhex(vector["bytes"])) == advert
    vector = PINNED["plans"][0]
    assert decode_plan(bytes.fromhex(vector["bytes"])) == PLAN
    assert hashlib.sha256(bytes.fromhex(vector["bytes"])).hexdigest() == vector["id"]


@given(ADVERTS)
def test_an_advert_comes_back_as_it_was(advert: Advert) -> None:
    assert decode_advert(encode_advert(advert)) == advert
    assert decode_advert(memoryview(encode_advert(advert))) == advert


@given(plans(), plans())
def test_two_plans_have_the_same_bytes_only_if_they_are_the_same(one: Plan, other: Plan) -> None:
    assert decode_plan(encode_plan(one)) == one
    assert (encode_plan(one) == encode_plan(other)) == (one == other)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    for decode in (decode_advert, decode_plan):
        with pytest.raises(WireError):
            decode(data)


def test_every_cut_byte_change_and_trailing_byte_is_refused_or_canonical() -> None:
    data = encode_advert(ADVERT)
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode_advert(data[:length])
    with pytest.raises(WireError):
        decode_advert(data + b"\0")
    for at in range(len(data)):
        for value in (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xCC, 0xD9, 0xDC, 0xFF):
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            try:
                advert = decode_advert(changed)
            except WireError:
                continue
            assert encode_advert(advert) == changed


def test_a_longer_spelling_of_the_same_advert_is_refused() -> None:
    """Otherwise one advert had many byte strings, and one signature each."""
    data = encode_advert(ADVERT)
    assert data[:4] == b"\xdc\x00\x10\x01"
    longer = (b"\xdd\0\0\0\x10\x01", b"\xdc\x00\x10\xcc\x01", b"\xdc\x00\x10\xd3\0\0\0\0\0\0\0\x01")
    for spelling in longer:
        with pytest.raises(WireError) as caught:
            decode_advert(spelling + data[4:])
        assert caught.value.kind == "canonical"


def changed(at: int, value: object) -> bytes:
    fields = msgpack.unpackb(encode_advert(ADVERT))
    fields[at] = value
    return packed(fields)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 2), (1, b"short"), (2, "x" * (NAME_CHARS + 1)), (2, "\x1b]0;owned\x07"), (2, "a\nb"),
        (2, "\u202eevil"), (2, "e\u0301"), (2, b"bytes"), (2, " padded "), (3, -1), (3, 2**63), (3, 1.0),
        (4, True), (5, ["pc.local"]),
        (5, ["10.0.0.1 "]), (5, ["010.0.0.1"]), (5, ["0.0.0.0"]), (5, ["fe80::1%eth0"]), (5, ["::01"]),
        (5, ["10.0.0.1"] * (ADDRESSES + 1)), (6, [1, 2, 3]), (6, [0, 1, 2, 3]), (6, [1, 2, 3, 65536]),
        (9, "fast"),
        (10, -1), (11, 2**32), (12, [[bytes(32), "m", 1]]), (12, [[bytes(32), "m", True]] * (HOLDINGS + 1)),
        (13, b""), (13, False), (14, []), (14, [[], "ready", ""]),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused(at: int, value: object) -> None:
    with pytest.raises(WireError):
        decode_advert(changed(at, value))


def plan_with(*spans: tuple[PeerId, int, int], layers: int = 30) -> Plan:
    owners = tuple(Assignment(peer, Span(first, last), "CPU", 1) for peer, first, last in spans)
    return dataclasses.replace(PLAN, layers=layers, assignments=owners)


@pytest.mark.parametrize(
    "plan",
    [
        plan_with((ANN, 0, 10), (BOB, 11, 30)),
        plan_with((ANN, 0, 20), (BOB, 10, 30)),
        plan_with((ANN, 0, 10), (BOB, 10, 29)),
        plan_with((ANN, 0, 10), (BOB, 10, 31)),
        plan_with((ANN, 1, 30)),
        plan_with((BOB, 10, 30), (ANN, 0, 10)),
        plan_with((ANN, 0, 10), (ANN, 10, 30)),
        plan_with(layers=0),
        plan_with(layers=1),
        plan_with((ANN, 0, 2000), layers=2000),
        dataclasses.replace(PLAN, inputs=PLAN.inputs * 2),
    ],
    ids=["gap", "overlap", "short", "beyond", "begins late", "order", "owner twice", "nothing", "nobody",
         "too many layers", "input twice"],
)  # fmt: skip
def test_a_plan_that_does_not_make_up_the_model_is_refused(plan: Plan) -> None:
    with pytest.raises(WireError):
        decode_plan(encode_plan(plan))
    with pytest.raises(WireError):
        encode_advert(dataclasses.replace(ADVERT, standing=Standing(plan, Readiness.READY)))


def test_a_span_turned_round_is_refused_and_not_an_exception_of_another_kind() -> None:
    fields = msgpack.unpackb(encode_plan(PLAN))
    fields[2][0][1:3] = [17, 17]
    with pytest.raises(WireError):
        decode_plan(packed(fields))


def test_the_largest_honest_advert_fits_into_a_header() -> None:
    peers = [PeerId(f"{n:032x}") for n in range(ROUTE_HOPS)]
    name = "国" * NAME_CHARS
    plan = Plan(
        MODEL,
        ROUTE_HOPS,
        tuple(Assignment(peer, Span(n, n + 1), name, 2**62) for n, peer in enumerate(peers)),
        tuple(OwnerFacts(peer, 2**62, 2**62, 2**32 - 1, Precision.EXACT) for peer in peers),
        2**62,
    )
    advert = dataclasses.replace(
        ADVERT,
        name=name,
        device=name,
        addresses=tuple(f"fd00:1111:2222:3333:4444:5555:6666:{n:x}" for n in range(1, ADDRESSES + 1)),
        holdings=tuple(Holding(MODEL, name, True) for _ in range(HOLDINGS)),
        standing=Standing(plan, Readiness.FAILED, "国" * 256),
    )
    assert len(encode_advert(advert)) < HEADER_BYTES // 2
    assert decode_advert(encode_advert(advert)) == advert


def test_what_only_this_pc_can_use_or_is_too_much_stays_here() -> None:
    advert = dataclasses.replace(
        BARE_ADVERT,
        name="two\nlines",
        addresses=("fe80::1%3", *(f"10.0.0.{n}" for n in range(1, 30))),
        holdings=tuple(Holding(MODEL, str(n), True) for n in range(HOLDINGS + 5)),
    )
    back = decode_advert(encode_advert(advert))
    assert back.name == "two lines"
    assert back.addresses == tuple(f"10.0.0.{n}" for n in range(1, ADDRESSES + 1))
    assert len(back.holdings) == HOLDINGS


@given(st.text(), st.integers(0, 40))
def test_cleaning_text_is_final(text: str, limit: int) -> None:
    clean = printable(text, limit)
    assert printable(clean, limit) == clean
    assert is_printable(clean, limit)
    assert len(clean) <= limit
    clean.encode()


@pytest.mark.parametrize("name", ["Ann’s büro 🖥", "日本語", "می\u200cخواهم", "👩\u200d💻"])
def test_names_of_people_are_left_alone(name: str) -> None:
    assert printable(name, NAME_CHARS) == name
