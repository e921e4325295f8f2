"""One of each message, and the protocol's test vectors made of them.

`python tests/wire_samples.py` writes `meshinfer/wire/vectors.json` anew. Do that only together with a new
protocol version: what the file pins is what other programs were written against.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from meshinfer.limits import PROTOCOL_VERSION
from meshinfer.values import (
    Advert,
    Assignment,
    Channel,
    Holding,
    LinkFacts,
    Mark,
    ModelId,
    Objective,
    OwnerFacts,
    PeerId,
    Plan,
    PlanId,
    Ports,
    Precision,
    Readiness,
    Span,
    Standing,
)
from meshinfer.wire.advert import encode_advert
from meshinfer.wire.codec import decode, decode_door, encode
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
from meshinfer.wire.plan import encode_plan

VECTORS = Path(__file__).parent.parent / "meshinfer" / "wire" / "vectors.json"

ANN, BOB, EVA = (PeerId(digit * 32) for digit in "abe")
MODEL = ModelId("5a" * 32)
PORTS = Ports(7700, 7701, 7702, 7703)
PLAN = Plan(
    model=MODEL,
    layers=30,
    round=8,
    replaces=PlanId("c3" * 32),
    assignments=(Assignment(ANN, Span(0, 17), "CPU", 8192), Assignment(BOB, Span(17, 30), "GPU.0", 4096)),
    standbys=(
        Assignment(EVA, Span(0, 9), "CPU", 2048),
        Assignment(BOB, Span(9, 17), "GPU.0", 1024),
        Assignment(ANN, Span(17, 30), "CPU", 8192),
    ),
    inputs=(
        OwnerFacts(ANN, 3, 2**31, 310, Precision.EXACT),
        OwnerFacts(BOB, 1, 2**33, 95, Precision.AUTO),
        OwnerFacts(EVA, 2, 2**30, 400, Precision.AUTO),
    ),
    predicted_us=7_340,
    stage_us=5_270,
)
BARE_PLAN = Plan(
    model=MODEL,
    layers=2,
    round=1,
    replaces=None,
    assignments=(Assignment(ANN, Span(0, 2), "CPU", 1),),
    standbys=(),
    inputs=(OwnerFacts(ANN, 3, 2**31, 310, Precision.EXACT),),
    predicted_us=0,
    stage_us=0,
)
PLAN_ID = PlanId(hashlib.sha256(encode_plan(PLAN)).hexdigest())
ADVERT = Advert(
    peer=ANN,
    name="Ann’s büro 🖥",
    incarnation=3,
    version=41,
    addresses=("192.168.1.20", "fd00::20"),
    ports=PORTS,
    program="0.1.0",
    rules=2,
    device="CPU",
    precision=Precision.EXACT,
    capacity_bytes=2**31,
    allocation_bytes=2**30,
    decode_us=310,
    prefill_us=24,
    holdings=(Holding(MODEL, "smollm2", True),),
    wants=MODEL,
    min_owners=2,
    objective=Objective.THROUGHPUT,
    links=(LinkFacts(BOB, 640, 940_000), LinkFacts(EVA, 0, 0)),
    broken=(EVA,),
    doubts=(BOB, EVA),
    round=7,
    standings=(
        Standing(PLAN, Readiness.LOADING, "fetching layers 0-16", (Span(17, 30),)),
        Standing(BARE_PLAN, Readiness.READY, "", (Span(0, 2),)),
    ),
)
BARE_ADVERT = dataclasses.replace(
    ADVERT, addresses=(), holdings=(), wants=None, links=(), broken=(), doubts=(), standings=(), leaving=True
)
SIGNED = SignedAdvert(b"certificate", encode_advert(ADVERT), bytes(range(64)))

_ENTRIES = (Entry(2**63 - 1, 0, 2, 1), Entry(7, 4095, 1, 1))
_TRACE = (HopTrace(120, 4200, 3),)

SAMPLES: dict[str, tuple[Channel | None, Message]] = {
    "knock": (None, Knock(PROTOCOL_VERSION, "0.1.0", b"certificate")),
    "welcome": (None, Welcome(PROTOCOL_VERSION, "0.1.0", b"certificate", PORTS, ("10.0.0.7", "::1"))),
    "refused": (None, Refused(PROTOCOL_VERSION, "0.1.0", "another mesh")),
    "adverts": (
        Channel.CONTROL,
        Adverts((SIGNED, SignedAdvert(b"another", encode_advert(BARE_ADVERT), bytes(64)))),
    ),
    "heartbeat": (Channel.CONTROL, Heartbeat(3, 812, 790, 250_000, bytes(range(8)))),
    "summary": (Channel.CONTROL, Summary((Mark(ANN, 3, 41), Mark(BOB, 2**63 - 1, 0)), reply=True)),
    "empty summary": (Channel.CONTROL, Summary((), reply=False)),
    "ping": (Channel.CONTROL, Ping(2**63 - 1)),
    "pong": (Channel.CONTROL, Pong(0)),
    "step": (
        Channel.DATA,
        Step(PLAN_ID, (ANN, BOB), 1, EVA, 9, _ENTRIES, _TRACE, np.arange(12, dtype="<f4").reshape(3, 4) / 8),
    ),
    "result": (
        Channel.DATA,
        Result(PLAN_ID, 9, _ENTRIES, _TRACE * 2, np.arange(8, dtype="<f4").reshape(2, 4) - 3.5),
    ),
    "result of f16": (
        Channel.DATA,
        Result(PLAN_ID, 9, _ENTRIES, _TRACE * 2, np.arange(8, dtype="<f2").reshape(2, 4) - 3.5),
    ),
    "result without rows": (
        Channel.DATA,
        Result(PLAN_ID, 10, (Entry(7, 0, 256, 0),), _TRACE, np.empty((0, 4), "<f4")),
    ),
    "refusal": (
        Channel.DATA,
        Refusal(PLAN_ID, 9, 1, RefusalReason.MISSING_KV, "the KV of sequence 7 is gone", (0, 17)),
    ),
    "free": (Channel.DATA, Free((7, 2**63 - 1))),
    "fetch": (Channel.BULK, Fetch(MODEL, bytes(32), 4096, 2**20, 5)),
    "blob": (Channel.BULK, Blob(5, bytes(32), 4096, 5000, b"weights")),
    "missing": (Channel.BULK, Missing(5, bytes(32))),
    "probe": (Channel.BULK, Probe(6, b"any bytes")),
    "probed": (Channel.BULK, Probed(6)),
}


def spoken(value: Any) -> Any:
    """A message as JSON shows it: bytes in hex, numbers of 2**53 and above as text, rows as lists."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "rows": value.tolist(), "hidden": value.shape[1]}
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, tuple):
        return [spoken(one) for one in value]
    if dataclasses.is_dataclass(value):
        return {field.name: spoken(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, int) and value >= 2**53:
        return str(value)
    return value


def hexed(frames: Any) -> list[str]:
    return [bytes(frame).hex() for frame in frames]


def channel_of(message: Message) -> Channel | None:
    """The channel that messages of this type travel on; None is the door."""
    return next(channel for channel, sample in SAMPLES.values() if type(sample) is type(message))


def read(channel: Channel | None, frames: list[bytes]) -> Message:
    return decode_door(frames) if channel is None else decode(channel, frames)


def refused_samples() -> dict[str, tuple[Channel | None, list[bytes], str]]:
    """Frames that are no messages, each with the kind of its WireError."""
    ping = bytes(encode(Ping(1))[0])
    step = [bytes(frame) for frame in encode(SAMPLES["step"][1])]
    summary, marks = (bytes(frame) for frame in encode(SAMPLES["summary"][1]))
    control, data = Channel.CONTROL, Channel.DATA
    pack = msgpack.packb
    endless = bytes([0x93, PROTOCOL_VERSION, 18]) + b"\xdd\xff\xff\xff\xff"
    return {
        "no frames": (control, [], "frames"),
        "three frames": (control, [ping, b"", b""], "frames"),
        "a ping with a body": (control, [ping, b""], "frames"),
        "a step without its body": (data, step[:1], "frames"),
        "an empty header": (control, [b""], "header"),
        "pickle": (control, [bytes.fromhex("80049503000000000000004b012e")], "header"),
        "a map for a header": (control, [pack({PROTOCOL_VERSION: 18})], "header"),
        "another version": (control, [b"\x93\x7f" + ping[2:]], "version"),
        "a step on the control channel": (control, step, "type"),
        "a type that is not in the table": (control, [pack([PROTOCOL_VERSION, 99])], "type"),
        "bytes after the header": (control, [ping + b"\0"], "msgpack"),
        "a header cut short": (control, [ping[:-1] + b"\xcd"], "msgpack"),
        "a declared length beyond the frame": (control, [endless], "msgpack"),
        "a field too many": (control, [pack([PROTOCOL_VERSION, 18, 1, 2])], "field"),
        "true for a number": (control, [pack([PROTOCOL_VERSION, 18, True])], "field"),
        "a negative number": (control, [pack([PROTOCOL_VERSION, 18, -1])], "field"),
        "a map in a field": (control, [pack([PROTOCOL_VERSION, 18, {1: 1, 2: 2}])], "msgpack"),
        "an extension in a field": (
            control,
            [pack([PROTOCOL_VERSION, 18, msgpack.ExtType(5, b"x")])],
            "msgpack",
        ),
        "a terminal escape in a sentence": (None, [pack([PROTOCOL_VERSION, 3, "0.1.0", "\x1b[2J"])], "text"),
        "a message of protocol 1": (control, [b"\x93\x01\x12\x01"], "version"),
        "no advert": (control, [pack([PROTOCOL_VERSION, 21, []])], "field"),
        "a beat that was never counted": (
            control,
            [pack([PROTOCOL_VERSION, 22, 3, 0, 0, 0, bytes(8)])],
            "field",
        ),
        "a mark cut short": (control, [summary, marks[:-1]], "size"),
        "marks out of order": (control, [summary, marks[32:] + marks[:32]], "field"),
        "a mark twice": (control, [summary, marks[:32] * 2], "field"),
        "a version beyond 63 bits": (control, [summary, marks[:-1] + b"\xff"], "field"),
        "a body one byte short": (data, [step[0], step[1][:-1]], "rows"),
        "a body one byte long": (data, [step[0], step[1] + b"\0"], "rows"),
    }


def vectors() -> dict[str, Any]:
    return {
        "version": PROTOCOL_VERSION,
        "messages": [
            {
                "name": name,
                "channel": channel.name.lower() if channel is not None else "door",
                "type": type(message).__name__,
                "value": spoken(message),
                "frames": hexed(encode(message)),
            }
            for name, (channel, message) in SAMPLES.items()
        ],
        "adverts": [
            {"value": spoken(advert), "bytes": encode_advert(advert).hex()}
            for advert in (ADVERT, BARE_ADVERT)
        ],
        "plans": [
            {"value": spoken(plan), "bytes": data.hex(), "id": hashlib.sha256(data).hexdigest()}
            for plan, data in ((plan, encode_plan(plan)) for plan in (PLAN, BARE_PLAN))
        ],
        "refused": [
            {
                "name": name,
                "channel": channel.name.lower() if channel is not None else "door",
                "frames": hexed(frames),
                "kind": kind,
            }
            for name, (channel, frames, kind) in refused_samples().items()
        ],
    }


if __name__ == "__main__":
    VECTORS.write_text(
        json.dumps(vectors(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8", newline="\n"
    )
