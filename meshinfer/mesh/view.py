"""Who is here: the newest advert of each peer that was heard of lately, as this one agent sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshinfer import limits
from meshinfer.values import Advert, PeerId, Standing


@dataclass(frozen=True, slots=True)
class _Seen:
    advert: Advert
    heard_at: float


@dataclass(frozen=True, slots=True)
class _Farewell:
    incarnation: int
    until: float


class View:
    """The adverts that this agent holds to be true now, its own included.

    Times are monotonic seconds, handed in. Nothing is believed for longer than `limits.SILENCE_S` without
    being heard again, so that no ghost outlives that. The view is as large as the roster that adverts are
    verified against.
    """

    def __init__(self, own: Advert) -> None:
        self.me: PeerId = own.peer
        self.own = own
        self._seen: dict[PeerId, _Seen] = {}
        self._farewells: dict[PeerId, _Farewell] = {}
        # Heartbeats only move the true time of the next expiry later, so this one is kept until it has come:
        # else each heartbeat of a thousand peers would look at all the others.
        self._quiet_until: float | None = None

    def heard(self, advert: Advert, now: float) -> bool:
        """Take a verified advert; the newest (incarnation, version) wins. True when the view has changed.

        An equal one only proves that the peer is alive. An older one proves nothing: it may have been on its
        way since before the peer died. What another tells about this agent itself is ignored.
        """
        if advert.peer == self.me or self._said_farewell(advert, now):
            return False
        seen = self._seen.get(advert.peer)
        if seen is None or _age(seen.advert) < _age(advert):
            self._seen[advert.peer] = _Seen(advert, now)
            if self._quiet_until is None:
                self._quiet_until = now + limits.SILENCE_S
            return True
        if _age(seen.advert) == _age(advert):
            self._seen[advert.peer] = _Seen(seen.advert, now)
        return False

    def left(self, peer: PeerId, now: float) -> bool:
        """The peer said goodbye. True when it was in the view.

        Adverts of that incarnation which were still on their way are ignored for `limits.SILENCE_S`, and no
        longer: a peer is never blocked for having been away.
        """
        seen = self._seen.pop(peer, None)
        if seen is None:
            return False
        self._farewells[peer] = _Farewell(seen.advert.incarnation, now + limits.SILENCE_S)
        return True

    def expire(self, now: float) -> tuple[PeerId, ...]:
        """Drop and return the peers that were silent for `limits.SILENCE_S`."""
        if self._quiet_until is None or now < self._quiet_until:
            return ()
        silent = tuple(peer for peer, seen in self._seen.items() if seen.heard_at + limits.SILENCE_S <= now)
        for peer in silent:
            del self._seen[peer]
        self._farewells = {peer: word for peer, word in self._farewells.items() if word.until > now}
        heard = [seen.heard_at + limits.SILENCE_S for seen in self._seen.values()]
        farewells = [word.until for word in self._farewells.values()]
        self._quiet_until = min(heard + farewells, default=None)
        return silent

    def next_expiry(self) -> float | None:
        """Before this time nobody can become silent; None when nobody is here."""
        return self._quiet_until

    def peers(self, now: float) -> tuple[Advert, ...]:
        """Adverts in order of peer id: this agent's own, and those heard within `limits.SILENCE_S`."""
        alive = [seen.advert for seen in self._seen.values() if seen.heard_at + limits.SILENCE_S > now]
        return tuple(sorted([self.own, *alive], key=lambda advert: advert.peer))

    def get(self, peer: PeerId) -> Advert | None:
        """The newest advert of a peer in the view."""
        if peer == self.me:
            return self.own
        seen = self._seen.get(peer)
        return None if seen is None else seen.advert

    def heard_s(self, peer: PeerId, now: float) -> float | None:
        """Seconds since a peer was last heard; 0 for this agent, None for one that is not in the view."""
        if peer == self.me:
            return 0.0
        seen = self._seen.get(peer)
        return None if seen is None else now - seen.heard_at

    def set_own(self, own: Advert) -> None:
        """Replace this agent's own advert; its standing is what `set_standing` last said."""
        self.own = replace(own, standing=self.own.standing)

    def set_standing(self, standing: Standing | None) -> None:
        self.own = replace(self.own, standing=standing)

    def _said_farewell(self, advert: Advert, now: float) -> bool:
        word = self._farewells.get(advert.peer)
        return word is not None and word.until > now and advert.incarnation <= word.incarnation


def _age(advert: Advert) -> tuple[int, int]:
    return advert.incarnation, advert.version
