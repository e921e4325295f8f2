"""For how long something has been so: calm before plans are made, patience before they are improved, doubt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from meshinfer import limits
from meshinfer.mesh.picture import Picture, Status
from meshinfer.values import PeerId, Plan, PlanId


class Calm:
    """Whether something has been the same for long enough, or has gone on changing for too long to wait."""

    def __init__(self, now: float) -> None:
        self._changed_at = now
        self._restless_since = now
        self._content: Hashable = None

    def note(self, content: Hashable, now: float) -> None:
        if content == self._content:
            return
        if self._changed_at + limits.SETTLE_S <= now:
            self._restless_since = now
        self._changed_at = now
        self._content = content

    def acted(self, now: float) -> None:
        """Something was done about it; if in the midst of changes, the next wait begins anew."""
        if self._changed_at + limits.SETTLE_S > now:
            self._restless_since = now

    def settles_at(self, settle_s: float) -> float:
        return min(self._changed_at + settle_s, self._restless_since + limits.SETTLE_MOST_S)


class Lasting:
    """Plans for which something better has been possible without a break, since when, and for how long it must be."""

    def __init__(self) -> None:
        self._since: dict[PlanId, tuple[float, float]] = {}
        self.taken: frozenset[PlanId] = frozenset()
        """Those that were ripe when they were last noted."""

    def note(self, lasts_s: Mapping[PlanId, float], now: float) -> None:
        """What could be better now."""
        self.taken = self.ripe(now)
        since = {one: at for one, (at, lasts) in self._since.items() if lasts_s.get(one) == lasts}
        self._since = {one: (since.get(one, now), lasts) for one, lasts in lasts_s.items()}

    def ripe(self, now: float) -> frozenset[PlanId]:
        return frozenset(one for one, (since, lasts) in self._since.items() if since + lasts <= now)

    def next_ripe(self, now: float) -> float | None:
        """When the next one is ripe."""
        times = [since + lasts for since, lasts in self._since.values() if since + lasts > now]
        return min(times, default=None)


@dataclass(frozen=True, slots=True)
class _Doubt:
    times: int
    until: float


class Doubts:
    """Peers that were waited for in vain; each time a doubt lasts twice as long. Nobody doubts itself."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._of: dict[PeerId, _Doubt] = {}
        self.peers: tuple[PeerId, ...] = ()
        """Those that are doubted now, in order of peer id."""

    def begin(self, peers: Iterable[PeerId], now: float) -> None:
        for peer in peers:
            if peer not in self.peers and peer != self._me:
                times = self._of[peer].times + 1 if peer in self._of else 1
                lasts_s = min(limits.DOUBT_S * 2 ** min(times - 1, 16), limits.DOUBT_MOST_S)
                self._of[peer] = _Doubt(times, now + lasts_s)
        self.end(now)

    def end(self, now: float) -> None:
        """Let go of doubts that have lasted long enough; how often it was is remembered."""
        lasting = sorted(peer for peer, doubt in self._of.items() if doubt.until > now)
        self.peers = tuple(lasting[: limits.DOUBTS])

    def forgive(self, peers: Iterable[PeerId]) -> None:
        """These have accepted a plan with this agent."""
        for peer in peers:
            if peer in self._of and peer not in self.peers:
                del self._of[peer]

    def next_end(self) -> float | None:
        return min((self._of[peer].until for peer in self.peers), default=None)


class Patience:
    """For how long plans that this agent accepted have waited for others to do the same."""

    def __init__(self) -> None:
        self._open_since: dict[PlanId, float] = {}

    def drop(self, identity: PlanId) -> None:
        self._open_since.pop(identity, None)

    def pass_time(
        self, promised: Mapping[PlanId, Plan], picture: Picture, doubts: Doubts, now: float
    ) -> float | None:
        """Whoever has not accepted for so long is doubted. Returns when that, or the end of a doubt, is due next."""
        due: list[float] = []
        for identity, plan in promised.items():
            status = picture.status(identity)
            if status is Status.HELD:
                doubts.forgive(plan.named)
            if status is not Status.OPEN:
                self.drop(identity)
                continue
            until = self._open_since.setdefault(identity, now) + limits.ACCEPT_S
            if until > now:
                due.append(until)
            else:
                doubts.begin([peer for peer in plan.owners if picture.standing(identity, peer) is None], now)
        doubts.end(now)
        next_end = doubts.next_end()
        return min(due if next_end is None else [*due, next_end], default=None)
