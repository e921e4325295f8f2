"""Whom an agent watches in a large mesh: its neighbours on a few rings, the same for all who see the same peers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Set
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from meshinfer import limits
from meshinfer.mesh.view import View
from meshinfer.values import PeerId

RINGS: Final = 4
"""Eight neighbours. A random graph of degree 8 stays whole when a third of its nodes vanish at once; and each peer has
eight observers, of whom one is enough to vouch for it."""

FEW: Final = 16
"""Among so many, everybody watches everybody: 16 heartbeats twice a second, and no single link matters."""

_Place = tuple[bytes, PeerId]


@lru_cache(maxsize=limits.ROSTER_MEMBERS)
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


class Circle:
    """Whom one agent watches: its neighbours among the present; those that own plans name; and outside its part of the
    mesh, its neighbours among those who may come, and whoever speaks to it. So both sides of an edge that is to come
    watch each other, whether they meet for the first time or again. Times are monotonic seconds.

    `changed` says that `watched` is to be asked again.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._me = view.me
        self._inside = Rings([view.me])
        self._outside = Rings()
        self._linked: set[PeerId] = set()
        self._strangers: dict[PeerId, float] = {}
        self._speakers: dict[PeerId, float] = {}
        self._wanted: frozenset[PeerId] = frozenset()
        self.lingering: dict[PeerId, float] = {}
        self.changed = False
        self._returned: set[PeerId] = set()
        """Peers whose last known word is a goodbye, but who have spoken in a later life since."""

    @property
    def unsettled(self) -> bool:
        """Whether time alone may change whom to watch."""
        return bool(self.lingering or self._speakers or self._strangers)

    @property
    def neighbours_wanted(self) -> int:
        """How many neighbours an agent of this mesh has."""
        return min(len(self._inside) - 1, 2 * RINGS)

    def want(self, peers: frozenset[PeerId]) -> None:
        if peers != self._wanted:
            self._wanted = peers
            self.changed = True

    def link(self, peer: PeerId, up: bool, now: float) -> None:
        (self._linked.add if up else self._linked.discard)(peer)
        self.place(peer, now)

    def spoken_to(self, peer: PeerId, now: float) -> bool:
        """A peer has spoken; whether that may change whom to watch."""
        if self._view.is_present(peer) or peer == self._me:
            return False
        if peer not in self._speakers:
            if len(self._speakers) >= limits.SPEAKERS:
                return False
            self.changed = True
        self._speakers[peer] = now
        return True

    def returned(self, peer: PeerId) -> None:
        """A peer has begun a new life after its goodbye; its new advert may be lost, and has to be asked for."""
        if peer not in self._returned:
            self._returned.add(peer)
            self.changed = True

    def speaks(self, peer: PeerId) -> bool:
        """Whether a peer outside has spoken lately."""
        return peer in self._speakers

    def place(self, peer: PeerId, now: float) -> None:
        """Put a peer on the rings on which it belongs: of the present, or of those who may come to be."""
        if peer == self._me:
            return
        here = self._view.is_present(peer)
        if peer in self._returned and not self._said_goodbye(peer):
            self._returned.discard(peer)
        outside = not here and self._may_come(peer, now)
        if here != (peer in self._inside) or outside != (peer in self._outside):
            (self._inside.add if here else self._inside.discard)(peer)
            (self._outside.add if outside else self._outside.discard)(peer)
            self.changed = True

    def watched(self, heard: Set[PeerId], now: float) -> set[PeerId]:
        """Whom to watch from now on, given whom this agent hears of those that it watches."""
        self.changed = False
        for peer in [peer for peer, since in self._strangers.items() if since + limits.STRANGER_S <= now]:
            self.place(peer, now)
            del self._strangers[peer]
        self._speakers = {
            peer: at
            for peer, at in self._speakers.items()
            if at + limits.SPEAKER_S > now and not self._view.is_present(peer)
        }
        wished = {*self._inside.neighbours(self._me), *self._outside.neighbours(self._me)}
        wished |= self._speakers.keys() | self._wanted
        wished = {peer for peer in wished if not self._has_left(peer)}
        self._linger(heard - wished, now)
        self.changed = False
        return wished | self.lingering.keys()

    def forgive(self, seconds: float) -> None:
        """This agent stood still for so long."""
        self._speakers = {peer: at + seconds for peer, at in self._speakers.items()}

    def _linger(self, spare: Set[PeerId], now: float) -> None:
        """Heard peers that need not be watched any more, and yet are: for a time, or while nobody else joins them to
        this agent. Those who have waited longest go first."""
        dropped: list[PeerId] = []
        until = {peer: self.lingering.get(peer, now + limits.LINGER_S) for peer in sorted(spare)}
        for peer in sorted(until, key=lambda peer: (until[peer], peer)):
            if len(until) > limits.LINGERING or until[peer] <= now:
                # Each of two edges may be spare as long as the other is there.
                if self._has_left(peer) or self._view.holds_without(peer, dropped):
                    dropped.append(peer)
                    del until[peer]
                else:
                    until[peer] = max(until[peer], now + limits.LINGER_S)
        self.lingering = until

    def _may_come(self, peer: PeerId, now: float) -> bool:
        """Whether a peer that is not present is worth a link: it was here, or there is a link, or it was heard of a
        while ago. Most of those just heard of will be present, and on the rings, before that."""
        advert = self._view.known.get(peer)
        if advert is None or self._has_left(peer) or peer in self._linked:
            return peer in self._linked and not self._has_left(peer)
        if peer in self._inside or peer in self._outside:
            return True
        return self._strangers.setdefault(peer, now) + limits.STRANGER_S <= now

    def _has_left(self, peer: PeerId) -> bool:
        return peer not in self._returned and self._said_goodbye(peer)

    def _said_goodbye(self, peer: PeerId) -> bool:
        advert = self._view.known.get(peer)
        return advert is not None and advert.leaving
