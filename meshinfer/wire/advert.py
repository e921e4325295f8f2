"""Adverts and plans as canonical bytes: signatures and plan ids are taken over them.

One value has one encoding, the same on every PC: arrays in a fixed order, MessagePack's shortest forms, no
floats, maps or absent fields, text in NFC, peers in order. What decodes but is not the encoding of what it
decodes to is refused, so nobody can make two byte strings of one meaning. Every field's check lets through only
what `encode` would write, so that it is enough to pack what was unpacked and compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Final

from meshinfer.errors import WireError
from meshinfer.limits import (
    ADVERT_BYTES,
    BROKEN_LINKS,
    DETAIL_CHARS,
    DEVICE_CHARS,
    DOUBTS,
    HOLDINGS,
    LINKS,
    NAME_CHARS,
    PLAN_BYTES,
    PROTOCOL_VERSION,
    ROUTE_HOPS,
    STANDINGS,
)
from meshinfer.text import printable
from meshinfer.values import (
    Advert,
    Holding,
    LinkFacts,
    Objective,
    PeerId,
    Precision,
    Readiness,
    Standing,
)
from meshinfer.wire.fields import (
    ID_BYTES,
    U32,
    addresses,
    announced,
    array,
    ascending,
    blob,
    boolean,
    integer,
    model_id,
    pack,
    peer_id,
    ports,
    record,
    records,
    text,
    unpack,
    word,
)
from meshinfer.wire.plan import encode_plan, read_plan

_LINK: Final = Struct("<16sII")
"""peer, round trip µs, kbit/s."""
_SPAN: Final = Struct("<HH")
"""first layer, last layer + 1."""


def encode_advert(advert: Advert) -> bytes:
    """Canonical bytes, under 64 KiB. Raises WireError for an advert that no peer would accept.

    Text is cleaned and times are capped. Left out are addresses that mean nothing to another PC, and what is
    beyond the number of holdings and addresses that an advert may list.
    """
    data = pack(_advert_fields(advert))
    decode_advert(data)
    return data


def decode_advert(data: bytes | memoryview) -> Advert:
    """The advert of a peer. Raises WireError (VersionError never: the message around it has been checked)."""
    if len(data) > ADVERT_BYTES:
        raise WireError("size", f"an advert of {len(data)} bytes: at most {ADVERT_BYTES} are allowed")
    fields = unpack(data, longest=HOLDINGS, bin_bytes=len(data), str_bytes=4 * DETAIL_CHARS)
    advert = _parse_advert(fields)
    if pack(fields) != data:
        raise WireError("canonical", "an advert is not in its canonical form")
    return advert


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
        advert.rules,
        printable(advert.device, DEVICE_CHARS),
        advert.precision.value,
        advert.capacity_bytes,
        advert.allocation_bytes,
        advert.decode_us,
        advert.prefill_us,
        tuple(
            (bytes.fromhex(holding.model), printable(holding.name, NAME_CHARS), holding.complete)
            for holding in advert.holdings[:HOLDINGS]
        ),
        None if advert.wants is None else bytes.fromhex(advert.wants),
        advert.min_owners,
        advert.objective.value,
        b"".join(map(_pack_link, advert.links)),
        bytes.fromhex("".join(advert.broken)),
        bytes.fromhex("".join(advert.doubts)),
        advert.round,
        tuple(map(_standing_fields, advert.standings)),
        advert.leaving,
    )


def _pack_link(link: LinkFacts) -> bytes:
    # A PC that slept may have measured hours.
    return _LINK.pack(bytes.fromhex(link.peer), min(link.round_trip_us, U32), min(link.kbit_s, U32))


def _standing_fields(standing: Standing) -> tuple[object, ...]:
    spans = b"".join([_SPAN.pack(span.first, span.last) for span in standing.spans])
    return (
        encode_plan(standing.plan),
        standing.readiness.value,
        printable(standing.detail, DETAIL_CHARS),
        spans,
    )


# ── reading an advert ───────────────────────────────────────────────────────────────────────────────────
def _parse_advert(header: tuple[object, ...]) -> Advert:
    (
        version,
        author,
        name,
        incarnation,
        count,
        hosts,
        where,
        program,
        rules,
        device,
        precision,
        capacity,
        allocation,
        decode,
        prefill,
        held,
        wants,
        fewest,
        objective,
        heard,
        badly_linked,
        doubted,
        last_round,
        stands_by,
        leaving,
    ) = record(header, "advert", 25)
    integer(version, "version", PROTOCOL_VERSION, PROTOCOL_VERSION)
    peer = peer_id(author)
    return Advert(
        peer=peer,
        name=text(name, "name", NAME_CHARS),
        incarnation=integer(incarnation, "incarnation"),
        version=integer(count, "advert version"),
        addresses=addresses(hosts),
        ports=ports(where),
        program=text(program, "program", NAME_CHARS),
        rules=integer(rules, "rules", U32),
        device=text(device, "device", DEVICE_CHARS),
        precision=word(Precision, precision, "precision"),
        capacity_bytes=integer(capacity, "capacity"),
        allocation_bytes=integer(allocation, "largest allocation"),
        decode_us=integer(decode, "decode time", U32),
        prefill_us=integer(prefill, "prefill time", U32),
        holdings=tuple(map(_holding, array(held, "holdings", HOLDINGS))),
        wants=None if wants is None else model_id(wants),
        min_owners=integer(fewest, "fewest owners", ROUTE_HOPS, 1),
        objective=word(Objective, objective, "objective"),
        links=_links(heard, peer),
        broken=_others(badly_linked, "broken links", BROKEN_LINKS, peer),
        doubts=_others(doubted, "doubts", DOUBTS, peer),
        round=integer(last_round, "round"),
        standings=_standings(stands_by, peer),
        leaving=boolean(leaving, "leaving"),
    )


def _holding(value: object) -> Holding:
    model, name, complete = record(value, "holding", 3)
    return Holding(model_id(model), text(name, "model name", NAME_CHARS), boolean(complete, "complete"))


def _links(value: object, author: PeerId) -> tuple[LinkFacts, ...]:
    data = records(value, "links", LINKS, _LINK.size)
    links = tuple([LinkFacts(PeerId(peer.hex()), *speed) for peer, *speed in _LINK.iter_unpack(data)])
    _check_others([link.peer for link in links], "links", author)
    return links


def _others(value: object, name: str, longest: int, author: PeerId) -> tuple[PeerId, ...]:
    ids = records(value, name, longest, ID_BYTES).hex()
    width = 2 * ID_BYTES
    peers = tuple([PeerId(ids[start : start + width]) for start in range(0, len(ids), width)])
    _check_others(peers, name, author)
    return peers


def _check_others(peers: Sequence[PeerId], name: str, author: PeerId) -> None:
    if author in peers or not ascending(peers):
        raise WireError("field", f"{name} are not in order of peer id, or name one twice, or the author")


def _standings(value: object, author: PeerId) -> tuple[Standing, ...]:
    rows = [record(one, "standing", 4) for one in array(value, "standings", STANDINGS)]
    standings = tuple([_standing(*one, author=author) for one in rows])
    if len({one[0] for one in rows}) != len(rows):
        raise WireError("field", "an advert has two standings with one plan")
    return standings


def _standing(data: object, readiness: object, detail: object, spans: object, *, author: PeerId) -> Standing:
    plan = read_plan(blob(data, "plan", PLAN_BYTES))
    own = {
        (one.span.first, one.span.last): one.span
        for one in chain(plan.assignments, plan.standbys)
        if one.peer == author
    }
    if not own:
        raise WireError("field", "an advert's author stands by a plan that does not name it")
    loaded = list(_SPAN.iter_unpack(records(spans, "spans", len(own), _SPAN.size)))
    if not ascending(loaded) or not own.keys() >= set(loaded):
        raise WireError("field", "loaded spans are not in order, or not what the plan gives to the author")
    return Standing(
        plan,
        word(Readiness, readiness, "readiness"),
        text(detail, "detail", DETAIL_CHARS),
        tuple([own[span] for span in loaded]),
    )
