"""If these fail, a message arrives as another than was sent."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_samples import (
    channel_of,
    hexed,
    read,
    spoken,
)

from meshinfer.limits import (
    BLOB_CHUNK_BYTES,
    CERTIFICATE_BYTES,
    CONTEXT_TOKENS,
    DETAIL_CHARS,
    PROTOCOL_VERSION,
    ROUTE_HOPS,
    STEP_SEQUENCES,
    STEP_TOKENS,
)
from meshinfer.text import printable
from meshinfer.values import Mark, ModelId, PeerId, PlanId, Ports
from meshinfer.wire.codec import encode
from meshinfer.wire.messages import (
    Adverts,
    Blob,
    Entry,
    Fetch,
    Free,
    Heartbeat,
    HopTrace,
    Knock,
    Message,
    Missing,
    Ping,
    Pong,
    Probe,
    Probed,
    Refusal,
    RefusalReason,
    Refused,
    Result,
    SignedAdvert,
    Step,
    Summary,
    Welcome,
)

U63 = st.integers(0, 2**63 - 1)
PEERS = st.binary(min_size=16, max_size=16).map(lambda raw: PeerId(raw.hex()))
PLANS = st.binary(min_size=32, max_size=32).map(lambda raw: PlanId(raw.hex()))
MODELS = st.binary(min_size=32, max_size=32).map(lambda raw: ModelId(raw.hex()))
DIGESTS = st.binary(min_size=32, max_size=32)
PORT = st.integers(1, 65535)
TEXT = st.text().map(lambda text: printable(text, 64))
ADDRESSES = st.lists(
    st.ip_addresses().filter(lambda ip: not (ip.is_multicast or ip.is_unspecified)).map(str), max_size=16
)
SIGNED = st.builds(
    SignedAdvert,
    st.binary(max_size=CERTIFICATE_BYTES),
    st.binary(max_size=999),
    st.binary(min_size=64, max_size=64),
)
MARKS = st.lists(st.builds(Mark, PEERS, U63, U63), max_size=9, unique_by=lambda mark: mark.peer).map(
    lambda marks: tuple(sorted(marks, key=lambda mark: mark.peer))
)
TRACES = st.builds(HopTrace, *[st.integers(0, 2**32 - 1)] * 3)


@st.composite
def entries(draw: st.DrawFn) -> tuple[Entry, ...]:
    found = []
    for sequence in draw(st.lists(U63, min_size=1, max_size=12, unique=True)):
        count = draw(st.integers(1, STEP_TOKENS // 12))
        position = draw(st.integers(0, CONTEXT_TOKENS - count))
        found.append(Entry(sequence, position, count, draw(st.integers(0, count))))
    return tuple(found)


def some_rows(count: int, hidden: int, dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, hidden)).astype(dtype)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    some = draw(entries())
    route = tuple(draw(st.lists(PEERS, min_size=1, max_size=8, unique=True)))
    hop = draw(st.integers(0, len(route) - 1))
    trace = tuple(draw(st.lists(TRACES, min_size=hop, max_size=hop)))
    rows = some_rows(
        sum(e.count for e in some), draw(st.integers(1, 9)), draw(st.sampled_from(["<f4", "<f2"])), hop
    )
    return Step(draw(PLANS), route, hop, draw(PEERS), draw(U63), some, trace, rows)


@st.composite
def results(draw: st.DrawFn) -> Result:
    some = draw(entries())
    rows = some_rows(sum(e.want for e in some), draw(st.integers(1, 9)), "<f4", 1)
    return Result(draw(PLANS), draw(U63), some, tuple(draw(st.lists(TRACES, max_size=8))), rows)


@st.composite
def blobs(draw: st.DrawFn) -> Blob:
    body = draw(st.binary(max_size=99))
    offset = draw(st.integers(0, 2**62))
    return Blob(
        draw(U63), draw(DIGESTS), offset, offset + len(body) + draw(st.integers(0, 2**62 - 100)), body
    )


REASONS = st.text().map(lambda text: printable(text, DETAIL_CHARS))
MESSAGES = st.one_of(
    st.builds(Knock, st.just(PROTOCOL_VERSION), TEXT, st.binary(max_size=CERTIFICATE_BYTES)),
    st.builds(
        Welcome,
        st.just(PROTOCOL_VERSION),
        TEXT,
        st.binary(max_size=CERTIFICATE_BYTES),
        st.builds(Ports, PORT, PORT, PORT, PORT),
        ADDRESSES.map(tuple),
    ),
    st.builds(Refused, st.just(PROTOCOL_VERSION), TEXT, REASONS),
    st.builds(Adverts, st.lists(SIGNED, min_size=1, max_size=9).map(tuple)),
    st.builds(Heartbeat, U63, st.integers(1, 2**63 - 1), U63, U63, st.binary(min_size=8, max_size=8)),
    st.builds(Summary, MARKS, st.booleans()),
    st.builds(Ping, U63),
    st.builds(Pong, U63),
    steps(),
    results(),
    st.builds(
        Refusal,
        PLANS,
        U63,
        st.integers(0, ROUTE_HOPS - 1),
        st.sampled_from(RefusalReason),
        REASONS,
        st.lists(st.integers(0, CONTEXT_TOKENS), max_size=STEP_SEQUENCES).map(tuple),
    ),
    st.builds(Free, st.lists(U63, min_size=1, max_size=STEP_SEQUENCES, unique=True).map(tuple)),
    st.builds(Fetch, MODELS, DIGESTS, st.integers(0, 2**62), st.integers(1, BLOB_CHUNK_BYTES), U63),
    blobs(),
    st.builds(Missing, U63, DIGESTS),
    st.builds(Probe, U63, st.binary(max_size=99)),
    st.builds(Probed, U63),
)


@given(MESSAGES)
@settings(max_examples=400)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    channel = channel_of(message)
    for frames in (encode(message), [memoryview(bytes(frame)) for frame in encode(message)]):
        back = read(channel, frames)
        assert json.dumps(spoken(back)) == json.dumps(spoken(message))
        assert hexed(encode(back)) == hexed(encode(message))
