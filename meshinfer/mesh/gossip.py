"""How news of peers spreads: what is new is passed on once, and what was lost on the way is found by comparing."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, Protocol

from meshinfer import limits
from meshinfer.mesh.events import Effect, SendAdverts, SendSummary
from meshinfer.mesh.view import View, newer
from meshinfer.values import Advert, Mark, PeerId
from meshinfer.wire.messages import Summary

_LOWEST: Final = PeerId("0" * 32)
_HIGHEST: Final = PeerId("f" * 32)
"""A summary speaks of the ids from its first mark to its last. One with numbers 0 says that nothing is known there."""

_PEER: Final = attrgetter("peer")


class Chance(Protocol):
    """A `random.Random`."""

    def random(self) -> float: ...


class _Difference:
    __slots__ = ("beats", "wait")

    def __init__(self) -> None:
        self.beats = 0
        self.wait = limits.SUMMARY_AFTER_BEATS


class Gossip:
    """What is to be told to whom. `flush_at` is when the news that waits goes out, None while there is none."""

    def __init__(self, view: View, random: Chance) -> None:
        self._view = view
        self._random = random
        # Authors of news, and who needs not be told: whom it came from, and who sent the same meanwhile.
        self._news: dict[PeerId, set[PeerId]] = {}
        self._differences: dict[PeerId, _Difference] = {}
        self._asked_up_to: dict[PeerId, PeerId] = {}
        self.flush_at: float | None = None

    # ── news ────────────────────────────────────────────────────────────────────────────────────────────────
    def spread(self, advert: Advert, source: PeerId, now: float) -> None:
        """Pass on what has just been learnt from a peer. Each agent waits for another time: so over a link the news
        goes one way only, from whoever is the first to pass it on."""
        self._news[advert.peer] = {source, advert.peer}
        if self.flush_at is None:
            self.flush_at = now + limits.GOSSIP_S * self._random.random()

    def unknown(self, adverts: Iterable[Advert], source: PeerId) -> list[Advert]:
        """Those that are news here. Most are not: who has sent what was known already needs not be told of it."""
        known, news, fresh = self._view.known, self._news, list[Advert]()
        for advert in adverts:
            author = advert.peer
            here = known.get(author)
            if here is None or (here is not advert and newer(advert, here)):
                fresh.append(advert)
            elif author in news and (here is advert or not newer(here, advert)):
                news[author].add(source)
        return fresh

    def flush(self, targets: list[PeerId]) -> list[Effect]:
        """All that waits, to each of these peers what it is not known to have."""
        news, self._news, self.flush_at = self._news, {}, None
        known = self._view.known
        alike: dict[tuple[PeerId, ...], list[PeerId]] = {}
        for target in targets:
            authors = tuple(
                [author for author, told in news.items() if target not in told and author in known]
            )
            if authors:
                alike.setdefault(authors, []).append(target)
        effects: list[Effect] = []
        for authors, peers in alike.items():
            effects += _parcels(tuple(peers), [known[author] for author in authors])
        return effects

    # ── comparing ───────────────────────────────────────────────────────────────────────────────────────────
    def compare(self, peer: PeerId, digest: bytes) -> list[Effect]:
        """A neighbour's heartbeat says what it knows: where that differs for long, it is asked."""
        if digest == self._view.digest:
            self.agrees(peer)
            return []
        difference = self._differences.setdefault(peer, _Difference())
        difference.beats += 1
        if difference.beats < difference.wait:
            return []
        difference.beats = 0
        difference.wait = min(2 * difference.wait, limits.SUMMARY_MOST_BEATS)
        return [SendSummary(peer, self._part(peer))]

    def agrees(self, peer: PeerId) -> None:
        self._differences.pop(peer, None)

    def whole(self, reply: bool) -> Summary:
        """All that this agent knows, for a peer that has just been met."""
        return self._summary(_LOWEST, _HIGHEST, reply)

    def answer(self, peer: PeerId, summary: Summary) -> list[Effect]:
        """Adverts that the sender of a summary lacks: newer ones, and those of the present that it does not know. What
        is known of the absent is not offered, else two peers would remind each other of the dead for ever."""
        low, high = (summary.marks[0].peer, summary.marks[-1].peer) if summary.marks else (_LOWEST, _HIGHEST)
        theirs = {one.peer: one for one in summary.marks}
        marks, known = self._view.marks, self._view.known
        lacking = [
            author
            for author, one in marks.items()
            if (their := theirs.get(author)) is not one and low <= author <= high and self._lacks(their, one)
        ]
        effects = _parcels((peer,), [known[author] for author in sorted(lacking)])
        if summary.reply:
            effects.append(SendSummary(peer, self._summary(low, high, False)))
        return effects

    def drop(self, peer: PeerId) -> None:
        self._differences.pop(peer, None)
        self._asked_up_to.pop(peer, None)

    def _lacks(self, theirs: Mark | None, ours: Mark) -> bool:
        return self._view.is_present(ours.peer) if theirs is None else newer(ours, theirs)

    def _summary(self, low: PeerId, high: PeerId, reply: bool) -> Summary:
        known = self._view.marks
        everyone = low == _LOWEST and high == _HIGHEST
        marks = [one for author, one in known.items() if everyone or low <= author <= high]
        ends = [Mark(end, 0, 0) for end in sorted({low, high}) if end not in known]
        ordered = sorted([*marks, *ends], key=_PEER)
        return Summary(tuple(ordered[: limits.SUMMARY_MARKS]), reply)

    def _part(self, peer: PeerId) -> Summary:
        """The next part of the ids, a different one for each neighbour to begin with. Parts overlap by one mark, so
        that no gap between two known ids is left out."""
        begin = self._asked_up_to.get(peer, peer)
        known = sorted(self._view.known)
        rest = [author for author in known if author >= begin]
        if len(known) <= limits.SUMMARY_PART_MARKS:
            return self.whole(True)
        low = begin if begin in self._view.known else _LOWEST
        high = rest[limits.SUMMARY_PART_MARKS - 1] if len(rest) > limits.SUMMARY_PART_MARKS else _HIGHEST
        self._asked_up_to[peer] = high if high != _HIGHEST else _LOWEST
        return self._summary(low, high, True)


def _parcels(peers: tuple[PeerId, ...], adverts: list[Advert]) -> list[Effect]:
    size = limits.ADVERTS_AT_ONCE
    return [SendAdverts(peers, tuple(adverts[at : at + size])) for at in range(0, len(adverts), size)]
