"""Who is here, as this one agent sees it: the newest advert of each peer, and who of them hears whom.

Two peers are joined by an edge when each lists the other among those that it hears. Who can be reached from this
agent over such edges is present, and nobody else. So a peer is gone when nobody present hears it any more; one bad
link changes nothing; two that died together do not vouch for each other; each part of a split mesh has one view, its
own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Protocol

from meshinfer import limits
from meshinfer.values import Advert, Mark, PeerId

_NOBODY: frozenset[PeerId] = frozenset()
_NOTHING: Mapping[PeerId, Advert] = MappingProxyType({})


class Heard(Protocol):
    """What the view asks of a watched peer's hearing."""

    heard_at: float


def newer(advert: Advert | Mark, than: Advert | Mark) -> bool:
    return (advert.incarnation, advert.version) > (than.incarnation, than.version)


class View:
    """The adverts that this agent knows, and the connected part of the mesh that it is in. Times are monotonic seconds.

    The work of one change is that of the change: an edge that comes joins two parts or does nothing, an edge that
    goes is looked at from both its ends until they meet or one side has no more peers.
    """

    def __init__(self, own: Advert, hearings: Mapping[PeerId, Heard]) -> None:
        self.me: PeerId = own.peer
        self._hearings = hearings
        self._known: dict[PeerId, Advert] = {self.me: own}
        self._claims: dict[PeerId, frozenset[PeerId]] = {self.me: _NOBODY}
        self._edges: dict[PeerId, set[PeerId]] = {}
        self._here: set[PeerId] = {self.me}
        self._order: list[PeerId] = [self.me]
        # In order of the time at which they were last here, or first heard of.
        self._absent: dict[PeerId, float] = {}
        number, first = _numbered(self.me, own.incarnation, own.version)
        self._marks: dict[PeerId, Mark] = {self.me: first}
        self._hashes: dict[PeerId, int] = {self.me: number}
        self._sum = self._hashes[self.me]
        self._digest: bytes | None = None
        self._present: tuple[Advert, ...] | None = None
        self._changed: set[PeerId] = set()
        self._moved: set[PeerId] = set()
        self._gone: dict[PeerId, Advert] = {}

    # ── what it says ────────────────────────────────────────────────────────────────────────────────────────
    @property
    def own(self) -> Advert:
        return self._known[self.me]

    @property
    def present(self) -> tuple[Advert, ...]:
        """Adverts of all who are here, this agent among them, in order of peer id; the same object while nothing
        changes."""
        if self._present is None:
            known = self._known
            self._present = tuple([known[peer] for peer in self._order])
        return self._present

    @property
    def known(self) -> Mapping[PeerId, Advert]:
        """The newest adverts known, of the absent too: to find them again, and to know old news when it comes."""
        return self._known

    @property
    def marks(self) -> Mapping[PeerId, Mark]:
        """How new each of these is."""
        return self._marks

    @property
    def digest(self) -> bytes:
        """8 bytes, equal for equal adverts of the same present peers, in whatever order they came."""
        if self._digest is None:
            self._digest = self._sum.to_bytes(8, "big")
        return self._digest

    def __len__(self) -> int:
        """How many are present."""
        return len(self._here)

    def is_present(self, peer: PeerId) -> bool:
        return peer in self._here

    def get(self, peer: PeerId) -> Advert | None:
        """The newest advert of a peer that is present."""
        return self._known[peer] if peer in self._here else None

    def joined(self, peer: PeerId) -> frozenset[PeerId]:
        """The peers that a peer shares an edge with."""
        return frozenset(self._edges.get(peer, _NOBODY))

    def listens(self, peer: PeerId, to: PeerId) -> bool:
        """Whether a peer's newest advert says that it hears another."""
        return to in self._claims.get(peer, _NOBODY)

    def heard_s(self, peer: PeerId, now: float) -> float | None:
        """Seconds since a peer was last heard by this agent itself; 0 for itself, None for one that it does not
        watch or never heard."""
        if peer == self.me:
            return 0.0
        hearing = self._hearings.get(peer)
        return None if hearing is None or hearing.heard_at < 0 else max(0.0, now - hearing.heard_at)

    def take_changes(self) -> frozenset[PeerId]:
        """The peers whose advert or presence has changed since this was last asked."""
        changed, self._changed = frozenset(self._changed), set()
        return changed

    def take_moves(self) -> list[PeerId]:
        """Those who came, went, or were forgotten since this was last asked, in order of peer id."""
        if not self._moved:
            return []
        moved, self._moved = sorted(self._moved), set()
        return moved

    def take_gone(self) -> Mapping[PeerId, Advert]:
        """Those who were present and have ceased to be since this was last asked, each with its last advert then."""
        if not self._gone:
            return _NOTHING
        gone, self._gone = self._gone, {}
        return gone

    def holds_without(self, peer: PeerId, others: Collection[PeerId] = ()) -> bool:
        """Whether `peer` would be present without the edge between it and this agent, and those to `others`."""
        edges = self._edges.get(self.me, _NOBODY)
        if peer not in edges:
            return True
        cut = [one for one in {peer, *others} if one in edges]
        for one in cut:
            self._cut(self.me, one)
        severed = self._severed(self.me, peer)
        for one in cut:
            self._tie(self.me, one)
        return severed is None

    # ── what changes it ─────────────────────────────────────────────────────────────────────────────────────
    def take(self, advert: Advert, now: float) -> bool:
        """Take another's verified advert. True where it is newer than what was known of that peer."""
        peer = advert.peer
        known = self._known.get(peer)
        if known is advert or peer == self.me or (known is not None and not newer(advert, known)):
            return False
        if known is None:
            if len(self._known) >= limits.ROSTER_MEMBERS and not self._forget_one():
                return False
            self._absent[peer] = now
            self._moved.add(peer)
        elif known.leaving != advert.leaving:
            self._moved.add(peer)
        if known is None:
            self._write(advert)
        self._claim(peer, _NOBODY if advert.leaving else _heard(advert), now)
        if known is not None:
            self._write(advert)
        return True

    def publish(self, own: Advert) -> None:
        """This agent's own advert, as all may know it from now on."""
        self._write(own)

    def hear(self, peers: frozenset[PeerId], now: float) -> None:
        """Whom this agent hears itself, published or not."""
        self._claim(self.me, peers, now)

    def outdate(self, peer: PeerId, now: float) -> None:
        """A peer has begun a new life: what its former self heard counts no more."""
        self._claim(peer, _NOBODY, now)

    def forget(self, now: float) -> None:
        """Let go of adverts of those who have been absent for `limits.ABSENT_S`."""
        while self._absent and next(iter(self._absent.values())) + limits.ABSENT_S <= now:
            self._forget_one()

    # ── adverts ─────────────────────────────────────────────────────────────────────────────────────────────
    def _write(self, advert: Advert) -> None:
        peer = advert.peer
        number, self._marks[peer] = _numbered(peer, advert.incarnation, advert.version)
        self._known[peer] = advert
        if peer in self._here:
            self._sum ^= self._hashes[peer] ^ number
            self._present = self._digest = None
        self._hashes[peer] = number
        self._changed.add(peer)

    def _forget_one(self) -> bool:
        peer = next(iter(self._absent), None)
        if peer is None:
            return False
        self._claim(peer, _NOBODY, self._absent[peer])
        for kept in (
            self._absent,
            self._known,
            self._marks,
            self._hashes,
            self._claims,
            self._edges,
            self._gone,
        ):
            kept.pop(peer, None)
        self._moved.add(peer)
        self._changed.add(peer)
        return True

    # ── edges ───────────────────────────────────────────────────────────────────────────────────────────────
    def _claim(self, peer: PeerId, claims: frozenset[PeerId], now: float) -> None:
        before = self._claims.get(peer, _NOBODY)
        if claims == before:
            return
        self._claims[peer] = claims
        here, all_claims = self._here, self._claims
        for other in claims - before:
            if peer in all_claims.get(other, _NOBODY) and other != peer:
                self._tie(peer, other)
                if (peer in here) != (other in here):
                    self._admit(peer, other)
        # One after the other: so each cut leaves two parts at most, of which this agent is in one.
        for other in sorted(before - claims):
            if other in self._edges.get(peer, _NOBODY):
                self._cut(peer, other)
                self._part(peer, other, now)

    def _tie(self, one: PeerId, other: PeerId) -> None:
        self._edges.setdefault(one, set()).add(other)
        self._edges.setdefault(other, set()).add(one)

    def _cut(self, one: PeerId, other: PeerId) -> None:
        self._edges[one].discard(other)
        self._edges[other].discard(one)

    def _admit(self, one: PeerId, other: PeerId) -> None:
        """An edge has come, of which just one end was here: all that the other one reaches come too."""
        front = {one if other in self._here else other}
        came: set[PeerId] = set()
        while front:
            came |= front
            front = set().union(*[self._edges[peer] for peer in front]) - came - self._here
        self._here |= came  # in place: it is one set for good
        for peer in came:
            del self._absent[peer]
            insort(self._order, peer)
        self._shift(came)

    def _part(self, one: PeerId, other: PeerId, now: float) -> None:
        """An edge between two of the same part has gone: who is cut off from this agent is absent."""
        if one not in self._here:
            return
        severed = self._severed(one, other)
        if severed is None:
            return
        gone = self._here - severed if self.me in severed else severed
        self._here -= gone
        for peer in sorted(gone):
            self._absent[peer] = now
            self._gone[peer] = self._known[peer]
            del self._order[bisect_left(self._order, peer)]
        self._shift(gone)

    def _shift(self, peers: set[PeerId]) -> None:
        for peer in peers:
            self._sum ^= self._hashes[peer]
        self._moved |= peers
        self._changed |= peers
        self._present = self._digest = None

    def _severed(self, one: PeerId, other: PeerId) -> set[PeerId] | None:
        """The smaller part, where no way leads from one to the other; None where one does."""
        edges = self._edges
        seen, front = {one}, {one}
        far_seen, far_front = {other}, {other}
        while front:
            grown = set().union(*[edges[peer] for peer in front])
            if not grown.isdisjoint(far_seen):
                return None
            grown -= seen
            seen |= grown
            front = grown
            if len(far_front) < len(front):
                seen, front, far_seen, far_front = far_seen, far_front, seen, front
        return seen


class _Claims:
    """Whom the newest adverts list, each set made once: agents simulated in one process share adverts. Bounded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[PeerId, tuple[Advert, frozenset[PeerId]]] = {}

    def __call__(self, advert: Advert) -> frozenset[PeerId]:
        known = self._of.get(advert.peer)
        if known is not None and known[0] is advert:
            return known[1]
        peers = frozenset([link.peer for link in advert.links])
        if known is not None or len(self._of) < self._most:
            self._of[advert.peer] = (advert, peers)
        return peers


_heard = _Claims(limits.ROSTER_MEMBERS)


@lru_cache(maxsize=8192)
def _numbered(peer: PeerId, incarnation: int, version: int) -> tuple[int, Mark]:
    """An advert's share in the digest, and its mark. Agents simulated in one process share them."""
    text = f"{peer}:{incarnation}:{version}"
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
    return number, Mark(peer, incarnation, version)
