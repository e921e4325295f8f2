"""Who is in the mesh now: watching few, hearing of all, and accusing nobody without a witness.

The machine is pure: an event and the time go in, effects come out. The caller composes the own advert (from `links`,
`broken`, `leaving` and `incarnation`, among others), numbers it, and hands it to `publish`.
"""

from __future__ import annotations

from meshinfer import limits
from meshinfer.mesh.events import (
    AdvertsHeard,
    BandwidthMeasured,
    Effect,
    Event,
    HeartbeatHeard,
    Leave,
    LinkDown,
    LinkUp,
    SendAdverts,
    SendHeartbeat,
    SendSummary,
    SummaryHeard,
    Watch,
)
from meshinfer.mesh.gossip import Chance, Gossip
from meshinfer.mesh.hearing import Beats, Hearing, Troubles
from meshinfer.mesh.rings import FEW, Circle
from meshinfer.mesh.view import View, newer
from meshinfer.values import Advert, LinkFacts, Mark, PeerId
from meshinfer.wire.messages import Heartbeat


class Membership:
    """One agent's part in knowing who is here. Times are monotonic seconds.

    `incarnation` is what the own advert and heartbeats must carry: the one given, unless
    a former life of this agent, under a clock that was ahead, is known to have had a later one.
    """

    def __init__(self, own: Advert, random: Chance, now: float) -> None:
        self.me: PeerId = own.peer
        self.incarnation = own.incarnation
        self.leaving = False
        self.links: tuple[LinkFacts, ...] = ()
        self._hearings: dict[PeerId, Hearing] = {}
        self.view = View(own, self._hearings)
        self._circle = Circle(self.view)
        self._gossip = Gossip(self.view, random)
        self._troubles = Troubles()
        self._beats = Beats()
        self._up: set[PeerId] = set()
        self._wanted: dict[PeerId, float] = {}
        self._now = now
        self._beat_at = now + limits.HEARTBEAT_S * random.random()
        self._grace_at: float | None = None
        self._outlived_at: float | None = None
        self._links_change = False
        self._links_urgent = False
        self._links_untold = False
        self._links_told_at = now
        self._turn_at = now + limits.ROUND_TRIP_WINDOW_S * random.random() / 2

    @property
    def broken(self) -> tuple[PeerId, ...]:
        """Peers whose link to this agent failed lately, in order of peer id."""
        return self._troubles.broken

    @property
    def watched(self) -> frozenset[PeerId]:
        return frozenset(self._hearings)

    def take_changes(self) -> frozenset[PeerId]:
        """The peers whose advert or presence has changed since this was last asked."""
        return self.view.take_changes()

    def next_deadline(self) -> float:
        """When `handle(Tick(), now)` is due; after `handle` it lies ahead, after `want` it may be at once."""
        if self._circle.changed:
            return self._now
        due = self._beat_at
        if self._grace_at is not None and self._grace_at < due:
            due = self._grace_at
        flush_at = self._gossip.flush_at
        return flush_at if flush_at is not None and flush_at < due else due

    def want(self, peers: frozenset[PeerId]) -> None:
        """Watch the peers that own plans name. The effects come with the next event, which is due at once."""
        peers -= {self.me}
        self._wanted = {peer: self._wanted.get(peer, self._now) for peer in sorted(peers)}
        self._circle.want(peers)

    def publish(self, own: Advert, now: float) -> list[Effect]:
        """This agent's new advert, to all watched peers; they pass it on."""
        self.view.publish(own)
        targets = self._targets()
        return [SendAdverts(tuple(targets), (own,))] if targets else []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._compensate(now)
        self._now = now
        effects = self._react(event, now)
        if now >= self.next_deadline() or self._circle.changed:
            self._pass_time(now, effects)
        if self._links_change:
            self._relist(now, effects)
        return effects

    def takes_in_passing(self, peer: PeerId, beat: Heartbeat, now: float) -> bool:
        """Take a heartbeat that tells nothing but that its sender goes on as before, as nearly all of them do. False
        where it may tell more, or something is due: then it must be handled."""
        hearing, advert = self._hearings.get(peer), self.view.get(peer)
        if hearing is None or advert is None or not (hearing.heard and hearing.up) or advert.leaving:
            return False
        if beat.incarnation != advert.incarnation or beat.digest != self.view.digest:
            return False
        if self._links_change or now >= self.next_deadline():
            return False
        self._now = now
        hearing.takes(beat, self._beats, now)
        self._gossip.agrees(peer)
        return True

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────
    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case HeartbeatHeard(peer, heartbeat):
                return self._heartbeat(peer, heartbeat, now)
            case AdvertsHeard(peer, adverts):
                self._circle.spoken_to(peer, now)
                for advert in self._gossip.unknown(adverts, peer):
                    self._advert(advert, peer, now)
            case SummaryHeard(peer, summary):
                self._circle.spoken_to(peer, now)
                for mark in summary.marks:
                    if mark.peer == self.me:
                        self._former_self(mark, now)
                return self._gossip.answer(peer, summary) if peer in self._up else []
            case LinkUp(peer):
                return self._link_up(peer, now)
            case LinkDown(peer):
                self._link_down(peer, now)
            case BandwidthMeasured(peer, kbit_s) if peer in self._hearings:
                self._links_untold |= self._hearings[peer].bandwidth(kbit_s)
            case Leave():
                self.leaving = True
            case _:
                pass
        return []

    def _link_up(self, peer: PeerId, now: float) -> list[Effect]:
        """The own advert goes there at once, and word of all that is known if the peer is not of this part of the
        mesh. It does the same when its own link stands; if it has spoken before, that word may be lost: it is asked."""
        if peer == self.me:
            return []
        self._up.add(peer)
        self._circle.link(peer, True, now)
        effects: list[Effect] = [SendAdverts((peer,), (self.view.own,))]
        if not self.view.is_present(peer):
            effects.append(SendSummary(peer, self._gossip.whole(reply=self._circle.speaks(peer))))
        self._gossip.drop(peer)
        hearing = self._hearings.get(peer)
        if hearing is not None:
            hearing.link_up(now)
            self._links_change = True
            effects.append(self._beat(hearing, now))
        return effects

    def _link_down(self, peer: PeerId, now: float) -> None:
        self._up.discard(peer)
        self._circle.link(peer, False, now)
        hearing = self._hearings.get(peer)
        if hearing is not None:
            hearing.link_down(now)
            self._set_grace()

    def _heartbeat(self, peer: PeerId, beat: Heartbeat, now: float) -> list[Effect]:
        advert = self.view.known.get(peer)
        if peer == self.me or (advert is not None and self._is_over(advert, beat.incarnation)):
            return []
        if advert is not None and advert.incarnation < beat.incarnation:
            self.view.outdate(peer, now)
            self._circle.returned(peer)
        self._circle.spoken_to(peer, now)
        effects: list[Effect] = []
        if self._circle.changed:
            self._rewatch(now, effects)
        hearing = self._hearings.get(peer)
        if hearing is None:
            return effects
        was_heard = hearing.heard
        if hearing.takes(beat, self._beats, now) and hearing.heard and not was_heard:
            self._links_change = True
            self._troubles.heard_again(peer, now)
        return effects + (self._gossip.compare(peer, beat.digest) if hearing.up else [])

    @staticmethod
    def _is_over(advert: Advert, incarnation: int) -> bool:
        """Whether a life of a peer is known to have ended."""
        return advert.incarnation > incarnation or (advert.leaving and advert.incarnation == incarnation)

    def _advert(self, advert: Advert, source: PeerId, now: float) -> None:
        if advert.peer == self.me:
            self._former_self(advert, now)
            return
        if not self.view.take(advert, now):
            return
        self._gossip.spread(advert, source, now)
        self._place_moved()
        hearing = self._hearings.get(advert.peer)
        if hearing is not None and hearing.heard and self._is_over(advert, hearing.incarnation):
            hearing.heard = False
            self._troubles.clear(advert.peer)
            self._links_change = True

    def _former_self(self, told: Advert | Mark, now: float) -> None:
        """Word of this agent itself that it has not sent in this life. It changes nothing here; but where it counts
        as newer, nobody would believe what this life says, so this life takes a number above it."""
        if not newer(told, self.view.own) or told.incarnation < self.incarnation:
            return
        if self._outlived_at is not None and now < self._outlived_at + limits.INCARNATION_AGAIN_S:
            return
        self.incarnation = told.incarnation + 1
        self._outlived_at = now

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────
    def _compensate(self, now: float) -> None:
        """If this agent was not run when it was due, whatever came in that time waits unread, or was never sent by
        peers that gave it up: it counts against nobody."""
        late = now - self.next_deadline()
        if late <= limits.HEARTBEAT_S:
            return
        for hearing in self._hearings.values():
            hearing.forgive(late)
        self._troubles.forgive(late)
        self._wanted = {peer: since + late for peer, since in self._wanted.items()}
        self._circle.forgive(late)
        self._set_grace()

    def _pass_time(self, now: float, effects: list[Effect]) -> None:
        if self._grace_at is not None and now >= self._grace_at:
            self._listen(now)
        if now >= self._beat_at:
            self._on_beat(now, effects)
        if self._circle.changed:
            self._rewatch(now, effects)
        if self._links_change:
            self._relist(now, effects)
        flush_at = self._gossip.flush_at
        if flush_at is not None and now >= flush_at:
            effects += self._gossip.flush(self._targets())

    def _on_beat(self, now: float, effects: list[Effect]) -> None:
        ahead = self._beat_at + limits.HEARTBEAT_S
        self._beat_at = ahead if ahead > now else now + limits.HEARTBEAT_S
        self._listen(now)
        self._troubles.pass_time(now)
        self._tell_later(now)
        self._check_wanted(now)
        self.view.forget(now)
        self._place_moved()
        if self._circle.unsettled or self._circle.changed:
            self._rewatch(now, effects)
        if not self.leaving:
            effects += [self._beat(hearing, now) for hearing in self._hearings.values() if hearing.up]

    def _beat(self, hearing: Hearing, now: float) -> SendHeartbeat:
        count, age_us = hearing.echo(now)
        beat = Heartbeat(self.incarnation, self._beats.next(now), count, age_us, self.view.digest)
        return SendHeartbeat(hearing.peer, beat)

    def _listen(self, now: float) -> None:
        """Whoever was silent for too long is not heard any more. That is the link's fault only where the peer says
        that it hears this agent, so that it should speak; and only if others go on hearing it."""
        for hearing in self._hearings.values():
            if hearing.heard and hearing.until() <= now:
                hearing.heard = False
                self._links_change = self._links_urgent = True
                if self.view.listens(hearing.peer, self.me):
                    self._troubles.suspect(hearing.peer, now)
        self._set_grace()

    def _check_wanted(self, now: float) -> None:
        """A plan's link that never comes up is as bad as one that broke: the own connection does not stand, or the peer
        counts on this agent too and is not heard."""
        for peer, since in self._wanted.items():
            hearing, advert = self._hearings.get(peer), self.view.get(peer)
            if hearing is None or advert is None or hearing.heard or peer in self._troubles:
                self._wanted[peer] = now
            elif since + limits.BROKEN_AFTER_S <= now and (not hearing.up or self._names_me(advert)):
                self._troubles.mark(peer, now)

    def _names_me(self, advert: Advert) -> bool:
        return any(self.me in standing.plan.named for standing in advert.standings)

    def _set_grace(self) -> None:
        waiting = [one.until() for one in self._hearings.values() if one.heard and not one.up]
        self._grace_at = min(waiting, default=None)

    # ── whom to watch ───────────────────────────────────────────────────────────────────────────────────────
    def _place_moved(self) -> None:
        for peer in self.view.take_moves():
            if peer not in self.view.known:
                self._troubles.forget(peer, self._now)
            elif not self.view.is_present(peer):
                self._troubles.clear(peer)
            self._circle.place(peer, self._now)

    def _rewatch(self, now: float, effects: list[Effect]) -> None:
        before = self._hearings.keys() | ()
        wished = self._circle.watched({peer for peer, one in self._hearings.items() if one.heard}, now)
        for peer in sorted(wished - before):
            self._hearings[peer] = hearing = Hearing(peer, peer in self._up, now)
            if hearing.up and not self.leaving:
                effects.append(self._beat(hearing, now))
        for peer in sorted(before - wished):
            del self._hearings[peer]
            self._gossip.drop(peer)
            self._troubles.clear(peer)
            self._links_change = True
        if before != self._hearings.keys():
            self._set_grace()
            effects.append(Watch(self.watched))

    def _targets(self) -> list[PeerId]:
        """Who is told of news: all watched peers, but those that only linger where enough others are heard."""
        up = [peer for peer, hearing in self._hearings.items() if hearing.up]
        needed = [peer for peer in up if peer not in self._circle.lingering]
        heard = sum([self._hearings[peer].heard for peer in needed])
        return needed if 2 * heard >= self._circle.neighbours_wanted else up

    # ── what the own advert says of links ───────────────────────────────────────────────────────────────────
    def _relist(self, now: float, effects: list[Effect]) -> None:
        """Presence follows whom this agent hears, told or not."""
        self._links_change = False
        heard = [peer for peer, hearing in self._hearings.items() if hearing.heard][: limits.LINKS]
        if self._matters(heard):
            self._tell_links(now)
        else:
            self._links_untold = True
        self.view.hear(frozenset(heard), now)
        self._place_moved()
        if self._circle.changed:
            self._rewatch(now, effects)

    def _matters(self, heard: list[PeerId]) -> bool:
        """Whether a change is worth an advert at once: somebody fell silent, may come to be present, or this agent
        itself hangs by few edges."""
        view = self.view
        if self._links_urgent or len(view) <= FEW or len(view.joined(self.me)) < limits.EDGES_AT_ONCE:
            return True
        told = {link.peer for link in self.links}
        return any(peer not in told and not view.is_present(peer) for peer in heard)

    def _tell_links(self, now: float) -> None:
        self._links_urgent = self._links_untold = False
        self._links_told_at = now
        heard = sorted([peer for peer, hearing in self._hearings.items() if hearing.heard][: limits.LINKS])
        links = tuple([self._hearings[peer].facts() for peer in heard])
        if links != self.links:
            self.links = links

    def _tell_later(self, now: float) -> None:
        turn = now >= self._turn_at
        if turn:
            self._turn_at = now + limits.ROUND_TRIP_WINDOW_S / 2
        if [one for one in self._hearings.values() if one.heard and one.review(turn, now)]:
            self._links_untold = True
        if self._links_untold and self._links_told_at + limits.LINKS_LATER_S <= now:
            self._tell_links(now)
