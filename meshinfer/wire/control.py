"""The control channel's messages to header fields and back: who is here, and what each says of itself.

Marks are records of fixed width in the body, like a step's entries: a summary of a whole mesh is the largest
message that agents exchange often. Each `pack_` gives the fields after version and type, and the body if there
is one; each `parse_` takes the whole header.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from meshinfer.errors import WireError
from meshinfer.limits import (
    ADVERT_BYTES,
    ADVERTS,
    CERTIFICATE_BYTES,
    HEADER_BYTES,
    SUMMARY_MARK_BYTES,
    SUMMARY_MARKS,
)
from meshinfer.values import Mark, PeerId
from meshinfer.wire.fields import (
    SIGNATURE_BYTES,
    U63,
    array,
    ascending,
    blob,
    boolean,
    integer,
    pack,
    raw,
    record,
)
from meshinfer.wire.messages import Adverts, Heartbeat, Ping, Pong, SignedAdvert, Summary

Fields = tuple[object, ...]

VIEW_DIGEST_BYTES: Final = 8
"""What a heartbeat says of everything that its sender knows."""

_MARK: Final = Struct("<16sQQ")
"""peer, incarnation, version."""
assert _MARK.size == SUMMARY_MARK_BYTES

_HEADER_ROOM: Final = HEADER_BYTES - len(pack((0, 0, ()))) - 2
"""For adverts in one message; two bytes for an array of 16 and more."""


def pack_adverts(adverts: Sequence[SignedAdvert]) -> list[Adverts]:
    """As few messages as hold these adverts in their order, each within what a receiver takes."""
    messages: list[Adverts] = []
    batch: list[SignedAdvert] = []
    room = _HEADER_ROOM
    for advert in adverts:
        size = len(pack(_signed_fields(advert)))
        if batch and (size > room or len(batch) == ADVERTS):
            messages.append(Adverts(tuple(batch)))
            batch, room = [], _HEADER_ROOM
        batch.append(advert)
        room -= size
    return [*messages, Adverts(tuple(batch))] if batch else messages


def adverts_fields(message: Adverts) -> tuple[Fields, None]:
    return (tuple(map(_signed_fields, message.adverts)),), None


def parse_adverts(header: Fields) -> Adverts:
    _, _, value = record(header, "adverts", 3)
    adverts = array(value, "adverts", ADVERTS)
    if not adverts:
        raise WireError("field", "a message brings no advert at all")
    return Adverts(tuple(map(_signed, adverts)))


def _signed_fields(advert: SignedAdvert) -> Fields:
    return advert.certificate, advert.payload, advert.signature


def _signed(value: object) -> SignedAdvert:
    certificate, payload, signature = record(value, "signed advert", 3)
    return SignedAdvert(
        blob(certificate, "certificate", CERTIFICATE_BYTES),
        blob(payload, "payload", ADVERT_BYTES),
        raw(signature, "signature", SIGNATURE_BYTES),
    )


def pack_heartbeat(message: Heartbeat) -> tuple[Fields, None]:
    return (message.incarnation, message.count, message.echo, message.echo_age_us, message.digest), None


def parse_heartbeat(header: Fields) -> Heartbeat:
    _, _, incarnation, count, echo, age, digest = record(header, "heartbeat", 7)
    return Heartbeat(
        integer(incarnation, "incarnation"),
        integer(count, "count", lowest=1),
        integer(echo, "echo"),
        integer(age, "age of the echo"),
        raw(digest, "digest", VIEW_DIGEST_BYTES),
    )


def pack_summary(message: Summary) -> tuple[Fields, bytes]:
    marks = [_MARK.pack(bytes.fromhex(one.peer), one.incarnation, one.version) for one in message.marks]
    return (message.reply,), b"".join(marks)


def parse_summary(header: Fields, body: bytes | memoryview) -> Summary:
    _, _, reply = record(header, "summary", 3)
    if len(body) > SUMMARY_MARKS * _MARK.size or len(body) % _MARK.size:
        raise WireError("size", f"a summary has over {SUMMARY_MARKS} marks, or its last one is cut short")
    found = list(_MARK.iter_unpack(body))
    if not ascending([peer for peer, _, _ in found]):
        raise WireError("field", "marks are not in order of peer id, or one is there twice")
    if any(incarnation > U63 or version > U63 for _, incarnation, version in found):
        raise WireError("field", "a mark's number is beyond 63 bits")
    marks = [Mark(PeerId(peer.hex()), incarnation, version) for peer, incarnation, version in found]
    return Summary(tuple(marks), boolean(reply, "reply"))


def pack_token(message: Ping | Pong) -> tuple[Fields, None]:
    return (message.token,), None


def parse_ping(header: Fields) -> Ping:
    return Ping(integer(record(header, "ping", 3)[2], "token"))


def parse_pong(header: Fields) -> Pong:
    return Pong(integer(record(header, "pong", 3)[2], "token"))
