"""How many bytes the messages take, by the real encoding; each advert is encoded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from meshinfer.errors import WireError
from meshinfer.values import Advert, Mark, PeerId
from meshinfer.wire import codec
from meshinfer.wire.advert import decode_advert, encode_advert
from meshinfer.wire.messages import ControlMessage, Heartbeat, Summary

SIGNATURE_BYTES: Final = 64
CERTIFICATE_BYTES: Final = 400
"""That of a member with a short name (measured)."""

DECODED_EACH: Final = 8
"""One in so many versions of an advert is decoded again, and must be what was encoded."""


def _size(message: ControlMessage) -> int:
    return sum(len(frame) for frame in codec.encode(message))


def _mark(number: int) -> Mark:
    return Mark(PeerId(f"{number:032x}"), 1_700_000_000_000, 100)


HEARTBEAT_BYTES: Final = _size(Heartbeat(1_700_000_000_000, 1000, 1000, 250_000, bytes(8)))
ADVERTS_BYTES: Final = 16
_SUMMARY_BYTES: Final = _size(Summary((_mark(1),), False))
_MARK_BYTES: Final = _size(Summary((_mark(1), _mark(2)), False)) - _SUMMARY_BYTES


def summary(marks: int) -> int:
    return _SUMMARY_BYTES + _MARK_BYTES * (marks - 1)


class Sizes:
    """`differs` is called with what is wrong with an advert's encoding."""

    def __init__(self, differs: Callable[[str], None]) -> None:
        self._differs = differs
        self._known: dict[tuple[PeerId, int, int], int] = {}

    def advert(self, advert: Advert) -> int:
        key = (advert.peer, advert.incarnation, advert.version)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._encoded(advert) + SIGNATURE_BYTES + CERTIFICATE_BYTES
        return known

    def _encoded(self, advert: Advert) -> int:
        try:
            data = encode_advert(advert)
        except WireError as error:
            self._differs(f"{advert.name} publishes what no peer would accept: {error}")
            return 0
        if advert.version % DECODED_EACH == 0 and decode_advert(data) != advert:
            self._differs(f"an advert of {advert.name} is another one once decoded")
        return len(data)
