"""If these fail, two PCs see different plans in the same facts, or a forged or odd advert is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from itertools import accumulate, pairwise

import msgpack
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from wire_samples import ADVERT, ANN, BARE_ADVERT, BARE_PLAN, BOB, EVA, MODEL, PLAN, VECTORS

from meshinfer.errors import WireError
from meshinfer.limits import (
    ADDRESSES,
    BROKEN_LINKS,
    CERTIFICATE_BYTES,
    DETAIL_CHARS,
    DEVICE_CHARS,
    DOUBTS,
    HOLDINGS,
    LINKS,
    NAME_CHARS,
    PLAN_PEERS,
    PLAN_STANDBYS,
    ROUTE_HOPS,
    STANDINGS,
)
from meshinfer.text import is_printable, printable
from meshinfer.values import (
    Advert,
    Assignment,
    Channel,
    Holding,
    LinkFacts,
    ModelId,
    Objective,
    OwnerFacts,
    PeerId,
    Plan,
    PlanId,
    Precision,
    Readiness,
    Span,
    Standing,
)
from meshinfer.wire.advert import decode_advert, encode_advert
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import Adverts, SignedAdvert
from meshinfer.wire.plan import decode_plan, encode_plan

PINNED = json.loads(VECTORS.read_text(encoding="utf-8"))

PEERS = st.binary(min_size=16, max_size=16).map(lambda raw: PeerId(raw.hex()))
MODELS = st.binary(min_size=32, max_size=32).map(lambda raw: ModelId(raw.hex()))
NAMES = st.text().map(lambda text: printable(text, NAME_CHARS))
U32 = st.integers(0, 2**32 - 1)
U63 = st.integers(0, 2**63 - 1)
TREES = st.recursive(
    st.none() | st.booleans() | U63 | st.binary(max_size=40) | st.text(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=5),
)
DEVICES = st.text().map(lambda text: printable(text, DEVICE_CHARS))
PRECISIONS = st.sampled_from(Precision)


@st.composite
def plans(draw: st.DrawFn, author: PeerId | None = None) -> Plan:
    """A sound plan, which names the author as an owner or as a standby, or as both."""
    peers = draw(st.lists(PEERS.filter(lambda peer: peer != author), min_size=1, max_size=6, unique=True))
    lengths = draw(st.lists(st.integers(1, 100), min_size=len(peers), max_size=len(peers)))
    owners = [assignment(draw, peer, span) for peer, span in zip(peers, tiles(0, lengths), strict=True)]
    if author is not None and draw(st.booleans()):
        at = draw(st.integers(0, len(owners) - 1))
        owners[at] = dataclasses.replace(owners[at], peer=author)
    pool = st.sampled_from(peers) | PEERS if author is None else st.sampled_from([*peers, author])
    standbys = []
    for owner in owners:
        if len(owner.span) > 1 and draw(st.booleans()):
            cut = draw(st.integers(1, len(owner.span) - 1))
            parts = tiles(owner.span.first, [cut, len(owner.span) - cut])
            standbys += [
                assignment(draw, draw(pool.filter(lambda peer, o=owner: peer != o.peer)), span)
                for span in parts
            ]
    named = sorted({one.peer for one in (*owners, *standbys)})
    assume(author is None or author in named)
    return Plan(
        model=draw(MODELS),
        layers=sum(lengths),
        round=draw(st.integers(1, 2**63 - 1)),
        replaces=draw(st.none() | MODELS.map(PlanId)),
        assignments=tuple(owners),
        standbys=tuple(standbys),
        inputs=tuple(OwnerFacts(peer, draw(U63), draw(U63), draw(U32), draw(PRECISIONS)) for peer in named),
        predicted_us=draw(U63),
        stage_us=draw(U63),
    )


def tiles(start: int, lengths: list[int]) -> list[Span]:
    edges = [start, *accumulate(lengths, initial=start)][1:]
    return [Span(first, last) for first, last in pairwise(edges)]


def assignment(draw: st.DrawFn, peer: PeerId, span: Span) -> Assignment:
    return Assignment(peer, span, draw(DEVICES), draw(U63))


@st.composite
def standings(draw: st.DrawFn, author: PeerId) -> Standing:
    plan = draw(plans(author))
    own = sorted(one.span for one in (*plan.assignments, *plan.standbys) if one.peer == author)
    loaded = tuple(span for span in own if draw(st.booleans()))
    return Standing(plan, draw(st.sampled_from(Readiness)), draw(NAMES), loaded)


@st.composite
def adverts(draw: st.DrawFn) -> Advert:
    author = draw(PEERS)
    others = st.lists(PEERS.filter(lambda peer: peer != author), max_size=5, unique=True).map(sorted)
    return Advert(
        peer=author,
        name=draw(NAMES),
        incarnation=draw(U63),
        version=draw(U63),
        addresses=draw(st.sampled_from([(), ("10.0.0.1",), ("::1", "127.0.0.1")])),
        ports=ADVERT.ports,
        program=draw(NAMES),
        rules=draw(U32),
        device=draw(DEVICES),
        precision=draw(PRECISIONS),
        capacity_bytes=draw(U63),
        allocation_bytes=draw(U63),
        decode_us=draw(U32),
        prefill_us=draw(U32),
        holdings=tuple(draw(st.lists(st.builds(Holding, MODELS, NAMES, st.booleans()), max_size=4))),
        wants=draw(st.none() | MODELS),
        min_owners=draw(st.integers(1, ROUTE_HOPS)),
        objective=draw(st.sampled_from(Objective)),
        links=tuple(LinkFacts(peer, draw(U32), draw(U32)) for peer in draw(others)),
        broken=tuple(draw(others)),
        doubts=tuple(draw(others)),
        round=draw(U63),
        standings=tuple(draw(st.lists(standings(author), max_size=2, unique_by=lambda one: one.plan))),
        leaving=draw(st.booleans()),
    )


def packed(value: object) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def test_the_pinned_bytes_hold() -> None:
    for advert, vector in zip((ADVERT, BARE_ADVERT), PINNED["adverts"], strict=True):
        assert encode_advert(advert).hex() == vector["bytes"]
        assert decode_advert(bytes.fromhex(vector["bytes"])) == advert
    for plan, vector in zip((PLAN, BARE_PLAN), PINNED["plans"], strict=True):
        assert encode_plan(plan).hex() == vector["bytes"]
        assert decode_plan(bytes.fromhex(vector["bytes"])) == plan
        assert hashlib.sha256(bytes.fromhex(vector["bytes"])).hexdigest() == vector["id"]


@given(adverts())
def test_an_advert_comes_back_as_it_was(advert: Advert) -> None:
    assert decode_advert(encode_advert(advert)) == advert
    assert decode_advert(memoryview(encode_advert(advert))) == advert


@given(plans(), plans())
def test_two_plans_have_the_same_bytes_only_if_they_are_the_same(one: Plan, other: Plan) -> None:
    assert decode_plan(encode_plan(one)) == one
    assert (encode_plan(one) == encode_plan(other)) == (one == other)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    for read in (decode_advert, decode_plan):
        with pytest.raises(WireError):
            read(data)


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


def test_every_byte_of_a_plan_changed_is_refused_or_canonical() -> None:
    data = encode_plan(PLAN)
    for at in range(len(data)):
        for value in (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xCC, 0xD9, 0xDC, 0xFF):
            altered = data[:at] + bytes([value]) + data[at + 1 :]
            try:
                plan = decode_plan(altered)
            except WireError:
                continue
            assert encode_plan(plan) == altered


@given(st.integers(0, 24), st.integers(0, 3), TREES)
@settings(max_examples=300)
def test_a_field_of_an_advert_replaced_is_refused_or_canonical(at: int, inner: int, value: object) -> None:
    fields = msgpack.unpackb(encode_advert(ADVERT))
    if at == 23:
        fields[23][0][inner] = value
    else:
        fields[at] = value
    data = packed(fields)
    try:
        advert = decode_advert(data)
    except WireError:
        return
    assert encode_advert(advert) == data


@given(st.integers(0, 8), st.integers(0, 1), st.integers(0, 5), TREES, st.booleans())
@settings(max_examples=300)
def test_a_field_of_a_plan_replaced_is_refused_or_canonical(
    at: int, row: int, inner: int, value: object, deep: bool
) -> None:
    fields = msgpack.unpackb(encode_plan(PLAN))
    if deep and at in {4, 5, 6}:
        fields[at][row][inner : inner + 1] = [value]
    else:
        fields[at] = value
    data = packed(fields)
    try:
        plan = decode_plan(data)
    except WireError:
        return
    assert encode_plan(plan) == data


def test_a_longer_spelling_of_the_same_advert_is_refused() -> None:
    """Otherwise one advert had many byte strings, and one signature each."""
    data = encode_advert(ADVERT)
    assert data[:4] == b"\xdc\x00\x19\x02"
    longer = (b"\xdd\0\0\0\x19\x02", b"\xdc\x00\x19\xcc\x02", b"\xdc\x00\x19\xd3\0\0\0\0\0\0\0\x02")
    for spelling in longer:
        with pytest.raises(WireError) as caught:
            decode_advert(spelling + data[4:])
        assert caught.value.kind == "canonical"


def test_a_longer_spelling_of_the_same_plan_is_refused_by_itself_and_in_an_advert() -> None:
    """Otherwise one plan had many ids, and peers that agree would not know it."""
    data = encode_plan(PLAN)
    assert data[:1] == b"\x99"
    longer = b"\xdc\x00\x09" + data[1:]
    for read, spelling in ((decode_plan, longer), (decode_advert, changed(23, [[longer, "ready", "", b""]]))):
        with pytest.raises(WireError) as caught:
            read(spelling)
        assert caught.value.kind == "canonical"


def test_one_plan_in_many_adverts_is_read_once() -> None:
    """In a mesh of 1,000 the same plans come with nearly every message."""
    of_ann = decode_advert(encode_advert(ADVERT))
    spans = (PLAN.assignments[1].span,)
    bob = dataclasses.replace(
        BARE_ADVERT, peer=BOB, standings=(Standing(PLAN, Readiness.READY, "", spans),), leaving=False
    )
    assert decode_advert(encode_advert(bob)).standings[0].plan is of_ann.standings[0].plan


def changed(at: int, value: object) -> bytes:
    fields = msgpack.unpackb(encode_advert(ADVERT))
    fields[at] = value
    return packed(fields)


ANN_ID, BOB_ID, EVA_ID = (bytes.fromhex(peer) for peer in (ANN, BOB, EVA))
PLAN_DATA = encode_plan(PLAN)
MANY_IDS = b"".join(bytes(14) + n.to_bytes(2, "big") for n in range(200))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 1), (0, 3), (1, b"short"), (2, "x" * (NAME_CHARS + 1)), (2, "\x1b]0;owned\x07"), (2, "a\nb"),
        (2, "\u202eevil"), (2, "e\u0301"), (2, b"bytes"), (2, " padded "), (3, -1), (3, 2**63), (3, 1.0),
        (4, True), (5, ["pc.local"]),
        (5, ["10.0.0.1 "]), (5, ["010.0.0.1"]), (5, ["0.0.0.0"]), (5, ["fe80::1%eth0"]), (5, ["::01"]),
        (5, ["10.0.0.1"] * (ADDRESSES + 1)), (6, [1, 2, 3]), (6, [0, 1, 2, 3]), (6, [1, 2, 3, 65536]),
        (8, -1), (8, 2**32), (9, "x" * (DEVICE_CHARS + 1)), (10, "fast"), (10, b"auto"), (11, -1), (12, 2**63),
        (13, 2**32), (14, 2**32), (15, [[bytes(32), "m", 1]]), (15, [[bytes(32), "m", True]] * (HOLDINGS + 1)),
        (16, b""), (16, False), (17, 0), (17, ROUTE_HOPS + 1), (18, "thrift"), (18, None),
        (19, []), (19, bytes(23)), (19, ANN_ID + bytes(8)), (19, (BOB_ID + bytes(8)) * 2),
        (19, EVA_ID + bytes(8) + BOB_ID + bytes(8)),
        (20, ANN_ID), (20, BOB_ID * 2), (20, EVA_ID + BOB_ID), (20, BOB_ID[:-1]), (20, None),
        (20, MANY_IDS[: 16 * (BROKEN_LINKS + 1)]),
        (21, ANN_ID), (21, BOB_ID * 2), (21, EVA_ID + BOB_ID), (21, BOB_ID + b"x"), (21, ""),
        (21, MANY_IDS[: 16 * (DOUBTS + 1)]),
        (22, -1), (22, 2**63), (23, None), (23, [[]]), (23, [[b"", "ready", "", b""]]),
        (23, [[PLAN_DATA, "ready", ""]]), (23, [[PLAN_DATA, "asleep", "", b""]]),
        (23, [[PLAN_DATA + b"\0", "ready", "", b""]]), (23, [[list(PLAN_DATA), "ready", "", b""]]),
        (23, [[PLAN_DATA, "ready", "", b"\0"]]), (23, [[PLAN_DATA, "ready", "", b"\x09\0\x11\0"]]),
        (23, [[PLAN_DATA, "ready", "", b"\x11\0\x1e\0\0\0\x11\0"]]),
        (23, [[PLAN_DATA, "ready", "", b"\0\0\x11\0" * 2]]), (23, [[PLAN_DATA, "ready", "", bytes(4)]]),
        (23, [[PLAN_DATA, "ready", "", b"\0\0\x11\0"]] * 2),
        (24, 0), (24, None),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused(at: int, value: object) -> None:
    with pytest.raises(WireError):
        decode_advert(changed(at, value))


def some_links(count: int) -> tuple[LinkFacts, ...]:
    return tuple(LinkFacts(PeerId(f"{n:032x}"), 640, 940_000) for n in range(count))


def some_standings(count: int) -> tuple[Standing, ...]:
    return tuple(Standing(dataclasses.replace(PLAN, round=8 + n), Readiness.READY) for n in range(count))


def test_as_many_links_and_standings_as_are_allowed_are_taken_and_one_more_is_not() -> None:
    fits = dataclasses.replace(ADVERT, links=some_links(LINKS), standings=some_standings(STANDINGS))
    assert decode_advert(encode_advert(fits)) == fits
    for odd in ({"links": some_links(LINKS + 1)}, {"standings": some_standings(STANDINGS + 1)}):
        with pytest.raises(WireError):
            encode_advert(dataclasses.replace(ADVERT, **odd))


def test_who_is_not_named_by_a_plan_cannot_stand_by_it() -> None:
    with pytest.raises(WireError, match="does not name it"):
        encode_advert(dataclasses.replace(ADVERT, standings=(Standing(of_bob_alone(), Readiness.ACCEPTED),)))


def of_bob_alone() -> Plan:
    owners = (dataclasses.replace(BARE_PLAN.assignments[0], peer=BOB),)
    return dataclasses.replace(
        BARE_PLAN, assignments=owners, inputs=(dataclasses.replace(BARE_PLAN.inputs[0], peer=BOB),)
    )


Owned = tuple[PeerId, int, int]


def plan_with(*spans: Owned, standbys: tuple[Owned, ...] = (), layers: int = 30) -> Plan:
    owners, others = (
        tuple(Assignment(peer, Span(first, last), "CPU", 1) for peer, first, last in part)
        for part in (spans, standbys)
    )
    named = sorted({one.peer for one in (*owners, *others)})
    inputs = tuple(dataclasses.replace(PLAN.inputs[0], peer=peer) for peer in named)
    return dataclasses.replace(PLAN, layers=layers, assignments=owners, standbys=others, inputs=inputs)


def stood_by(*standbys: Owned) -> Plan:
    return plan_with((ANN, 0, 10), (BOB, 10, 30), standbys=standbys)


MANY = tuple(PeerId(f"{n:032x}") for n in range(1, 200))


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
        plan_with(*((peer, n, n + 1) for n, peer in enumerate(MANY[: ROUTE_HOPS + 1])), layers=ROUTE_HOPS + 1),
        stood_by((ANN, 0, 10)),
        stood_by((BOB, 0, 5), (ANN, 5, 10)),
        stood_by((EVA, 0, 9)),
        stood_by((EVA, 1, 10)),
        stood_by((EVA, 0, 4), (BOB, 5, 10)),
        stood_by((EVA, 0, 6), (BOB, 5, 10)),
        stood_by((EVA, 0, 10), (BOB, 0, 10)),
        stood_by((BOB, 5, 10), (EVA, 0, 5)),
        stood_by((ANN, 10, 30), (BOB, 0, 10)),
        stood_by((EVA, 0, 30)),
        stood_by((EVA, 5, 15)),
        stood_by((EVA, 30, 31)),
        stood_by((EVA, 10, 31)),
        plan_with((ANN, 0, 97), standbys=tuple(((BOB, EVA)[n % 2], n, n + 1) for n in range(97)), layers=97),
        dataclasses.replace(PLAN, inputs=PLAN.inputs * 2),
        dataclasses.replace(PLAN, inputs=PLAN.inputs[:2]),
        dataclasses.replace(PLAN, inputs=PLAN.inputs[1:]),
        dataclasses.replace(PLAN, inputs=PLAN.inputs[::-1]),
        dataclasses.replace(PLAN, standbys=()),
        dataclasses.replace(PLAN, round=0),
        dataclasses.replace(PLAN, replaces=PlanId("c3" * 31)),
        dataclasses.replace(PLAN, replaces=PlanId("")),
    ],
    ids=["gap", "overlap", "short", "beyond", "begins late", "order", "owner twice", "nothing", "nobody",
         "too many layers", "too many owners",
         "its own standby", "its own standby in part", "ends early", "starts late", "gap in standbys",
         "overlap of standbys", "two sets", "order in a span", "order of spans", "over two spans", "across two spans",
         "behind the model", "beyond the model", "too many standbys",
         "input twice", "input missing", "first input missing", "order of inputs", "input of a bystander",
         "round of nothing", "replaces a stump", "replaces nothing"],
)  # fmt: skip
def test_a_plan_that_does_not_make_up_the_model_is_refused(plan: Plan) -> None:
    with pytest.raises(WireError):
        decode_plan(encode_plan(plan))
    with pytest.raises(WireError):
        encode_advert(dataclasses.replace(ADVERT, standings=(Standing(plan, Readiness.READY),)))


@pytest.mark.parametrize(
    "plan",
    [
        stood_by(),
        stood_by((EVA, 0, 10)),
        stood_by((BOB, 0, 5), (EVA, 5, 10)),
        stood_by((EVA, 10, 30)),
        stood_by((BOB, 0, 10), (ANN, 10, 11), (EVA, 11, 30)),
        plan_with((ANN, 0, 96), standbys=tuple(((BOB, EVA)[n % 2], n, n + 1) for n in range(96)), layers=96),
    ],
    ids=["none", "one", "in two parts", "for the last only", "for each other", "as many as may be"],
)
def test_standbys_that_make_up_what_they_stand_by_for_are_taken(plan: Plan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


def test_a_span_turned_round_is_refused_and_not_an_exception_of_another_kind() -> None:
    for group in (4, 5):
        fields = msgpack.unpackb(encode_plan(PLAN))
        fields[group][0][1:3] = [17, 17]
        with pytest.raises(WireError):
            decode_plan(packed(fields))


def largest_plan(order: int) -> Plan:
    """`ROUTE_HOPS` owners with 15 layers each; those who are none stand by for a half of most of them."""
    peers = [PeerId(hashlib.sha256(bytes([n])).hexdigest()[:32]) for n in range(PLAN_PEERS)]
    owners = [Assignment(peers[n], Span(15 * n, 15 * n + 15), "GPU.0", 2**31) for n in range(ROUTE_HOPS)]
    halves = [span for n in range(PLAN_STANDBYS // 2) for span in tiles(15 * n, [7, 8])]
    standbys = [Assignment(peers[-1 - n % 32], span, "GPU.0", 2**31) for n, span in enumerate(halves)]
    inputs = [OwnerFacts(p, 1_800_000_000_000, 2**36, 2**20, Precision.EXACT) for p in sorted(peers)]
    return Plan(
        MODEL,
        15 * ROUTE_HOPS,
        order,
        PLAN.replaces,
        tuple(owners),
        tuple(standbys),
        tuple(inputs),
        2**31,
        2**31,
    )


def test_the_largest_honest_advert_fits_into_a_header() -> None:
    plans = [largest_plan(2**32 + n) for n in range(STANDINGS)]
    assert len(plans[0].standbys) == PLAN_STANDBYS
    peer = plans[0].standbys[-1].peer
    name = "国" * NAME_CHARS
    own = tuple(sorted(one.span for one in plans[0].standbys if one.peer == peer))
    advert = dataclasses.replace(
        ADVERT,
        peer=peer,
        name=name,
        device="国" * DEVICE_CHARS,
        addresses=tuple(f"fd00:1111:2222:3333:4444:5555:6666:{n:x}" for n in range(1, ADDRESSES + 1)),
        holdings=tuple(Holding(MODEL, name, True) for _ in range(HOLDINGS)),
        links=some_links(LINKS),
        broken=tuple(link.peer for link in some_links(BROKEN_LINKS)),
        doubts=tuple(link.peer for link in some_links(DOUBTS)),
        standings=tuple(Standing(plan, Readiness.FAILED, "国" * DETAIL_CHARS, own) for plan in plans),
    )
    data = encode_advert(advert)
    assert decode_advert(data) == advert
    signed = SignedAdvert(bytes(CERTIFICATE_BYTES), data, bytes(64))
    assert decode(Channel.CONTROL, encode(Adverts((signed,)))).adverts == (signed,)


def test_a_plan_of_the_longest_names_is_within_its_bound() -> None:
    plan = largest_plan(2**62)
    long = {"device": "🖥" * DEVICE_CHARS, "pool_tokens": 2**62}
    odd = dataclasses.replace(
        plan,
        assignments=tuple(dataclasses.replace(one, **long) for one in plan.assignments),
        standbys=tuple(dataclasses.replace(one, **long) for one in plan.standbys),
    )
    assert decode_plan(encode_plan(odd)) == odd


def test_a_round_trip_of_hours_is_capped() -> None:
    slept = dataclasses.replace(ADVERT, links=(LinkFacts(BOB, 2**40, 2**40),))
    assert decode_advert(encode_advert(slept)).links == (LinkFacts(BOB, 2**32 - 1, 2**32 - 1),)


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
