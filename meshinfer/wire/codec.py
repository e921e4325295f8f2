"""Bytes ↔ messages: the one table of types, and the two ways through it, `encode` and `decode`.

`decode` returns a message or raises `WireError`, whatever the bytes; nothing is allocated before its length
was checked. `encode` trusts its caller, but cleans text that people wrote (see `meshinfer.text`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, overload

from meshinfer.errors import VersionError, WireError
from meshinfer.limits import (
    BLOB_CHUNK_BYTES,
    BODY_BYTES,
    CERTIFICATE_BYTES,
    DETAIL_CHARS,
    DOOR_BYTES,
    HEADER_BYTES,
    NAME_CHARS,
    PROBE_BYTES,
    PROTOCOL_VERSION,
    STEP_SEQUENCES,
)
from meshinfer.text import printable
from meshinfer.values import Channel, ModelId
from meshinfer.wire import control
from meshinfer.wire import data as steps
from meshinfer.wire.fields import (
    DIGEST_BYTES,
    U63,
    addresses,
    announced,
    blob,
    integer,
    pack,
    ports,
    raw,
    record,
    text,
    unpack,
)
from meshinfer.wire.messages import (
    Adverts,
    Blob,
    BulkMessage,
    Code,
    ControlMessage,
    DataMessage,
    DoorMessage,
    Fetch,
    Free,
    Heartbeat,
    Knock,
    Message,
    Missing,
    Ping,
    Pong,
    Probe,
    Probed,
    Refusal,
    Refused,
    Result,
    Step,
    Summary,
    Welcome,
)

Frame = bytes | memoryview
Fields = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Type:
    """One row of the table. `pack` gives the fields after version and type, and the body if there is one."""

    code: Code
    channel: Channel | None
    message: type[Any]
    pack: Callable[[Any], tuple[Fields, Frame | None]]
    parse: Callable[..., Any]
    body: bool = False


def encode(message: Message) -> list[Frame]:
    """The message's frames. A body is the message's own memory, no copy: leave it alone until it is sent."""
    row = _BY_MESSAGE[type(message)]
    fields, body = row.pack(message)
    version = message.version if row.channel is None else PROTOCOL_VERSION  # type: ignore[union-attr]
    header = pack((version, row.code.value, *fields))
    return [header] if body is None else [header, body]


@overload
def decode(channel: Literal[Channel.CONTROL], frames: Sequence[Frame]) -> ControlMessage: ...
@overload
def decode(channel: Literal[Channel.DATA], frames: Sequence[Frame]) -> DataMessage: ...
@overload
def decode(channel: Literal[Channel.BULK], frames: Sequence[Frame]) -> BulkMessage: ...
@overload
def decode(channel: Channel, frames: Sequence[Frame]) -> ControlMessage | DataMessage | BulkMessage: ...
def decode(channel: Channel, frames: Sequence[Frame]) -> Message:
    """The message in these frames of this channel; bodies are views of the frame. Raises WireError only."""
    return _decode(channel, frames, HEADER_BYTES)


def decode_door(frames: Sequence[Frame]) -> DoorMessage:
    """The same for the door, where anybody may send. VersionError for a peer of another protocol version."""
    return cast(DoorMessage, _decode(None, frames, DOOR_BYTES))


def _decode(channel: Channel | None, frames: Sequence[Frame], longest: int) -> Message:
    if not 1 <= len(frames) <= 2:
        raise WireError("frames", f"a message has one or two frames, not {len(frames)}")
    header = frames[0]
    if len(header) > longest:
        raise WireError("size", f"a header of {len(header)} bytes: at most {longest} are allowed")
    row = _row(channel, header)
    if len(frames) != (2 if row.body else 1):
        raise WireError("frames", f"a {row.code.name.lower()} does not have {len(frames)} frames")
    fields = unpack(header, longest=_LONGEST_ARRAY, bin_bytes=len(header), str_bytes=len(header))
    if not row.body:
        return row.parse(fields)  # type: ignore[no-any-return]
    body = frames[1]
    if len(body) > BODY_BYTES:
        raise WireError("size", f"a body of {len(body)} bytes: at most {BODY_BYTES} are allowed")
    return row.parse(fields, body)  # type: ignore[no-any-return]


def _row(channel: Channel | None, header: Frame) -> _Type:
    """The type, from the first three bytes, whose form no version will change: a short array, version, type.

    Version and type are each one byte, 0…127, so that any two versions can name each other before
    anything else is understood.
    """
    if len(header) < 3 or header[0] & 0xF0 != 0x90 or header[1] > 0x7F or header[2] > 0x7F:
        raise WireError("header", "the header does not begin with a version and a type")
    if header[1] != PROTOCOL_VERSION:
        raise VersionError(header[1], PROTOCOL_VERSION)
    row = _BY_CODE.get(header[2])
    if row is None or row.channel is not channel:
        raise WireError("type", f"no message of type {header[2]} belongs on this channel")
    return row


# ── door ────────────────────────────────────────────────────────────────────────────────────────────────
def _pack_knock(message: Knock) -> tuple[Fields, None]:
    return (printable(message.program, NAME_CHARS), message.certificate), None


def _parse_knock(header: Fields) -> Knock:
    version, _, program, certificate = record(header, "knock", 4)
    return Knock(
        integer(version, "version"),
        text(program, "program", NAME_CHARS),
        blob(certificate, "certificate", CERTIFICATE_BYTES),
    )


def _pack_welcome(message: Welcome) -> tuple[Fields, None]:
    where = message.ports
    numbers = (where.door, where.control, where.data, where.bulk)
    program = printable(message.program, NAME_CHARS)
    return (program, message.certificate, numbers, announced(message.addresses)), None


def _parse_welcome(header: Fields) -> Welcome:
    version, _, program, certificate, where, hosts = record(header, "welcome", 6)
    return Welcome(
        integer(version, "version"),
        text(program, "program", NAME_CHARS),
        blob(certificate, "certificate", CERTIFICATE_BYTES),
        ports(where),
        addresses(hosts),
    )


def _pack_refused(message: Refused) -> tuple[Fields, None]:
    return (printable(message.program, NAME_CHARS), printable(message.reason, DETAIL_CHARS)), None


def _parse_refused(header: Fields) -> Refused:
    version, _, program, reason = record(header, "refused", 4)
    return Refused(
        integer(version, "version"),
        text(program, "program", NAME_CHARS),
        text(reason, "reason", DETAIL_CHARS),
    )


# ── bulk ────────────────────────────────────────────────────────────────────────────────────────────────
def _pack_fetch(message: Fetch) -> tuple[Fields, None]:
    return (
        bytes.fromhex(message.model),
        message.digest,
        message.offset,
        message.length,
        message.request,
    ), None


def _parse_fetch(header: Fields) -> Fetch:
    _, _, model, digest, offset, length, request = record(header, "fetch", 7)
    size = integer(length, "length", BLOB_CHUNK_BYTES, 1)
    return Fetch(
        ModelId(raw(model, "model", DIGEST_BYTES).hex()),
        raw(digest, "digest", DIGEST_BYTES),
        integer(offset, "offset", U63 - size),
        size,
        integer(request, "request"),
    )


def _pack_blob(message: Blob) -> tuple[Fields, Frame]:
    return (message.request, message.digest, message.offset, message.total), message.body


def _parse_blob(header: Fields, body: Frame) -> Blob:
    _, _, request, digest, offset, total = record(header, "blob", 6)
    whole = integer(total, "total")
    start = integer(offset, "offset", whole)
    if len(body) > BLOB_CHUNK_BYTES or len(body) > whole - start:
        raise WireError("size", f"{len(body)} bytes of a blob: more than it has left, or too many")
    return Blob(integer(request, "request"), raw(digest, "digest", DIGEST_BYTES), start, whole, body)


def _pack_missing(message: Missing) -> tuple[Fields, None]:
    return (message.request, message.digest), None


def _parse_missing(header: Fields) -> Missing:
    _, _, request, digest = record(header, "missing", 4)
    return Missing(integer(request, "request"), raw(digest, "digest", DIGEST_BYTES))


def _pack_probe(message: Probe) -> tuple[Fields, Frame]:
    return (message.token,), message.body


def _parse_probe(header: Fields, body: Frame) -> Probe:
    if len(body) > PROBE_BYTES:
        raise WireError("size", f"a probe of {len(body)} bytes: at most {PROBE_BYTES} are allowed")
    return Probe(integer(record(header, "probe", 3)[2], "token"), body)


def _pack_probed(message: Probed) -> tuple[Fields, None]:
    return (message.token,), None


def _parse_probed(header: Fields) -> Probed:
    return Probed(integer(record(header, "probed", 3)[2], "token"))


_TYPES: Final = (
    _Type(Code.KNOCK, None, Knock, _pack_knock, _parse_knock),
    _Type(Code.WELCOME, None, Welcome, _pack_welcome, _parse_welcome),
    _Type(Code.REFUSED, None, Refused, _pack_refused, _parse_refused),
    _Type(Code.PING, Channel.CONTROL, Ping, control.pack_token, control.parse_ping),
    _Type(Code.PONG, Channel.CONTROL, Pong, control.pack_token, control.parse_pong),
    _Type(Code.ADVERTS, Channel.CONTROL, Adverts, control.adverts_fields, control.parse_adverts),
    _Type(Code.HEARTBEAT, Channel.CONTROL, Heartbeat, control.pack_heartbeat, control.parse_heartbeat),
    _Type(Code.SUMMARY, Channel.CONTROL, Summary, control.pack_summary, control.parse_summary, body=True),
    _Type(Code.STEP, Channel.DATA, Step, steps.pack_step, steps.parse_step, body=True),
    _Type(Code.RESULT, Channel.DATA, Result, steps.pack_result, steps.parse_result, body=True),
    _Type(Code.REFUSAL, Channel.DATA, Refusal, steps.pack_refusal, steps.parse_refusal),
    _Type(Code.FREE, Channel.DATA, Free, steps.pack_free, steps.parse_free),
    _Type(Code.FETCH, Channel.BULK, Fetch, _pack_fetch, _parse_fetch),
    _Type(Code.BLOB, Channel.BULK, Blob, _pack_blob, _parse_blob, body=True),
    _Type(Code.MISSING, Channel.BULK, Missing, _pack_missing, _parse_missing),
    _Type(Code.PROBE, Channel.BULK, Probe, _pack_probe, _parse_probe, body=True),
    _Type(Code.PROBED, Channel.BULK, Probed, _pack_probed, _parse_probed),
)
_BY_CODE: Final = {row.code.value: row for row in _TYPES}
_BY_MESSAGE: Final = {row.message: row for row in _TYPES}
_LONGEST_ARRAY: Final = STEP_SEQUENCES
"""The numbers of a refusal or of a `Free` are the longest arrays there are."""
