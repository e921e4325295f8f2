"""Whom an agent watches in a large mesh: its neighbours on a few rings, the same for all who see the same peers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from meshinfer.values import PeerId

RINGS: Final = 4
"""Eight neighbours. A random graph of degree 8 stays whole when a third of its nodes vanish at once; and each peer has
eight observers, of whom one is enough to vouch for it."""

FEW: Final = 16
"""Among so many, everybody watches everybody: 16 heartbeats twice a second, and no single link matters."""

_Place = tuple[bytes, PeerId]


def places(peer: PeerId) -> tuple[_Place, ...]:
    """Where a peer is on each ring. Hashed, so that its places are unrelated to one another and nobody's id decides
    who sits beside it."""
    digest = blake2b(peer.encode(), digest_size=8 * RINGS).digest()
    return tuple([(digest[8 * ring : 8 * ring + 8], peer) for ring in range(RINGS)])


class Rings:
    """A set of peers, kept in order of their places. A change costs microseconds for a thousand of them."""

    def __init__(self, peers: Iterable[PeerId] = ()) -> None:
        self._peers: dict[PeerId, tuple[_Place, ...]] = {}
        self._rings: tuple[list[_Place], ...] = tuple([[] for _ in range(RINGS)])
        for peer in peers:
            self.add(peer)

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def add(self, peer: PeerId) -> None:
        if peer in self._peers:
            return
        self._peers[peer] = places(peer)
        for ring, place in zip(self._rings, self._peers[peer], strict=True):
            insort(ring, place)

    def discard(self, peer: PeerId) -> None:
        for ring, place in zip(self._rings, self._peers.pop(peer, ()), strict=False):
            del ring[bisect_left(ring, place)]

    def neighbours(self, me: PeerId) -> frozenset[PeerId]:
        """The peers beside `me`, who need not be one of them: all of `FEW`, else the next one on either side on
        each ring. A is a neighbour of B exactly when B is one of A, where both are in the set."""
        if len(self._peers) - (me in self._peers) < FEW:
            return frozenset([peer for peer in self._peers if peer != me])
        found: set[PeerId] = set()
        for ring, place in zip(self._rings, self._peers.get(me) or places(me), strict=True):
            at = bisect_left(ring, place)
            after = at + (ring[at : at + 1] == [place])
            found.add(ring[at - 1][1])
            found.add(ring[after % len(ring)][1])
        return frozenset(found)


def neighbours(me: PeerId, peers: Iterable[PeerId]) -> frozenset[PeerId]:
    """Whom `me` watches among `peers`; see `Rings`."""
    return Rings(peers).neighbours(me)
