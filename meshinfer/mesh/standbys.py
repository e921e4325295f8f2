"""Who stands by for each owner's span: peers that are not its owner, as few as will do, where memory allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from meshinfer.limits import PLAN_PEERS, PLAN_STANDBYS, STANDBYS_PER_SPAN
from meshinfer.mesh.lanes import Chain, Link
from meshinfer.mesh.rooms import Room
from meshinfer.values import Plan, Span

Joined = Callable[[int, int], bool]
"""Whether a route may lead from the one room to the other."""


def stand_by(owners: Chain, rooms: Sequence[Room], joined: Joined, keep: Plan | None = None) -> Chain:
    """Standbys for the owners' spans, in order of layers; none for a span for which memory does not allow.

    A model that one peer holds whole gets them only from peers that could not do the same: those serve other people as
    replicas.
    """
    return _Standbys(owners, rooms, joined, keep).chosen()


class _Standbys:
    def __init__(self, owners: Chain, rooms: Sequence[Room], joined: Joined, keep: Plan | None) -> None:
        self._owners = owners
        self._rooms = rooms
        self._joined = joined
        self._spans: dict[int, list[Span]] = {link.lane: [link.span] for link in owners}
        self._claimed = {link.lane: rooms[link.lane].needed_bytes(link.span) for link in owners}
        self._owning = {link.lane for link in owners}
        self._able = [i for i in range(len(rooms)) if len(owners) > 1 or not self._holds_whole(i)]
        self._before = _earlier(rooms, keep)

    def _holds_whole(self, room: int) -> bool:
        return self._rooms[room].lane.fits(Span(0, self._rooms[room].lane.layers))

    def chosen(self) -> Chain:
        """Those that stood by before stay; then the other spans get theirs from what is left."""
        found: dict[int, Chain] = {}
        for choose in (self._again, self._anew):
            for place, owner in enumerate(self._owners):
                pieces = () if place in found else choose(place, owner)
                if pieces and self._countable(pieces, sum(map(len, found.values()))):
                    found[place] = pieces
                    for link in pieces:
                        self._claim(link)
        return tuple(link for _, pieces in sorted(found.items()) for link in pieces)

    def _countable(self, pieces: Chain, others: int) -> bool:
        """Whether a plan may have so many standbys, and name so many peers."""
        named = {*self._spans, *(link.lane for link in pieces)}
        return others + len(pieces) <= PLAN_STANDBYS and len(named) <= PLAN_PEERS

    def _claim(self, link: Link) -> None:
        self._spans.setdefault(link.lane, []).append(link.span)
        needed = self._rooms[link.lane].needed_bytes(link.span)
        self._claimed[link.lane] = self._claimed.get(link.lane, 0) + needed

    def _again(self, place: int, owner: Link) -> Chain:
        earlier = self._before.get(owner.span, ())
        return earlier if self._sound(place, owner, earlier) else ()

    def _anew(self, place: int, owner: Link) -> Chain:
        """One peer for all of the span, else a few that share it."""
        whole = [
            i
            for i in self._able
            if self._fits(i, owner.span) and self._sound(place, owner, (Link(i, owner.span),))
        ]
        if whole:
            return (Link(min(whole, key=lambda i: (self._rank(i, owner.span), i)), owner.span),)
        return self._shared(place, owner)

    def _fits(self, room: int, span: Span) -> bool:
        one = self._rooms[room]
        if not one.lane.fits(span):
            return False
        return one.needed_bytes(span) + self._claimed.get(room, 0) <= max(one.free_bytes, 0)

    def _sound(self, place: int, owner: Link, pieces: Chain) -> bool:
        """Whether they fit, are others than the owner, and are joined to each other and to the owner's neighbours."""
        peers = [link.lane for link in pieces]
        if owner.lane in peers or len(set(peers)) < len(peers) or len(peers) > STANDBYS_PER_SPAN:
            return False
        way = [link.lane for link in self._owners[max(0, place - 1) : place]]
        way += [*peers, *(link.lane for link in self._owners[place + 1 : place + 2])]
        steps = itertools.pairwise(way)
        return all(one == other or self._joined(one, other) for one, other in steps) and all(
            self._fits(link.lane, link.span) for link in pieces
        )

    def _rank(self, room: int, span: Span) -> tuple[bool, int, int, int]:
        """Who holds it already comes first; then who stands by anyway, so that the others stay free for plans of their
        own; then who is free; an owner last. Of these the fastest, then the one with the least memory."""
        one = self._rooms[room]
        kind = 2 if room in self._owning else 0 if room in self._spans else 1
        return span not in one.pools, kind, one.lane.price, one.free_bytes

    def _shared(self, place: int, owner: Link) -> Chain:
        """From the first layer on, the peer that goes farthest; empty where too many would be needed."""
        at, pieces = owner.span.first, list[Link]()
        while at < owner.span.last and len(pieces) < STANDBYS_PER_SPAN:
            best: tuple[tuple[object, ...], Link] | None = None
            for i in self._able:
                last = self._farthest(i, at, owner.span.last)
                if last == at:
                    continue
                link = Link(i, Span(at, last))
                if not self._sound_so_far(place, owner, (*pieces, link)):
                    continue
                way = ((-last, self._rank(i, link.span), i), link)
                best = way if best is None else min(best, way)
            if best is None:
                return ()
            pieces.append(best[1])
            at = best[1].span.last
        done = at == owner.span.last and self._sound(place, owner, tuple(pieces))
        return tuple(pieces) if done else ()

    def _sound_so_far(self, place: int, owner: Link, pieces: Chain) -> bool:
        """As `_sound`, without what comes after the last piece unless the span is done."""
        if pieces[-1].span.last == owner.span.last:
            return self._sound(place, owner, pieces)
        peers = [link.lane for link in pieces]
        if owner.lane in peers or len(set(peers)) < len(peers):
            return False
        way = [*(link.lane for link in self._owners[max(0, place - 1) : place]), *peers]
        return all(one == other or self._joined(one, other) for one, other in itertools.pairwise(way))

    def _farthest(self, room: int, at: int, end: int) -> int:
        """How far a standby can go from `at` on, beside what it holds already."""
        last = min(end, self._rooms[room].lane.reach[at])
        while last > at and not self._fits(room, Span(at, last)):
            last -= 1
        return last


def _earlier(rooms: Sequence[Room], keep: Plan | None) -> dict[Span, Chain]:
    """For each span of an earlier plan its standbys there, where all of them are still here and have it loaded."""
    if keep is None:
        return {}
    numbers = {room.candidate.peer: i for i, room in enumerate(rooms)}
    found: dict[Span, Chain] = {}
    for owner in keep.assignments:
        pieces = [one for one in keep.standbys if owner.span.first <= one.span.first < owner.span.last]
        links = [Link(numbers[one.peer], one.span) for one in pieces if one.peer in numbers]
        loaded = all(link.span in rooms[link.lane].pools for link in links)
        if pieces and len(links) == len(pieces) and loaded:
            found[owner.span] = tuple(links)
    return found
