"""The data channel's messages to header fields and back: the path that every token takes, so flat and short.

Entries and traces are records of fixed width in one string of bytes each, so that their types need no
checking; ids are raw bytes. Each `pack_` gives the fields after version and type, and the body if there is
one; each `parse_` takes the whole header.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from struct import Struct
from typing import Final, cast

from meshinfer.errors import WireError
from meshinfer.limits import CONTEXT_TOKENS, DETAIL_CHARS, ROUTE_HOPS, STEP_SEQUENCES, STEP_TOKENS
from meshinfer.text import printable
from meshinfer.values import PeerId, PlanId
from meshinfer.wire.fields import DIGEST_BYTES, ID_BYTES, U32, U63, blob, integer, integers, raw, record, text
from meshinfer.wire.messages import Entry, Free, HopTrace, Refusal, RefusalReason, Result, Step
from meshinfer.wire.rows import pack_rows, parse_rows

Fields = tuple[object, ...]
Packed = tuple[Fields, bytes | memoryview | None]

_ENTRY: Final = Struct("<QIHH")
"""sequence, position, count, want."""
_TRACE: Final = Struct("<III")
"""queue µs, compute µs, tokens in the batch."""
_ID_CHARS: Final = 2 * ID_BYTES


def pack_step(message: Step) -> Packed:
    entries = message.entries
    dtype, hidden, body = pack_rows(message.rows, sum([entry.count for entry in entries]))
    fields = (
        bytes.fromhex(message.plan),
        bytes.fromhex("".join(message.route)),
        message.hop,
        bytes.fromhex(message.asker),
        message.step,
        _pack_entries(entries),
        _pack_trace(message.trace),
        dtype,
        hidden,
    )
    return fields, body


def parse_step(header: Fields, body: bytes | memoryview) -> Step:
    _, _, plan, path, hop, asker, step, flat, traces, dtype, hidden = record(header, "step", 11)
    route = _route(path)
    index = integer(hop, "hop", len(route) - 1)
    trace = _trace(traces)
    if len(trace) != index:
        raise WireError("field", f"hop {index} comes with {len(trace)} traces")
    entries = _entries(flat)
    rows = parse_rows(dtype, hidden, sum([entry.count for entry in entries]), body)
    return Step(
        PlanId(raw(plan, "plan", DIGEST_BYTES).hex()),
        route,
        index,
        PeerId(raw(asker, "asker", ID_BYTES).hex()),
        integer(step, "step"),
        entries,
        trace,
        rows,
    )


def pack_result(message: Result) -> Packed:
    entries = message.entries
    dtype, hidden, body = pack_rows(message.rows, sum([entry.want for entry in entries]))
    fields = (
        bytes.fromhex(message.plan),
        message.step,
        _pack_entries(entries),
        _pack_trace(message.trace),
        dtype,
        hidden,
    )
    return fields, body


def parse_result(header: Fields, body: bytes | memoryview) -> Result:
    _, _, plan, step, flat, traces, dtype, hidden = record(header, "result", 8)
    entries = _entries(flat)
    rows = parse_rows(dtype, hidden, sum([entry.want for entry in entries]), body)
    return Result(
        PlanId(raw(plan, "plan", DIGEST_BYTES).hex()), integer(step, "step"), entries, _trace(traces), rows
    )


def pack_refusal(message: Refusal) -> Packed:
    detail = printable(message.detail, DETAIL_CHARS)
    plan = bytes.fromhex(message.plan)
    return (plan, message.step, message.hop, int(message.reason), detail, message.held), None


def parse_refusal(header: Fields) -> Refusal:
    _, _, plan, step, hop, reason, detail, held = record(header, "refusal", 8)
    return Refusal(
        PlanId(raw(plan, "plan", DIGEST_BYTES).hex()),
        integer(step, "step"),
        integer(hop, "hop", ROUTE_HOPS - 1),
        RefusalReason(integer(reason, "reason", max(RefusalReason), min(RefusalReason))),
        text(detail, "detail", DETAIL_CHARS),
        integers(held, "held", STEP_SEQUENCES, CONTEXT_TOKENS),
    )


def pack_free(message: Free) -> Packed:
    return (message.sequences,), None


def parse_free(header: Fields) -> Free:
    _, _, value = record(header, "free", 3)
    sequences = integers(value, "sequences", STEP_SEQUENCES)
    if not sequences or len(set(sequences)) != len(sequences):
        raise WireError("field", "sequences to free are none, or one is there twice")
    return Free(sequences)


def _route(value: object) -> tuple[PeerId, ...]:
    """One to `ROUTE_HOPS` different peers. A repeat would let a step go in circles."""
    path = blob(value, "route", ROUTE_HOPS * ID_BYTES).hex()
    route = tuple([path[start : start + _ID_CHARS] for start in range(0, len(path), _ID_CHARS)])
    if not route or len(path) % _ID_CHARS or len(set(route)) != len(route):
        raise WireError("field", "the route is empty, cut short, or passes one peer twice")
    return cast("tuple[PeerId, ...]", route)


def _pack_entries(entries: Sequence[Entry]) -> bytes:
    return b"".join([_ENTRY.pack(e.sequence, e.position, e.count, e.want) for e in entries])


def _entries(value: object) -> tuple[Entry, ...]:
    data = blob(value, "entries", STEP_SEQUENCES * _ENTRY.size)
    if not data or len(data) % _ENTRY.size:
        raise WireError("field", "entries are none, or the last one is cut short")
    entries = []
    tokens = 0
    seen = set()
    for sequence, position, count, want in _ENTRY.iter_unpack(data):
        if not (want <= count and 0 < count <= CONTEXT_TOKENS - position and sequence <= U63):
            raise WireError("field", "an entry has no rows, wants more than it has, or is beyond any context")
        tokens += count
        seen.add(sequence)
        entries.append(Entry(sequence, position, count, want))
    if tokens > STEP_TOKENS or len(seen) != len(entries):
        raise WireError("field", f"a step has over {STEP_TOKENS} rows, or one sequence twice")
    return tuple(entries)


def _pack_trace(trace: Sequence[HopTrace]) -> bytes:
    # A PC that slept in the middle of a step may have measured hours.
    return b"".join(
        [_TRACE.pack(min(t.queue_us, U32), min(t.compute_us, U32), t.batch_tokens) for t in trace]
    )


def _trace(value: object) -> tuple[HopTrace, ...]:
    data = blob(value, "trace", ROUTE_HOPS * _TRACE.size)
    if len(data) % _TRACE.size:
        raise WireError("field", "the last trace is cut short")
    return tuple(starmap(HopTrace, _TRACE.iter_unpack(data)))
