"""If these fail, a program that speaks the documented protocol is misunderstood, or bytes do harm."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_samples import (
    ADVERT,
    ANN,
    BOB,
    EVA,
    MODEL,
    PLAN,
    PLAN_ID,
    PORTS,
    SAMPLES,
    VECTORS,
    channel_of,
    hexed,
    read,
    spoken,
    vectors,
)

from meshinfer.errors import VersionError, WireError
from meshinfer.limits import (
    ADVERT_BYTES,
    ADVERTS,
    BLOB_CHUNK_BYTES,
    CERTIFICATE_BYTES,
    CONTEXT_TOKENS,
    CONTROL_BYTES,
    DETAIL_CHARS,
    DOOR_BYTES,
    HEADER_BYTES,
    HIDDEN,
    MESSAGE_DEPTH,
    PROBE_BYTES,
    PROTOCOL_VERSION,
    ROUTE_HOPS,
    STEP_SEQUENCES,
    STEP_TOKENS,
    SUMMARY_MARK_BYTES,
    SUMMARY_MARKS,
)
from meshinfer.values import Channel, Mark, PeerId
from meshinfer.wire.advert import encode_advert
from meshinfer.wire.codec import decode, decode_door, encode
from meshinfer.wire.control import pack_adverts
from meshinfer.wire.messages import (
    Adverts,
    Blob,
    Code,
    Entry,
    Fetch,
    Free,
    Heartbeat,
    HopTrace,
    Knock,
    Ping,
    Probe,
    Refusal,
    RefusalReason,
    Result,
    SignedAdvert,
    Step,
    Summary,
    Welcome,
)
from meshinfer.wire.plan import encode_plan
from meshinfer.wire.rows import finite

CHANNELS = (None, *Channel)


def channel_named(name: str) -> Channel | None:
    return None if name == "door" else Channel[name.upper()]


def obeys_the_law(channel: Channel | None, frames: list[bytes]) -> None:
    """A message whose encoding decodes to itself, or a WireError: nothing else, whatever the bytes."""
    try:
        message = read(channel, frames)
    except WireError:
        return
    again = encode(message)
    assert hexed(encode(read(channel, again))) == hexed(again)


# ── the pinned vectors ──────────────────────────────────────────────────────────────────────────────────────
def test_the_vectors_are_what_this_program_writes() -> None:
    assert json.loads(VECTORS.read_text(encoding="utf-8")) == json.loads(json.dumps(vectors()))


@pytest.mark.parametrize(
    "vector", json.loads(VECTORS.read_text(encoding="utf-8"))["messages"], ids=lambda v: v["name"]
)
def test_a_vector_decodes_to_its_message(vector: dict) -> None:
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    message = read(channel_named(vector["channel"]), frames)
    assert type(message).__name__ == vector["type"]
    assert json.loads(json.dumps(spoken(message))) == vector["value"]
    assert hexed(encode(message)) == vector["frames"]


@pytest.mark.parametrize(
    "vector", json.loads(VECTORS.read_text(encoding="utf-8"))["refused"], ids=lambda v: v["name"]
)
def test_a_vector_is_refused_by_kind(vector: dict) -> None:
    with pytest.raises(WireError) as caught:
        read(channel_named(vector["channel"]), [bytes.fromhex(frame) for frame in vector["frames"]])
    assert caught.value.kind == vector["kind"]


# ── whole, cut, followed, mutated, random ───────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", SAMPLES)
def test_every_cut_and_every_trailing_byte_is_refused(name: str) -> None:
    channel, message = SAMPLES[name]
    frames = [bytes(frame) for frame in encode(message)]
    for length in range(len(frames[0])):
        with pytest.raises(WireError):
            read(channel, [frames[0][:length], *frames[1:]])
    with pytest.raises(WireError):
        read(channel, [frames[0] + b"\0", *frames[1:]])
    with pytest.raises(WireError):
        read(channel, [*frames, b"", b""])
    if isinstance(message, Step | Result):
        for body in (frames[1] + b"\0", *(frames[1][:length] for length in range(len(frames[1])))):
            with pytest.raises(WireError):
                read(channel, [frames[0], body])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_is_taken_on_its_own_channel_only(name: str) -> None:
    channel, message = SAMPLES[name]
    for other in CHANNELS:
        if other is not channel:
            with pytest.raises(WireError) as caught:
                read(other, [bytes(frame) for frame in encode(message)])
            assert caught.value.kind == "type"


@pytest.mark.parametrize("name", SAMPLES)
def test_each_byte_changed_to_each_other_value_obeys_the_law(name: str) -> None:
    channel, message = SAMPLES[name]
    header, *body = (bytes(frame) for frame in encode(message))
    for at in range(min(len(header), 160)):
        for value in range(0, 256, 5 if at > 8 else 1):
            obeys_the_law(channel, [header[:at] + bytes([value]) + header[at + 1 :], *body])


@given(st.sampled_from(CHANNELS), st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames_obey_the_law(channel: Channel | None, frames: list[bytes]) -> None:
    obeys_the_law(channel, frames)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=70)
    | st.text(max_size=9)
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.integers(0, 9), inner, max_size=2),
)
_CODES = st.sampled_from([code.value for code in Code])


@given(st.sampled_from(CHANNELS), _CODES, st.lists(_TREES, max_size=10), st.none() | st.binary(max_size=40))
def test_well_formed_nonsense_obeys_the_law(
    channel: Channel | None, code: int, fields: list[object], body: bytes | None
) -> None:
    obeys_the_law(
        channel, [msgpack.packb([PROTOCOL_VERSION, code, *fields]), *([] if body is None else [body])]
    )


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_one_field_replaced_obeys_the_law(name: str, data: st.DataObject) -> None:
    channel, message = SAMPLES[name]
    header, *body = (bytes(frame) for frame in encode(message))
    fields = msgpack.unpackb(header)
    at = data.draw(st.integers(2, max(2, len(fields) - 1)))
    fields[at : at + 1] = [data.draw(_TREES)]
    obeys_the_law(channel, [msgpack.packb(fields), *body])


@example(1000)
@example(20_000)
@given(st.integers(1, 60_000))
@settings(max_examples=20)
def test_deep_nesting_obeys_the_law(depth: int) -> None:
    for channel, code in ((None, 1), (Channel.CONTROL, 18), (Channel.DATA, 35), (Channel.BULK, 50)):
        obeys_the_law(channel, [bytes([0x93, PROTOCOL_VERSION, code]) + b"\x91" * depth + b"\x01"])


def test_a_declared_length_takes_no_memory() -> None:
    """32-bit lengths of arrays, strings and bytes, nested as deep as the parser goes."""
    for prefix in (
        b"\xdd\x00\x00\x01\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ):
        header = bytes([0x93, PROTOCOL_VERSION, 35]) + prefix * 3000
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                decode(Channel.DATA, [header])
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()


def test_lengths_are_refused_before_they_are_read() -> None:
    with pytest.raises(WireError, match="at most"):
        decode(Channel.CONTROL, [encode(Ping(1))[0] + bytes(HEADER_BYTES)])
    with pytest.raises(WireError, match="at most"):
        decode_door([encode(Knock(PROTOCOL_VERSION, "1", b""))[0] + bytes(DOOR_BYTES)])


# ── versions ────────────────────────────────────────────────────────────────────────────────────────────────
def test_another_version_is_named_with_ours_on_every_channel() -> None:
    newer = PROTOCOL_VERSION + 1
    for header in (
        encode(Knock(newer, "9.9", b"x"))[0],
        bytes([0x9F, newer, 127]) + b"whatever the future holds",
    ):
        for channel in CHANNELS:
            with pytest.raises(VersionError) as caught:
                read(channel, [bytes(header)])
            assert (caught.value.theirs, caught.value.ours) == (newer, PROTOCOL_VERSION)
            assert str(newer) in str(caught.value)


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_rows_are_the_frame_itself_in_both_directions() -> None:
    """A copy of each body would cost more than the rest of the path."""
    rows = np.ones((1, 4096), "<f4")
    frames = encode(Result(PLAN_ID, 1, (Entry(1, 0, 1, 1),), (), rows))
    rows[0, 0] = 5.0
    assert np.frombuffer(frames[1], "<f4")[0] == 5.0
    assert np.shares_memory(decode(Channel.DATA, frames).rows, rows)


def test_rows_of_a_slice_are_sent_as_the_slice() -> None:
    rows = np.arange(12, dtype="<f4").reshape(3, 4)
    frames = encode(Result(PLAN_ID, 1, (Entry(1, 0, 2, 2),), (), rows[::2]))
    assert np.array_equal(decode(Channel.DATA, frames).rows, rows[::2])


@pytest.mark.parametrize("rows", [np.ones((2, 4), "<f4"), np.ones((1, 4), "<f8"), np.ones(4, "<f4")])
def test_rows_of_another_shape_or_dtype_are_the_senders_defect(rows: np.ndarray) -> None:
    with pytest.raises(ValueError):
        encode(Result(PLAN_ID, 1, (Entry(1, 0, 1, 1),), (), rows))


def test_nan_and_infinity_are_found() -> None:
    assert finite(np.empty((0, 4), "<f4"))
    assert finite(np.full((2, 4), 3e38, "<f4"))
    for bad in (np.nan, np.inf, -np.inf):
        rows = np.zeros((2, 4), "<f4")
        rows[1, 2] = bad
        assert not finite(rows)


# ── what a step may say ─────────────────────────────────────────────────────────────────────────────────────
_TOO_MANY = tuple(Entry(n, 0, 1, 1) for n in range(STEP_SEQUENCES + 1))


def step_with(count: int = 1, **changed: object) -> list[bytes]:
    fields: dict[str, object] = {
        "plan": PLAN_ID, "route": (ANN, BOB), "hop": 0, "asker": EVA, "step": 1,
        "entries": (Entry(1, 0, count, 1),), "trace": (), "rows": np.zeros((count, 4), "<f4"),
    } | changed  # fmt: skip
    return [bytes(frame) for frame in encode(Step(**fields))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frames",
    [
        step_with(hop=2, trace=(HopTrace(0, 0, 0),) * 2),
        step_with(hop=1),
        step_with(trace=(HopTrace(0, 0, 0),)),
        step_with(route=()),
        step_with(route=(ANN, ANN)),
        step_with(route=tuple(PeerId(f"{n:032x}") for n in range(ROUTE_HOPS + 1))),
        step_with(entries=(Entry(1, 0, 1, 2),)),
        step_with(entries=(Entry(1, 0, 1, 1), Entry(1, 1, 1, 1)), rows=np.zeros((2, 4), "<f4")),
        step_with(entries=(Entry(1, CONTEXT_TOKENS, 1, 1),)),
        step_with(entries=(Entry(1, 2**32 - 1, 1, 1),)),
        step_with(entries=(Entry(2**63, 0, 1, 1),)),
        step_with(entries=(Entry(1, 0, 0, 0), Entry(2, 0, 1, 1))),
        step_with(count=STEP_TOKENS + 1),
        step_with(entries=_TOO_MANY, rows=np.zeros((len(_TOO_MANY), 4), "<f4")),
    ],
    ids=[
        "hop beyond the route", "too few traces", "too many traces", "no route", "a loop", "a long route",
        "wants more than it has", "a sequence twice", "beyond any context", "a position that overflows",
        "a sequence that overflows", "no rows", "too many rows", "too many sequences",
    ],
)  # fmt: skip
def test_a_step_that_lies_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(Channel.DATA, frames)


@pytest.mark.parametrize(
    ("at", "value"),
    [(9, 0), (9, 3), (9, 4), (9, 2), (10, 0), (10, -1), (10, HIDDEN + 1), (10, 2**62), (10, 5)],
)
def test_a_dtype_or_width_that_does_not_fit_the_body_is_refused(at: int, value: int) -> None:
    header, body = step_with()
    fields = msgpack.unpackb(header)
    fields[at] = value
    with pytest.raises(WireError):
        decode(Channel.DATA, [msgpack.packb(fields), body])


def test_a_trace_of_hours_is_capped() -> None:
    frames = step_with(hop=1, trace=(HopTrace(2**40, 5, 1),))
    assert decode(Channel.DATA, frames).trace == (HopTrace(2**32 - 1, 5, 1),)


def test_what_no_honest_peer_would_send_is_refused() -> None:
    for message in (
        Blob(1, bytes(32), 10, 12, b"abc"),
        Blob(1, bytes(32), 13, 12, b""),
        Blob(1, bytes(32), 0, 2**62, bytes(BLOB_CHUNK_BYTES + 1)),
        Fetch(MODEL, bytes(32), 0, 0, 1),
        Fetch(MODEL, bytes(32), 0, BLOB_CHUNK_BYTES + 1, 1),
        Fetch(MODEL, bytes(32), 2**63 - 1, 1, 1),
        Fetch(MODEL, bytes(31), 0, 1, 1),
        Free(()),
        Free((3, 3)),
        Heartbeat(1, 0, 0, 0, bytes(8)),
        Heartbeat(1, 1, 0, 0, bytes(9)),
        Summary((Mark(BOB, 1, 1), Mark(ANN, 1, 1)), True),
        Summary((Mark(ANN, 1, 1), Mark(ANN, 2, 1)), True),
        Summary((Mark(ANN, 2**63, 1),), True),
    ):
        with pytest.raises(WireError):
            decode(channel_of(message), encode(message))  # type: ignore[arg-type]


def test_a_probe_or_a_summary_longer_than_any_honest_one_is_refused() -> None:
    whole = Summary(
        tuple(Mark(PeerId(f"{n:032x}"), 2**63 - 1, 2**63 - 1) for n in range(SUMMARY_MARKS)), True
    )
    assert decode(Channel.CONTROL, encode(whole)) == whole
    assert sum(map(len, encode(whole)[1:])) == CONTROL_BYTES
    header, body = encode(whole)
    with pytest.raises(WireError):
        decode(Channel.CONTROL, [header, bytes(body) + b"\xff" * SUMMARY_MARK_BYTES])
    assert len(decode(Channel.BULK, encode(Probe(1, bytes(PROBE_BYTES)))).body) == PROBE_BYTES
    with pytest.raises(WireError):
        decode(Channel.BULK, encode(Probe(1, bytes(PROBE_BYTES + 1))))


def test_the_bytes_of_a_probe_are_not_copied() -> None:
    body = np.zeros(64, np.uint8)
    for message in (Probe(1, memoryview(body)), decode(Channel.BULK, encode(Probe(1, memoryview(body))))):
        assert np.shares_memory(np.frombuffer(message.body, np.uint8), body)


@pytest.mark.parametrize(
    "adverts",
    [
        [SignedAdvert(bytes(CERTIFICATE_BYTES + 1), b"", bytes(64))],
        [SignedAdvert(b"", bytes(ADVERT_BYTES + 1), bytes(64))],
        [SignedAdvert(b"", b"", bytes(63))],
        [SignedAdvert(b"", b"", bytes(64))] * (ADVERTS + 1),
        [],
    ],
    ids=["certificate", "payload", "signature", "too many", "none"],
)
def test_adverts_of_impossible_sizes_are_refused(adverts: list[SignedAdvert]) -> None:
    with pytest.raises(WireError):
        decode(Channel.CONTROL, encode(Adverts(tuple(adverts))))


SIZES = st.integers(0, ADVERT_BYTES) | st.integers(0, 2000) | st.sampled_from([255, 256, 900, ADVERT_BYTES])


@given(st.lists(SIZES, max_size=12), st.integers(1, 40))
@example([ADVERT_BYTES] * 3, 1)
@example([0], 3 * ADVERTS)
@example([900], 200)
@settings(max_examples=60)
def test_adverts_are_split_into_as_few_messages_as_fit(sizes: list[int], times: int) -> None:
    """If one did not fit, a receiver would refuse it whole, and what it says would never arrive."""
    adverts = [SignedAdvert(bytes(CERTIFICATE_BYTES), bytes(size), bytes(64)) for size in sizes] * times
    messages = pack_adverts(adverts)
    assert [advert for message in messages for advert in message.adverts] == adverts
    for message in messages:
        assert decode(Channel.CONTROL, encode(message)) == message
    for message, following in pairwise(messages):
        more = Adverts((*message.adverts, following.adverts[0]))
        assert len(more.adverts) > ADVERTS or len(encode(more)[0]) > HEADER_BYTES - 8


def test_text_is_cleaned_by_the_sender() -> None:
    """A refusal whose detail is a library's many-lined message must still reach the asker."""
    sent = Refusal(PLAN_ID, 1, 0, RefusalReason.FAILED, "line one\n\tline two \x1b[31m" + "x" * 999, ())
    detail = decode(Channel.DATA, encode(sent)).detail
    assert detail.startswith("line one line two \ufffd[31m")
    assert len(detail) == DETAIL_CHARS


def test_an_address_that_only_this_pc_understands_is_not_sent() -> None:
    sent = Welcome(
        PROTOCOL_VERSION, "1", b"", PORTS, ("fe80::1%eth0", "0.0.0.0", "224.0.0.1", "pc.local", "10.0.0.1")
    )
    assert decode_door(encode(sent)).addresses == ("10.0.0.1",)


def test_honest_messages_are_no_deeper_than_the_bound() -> None:
    def depth(value: object) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    bare = (encode(message)[0] for _, message in SAMPLES.values())
    for data in (encode_advert(ADVERT), encode_plan(PLAN), *bare):
        assert depth(msgpack.unpackb(data)) <= MESSAGE_DEPTH
