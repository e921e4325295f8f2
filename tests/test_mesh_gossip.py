"""News reaches everybody once; what was lost is found; and comparing notes never becomes the traffic."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from membership_net import advert, peer_id

from meshinfer import limits
from meshinfer.mesh.events import Effect, SendAdverts, SendSummary
from meshinfer.mesh.gossip import Gossip
from meshinfer.mesh.view import View
from meshinfer.values import Mark, PeerId
from meshinfer.wire.messages import Summary

ME, A, B, C = (peer_id(number) for number in range(4))


def gossip_of(peers: list[PeerId], me: PeerId = ME, version: int = 1) -> tuple[View, Gossip]:
    """All of them present, joined to `me`."""
    view = View(advert(me), {})
    view.hear(frozenset(peers) - {me}, 0.0)
    for peer in peers:
        view.take(advert(peer, version=version, links=[me]), 0.0)
    return view, Gossip(view, Random(1))


def sent(effects: list[Effect]) -> dict[PeerId, set[PeerId]]:
    """Whose adverts go to whom."""
    told: dict[PeerId, set[PeerId]] = {}
    for effect in effects:
        if isinstance(effect, SendAdverts):
            for peer in effect.peers:
                told.setdefault(peer, set()).update(one.peer for one in effect.adverts)
    return told


def learn(view: View, gossip: Gossip, author: PeerId, version: int, source: PeerId, now: float) -> None:
    news = advert(author, version=version, links=[ME])
    assert view.take(news, now)
    gossip.spread(news, source, now)


# ── news ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_news_goes_to_all_but_whom_it_came_from_and_its_author() -> None:
    view, gossip = gossip_of([A, B, C])
    learn(view, gossip, A, 2, B, 1.0)
    assert gossip.flush_at is not None
    assert 1.0 <= gossip.flush_at <= 1.0 + limits.GOSSIP_S
    assert sent(gossip.flush([A, B, C])) == {C: {A}}
    assert gossip.flush_at is None
    assert gossip.flush([A, B, C]) == [], "once"


def test_who_sends_the_same_meanwhile_need_not_be_told() -> None:
    view, gossip = gossip_of([A, B, C])
    learn(view, gossip, A, 2, B, 1.0)
    assert gossip.unknown([advert(A, version=2)], C) == []
    assert gossip.flush([A, B, C]) == []


def test_who_sends_older_news_is_told_the_newer() -> None:
    view, gossip = gossip_of([A, B, C])
    learn(view, gossip, A, 3, B, 1.0)
    assert gossip.unknown([advert(A, version=2)], C) == []
    assert sent(gossip.flush([A, B, C])) == {C: {A}}


def test_two_versions_within_a_moment_are_one_message() -> None:
    view, gossip = gossip_of([A, B, C])
    learn(view, gossip, A, 2, B, 1.0)
    learn(view, gossip, A, 3, C, 1.01)
    effects = gossip.flush([A, B, C])
    assert sent(effects) == {B: {A}}, "the older version counts for nothing now"
    assert isinstance(effects[0], SendAdverts)
    assert effects[0].adverts[0].version == 3


def test_much_news_is_cut_into_parcels() -> None:
    peers = [peer_id(number) for number in range(1, 101)]
    view, gossip = gossip_of(peers)
    for peer in peers[1:]:
        learn(view, gossip, peer, 2, peer, 1.0)
    effects = gossip.flush([A])
    assert [len(effect.adverts) for effect in effects if isinstance(effect, SendAdverts)] == [32, 32, 32, 3]


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────
def test_equal_digests_ask_nothing() -> None:
    view, gossip = gossip_of([A, B])
    assert all(gossip.compare(A, view.digest) == [] for _ in range(100))


def test_a_digest_that_differs_for_one_beat_is_news_on_its_way() -> None:
    view, gossip = gossip_of([A, B])
    for _ in range(50):
        assert gossip.compare(A, b"differs!") == []
        assert gossip.compare(A, view.digest) == []


def test_lasting_difference_is_asked_after_more_and_more_rarely() -> None:
    _, gossip = gossip_of([A, B])
    asked = [beat for beat in range(1, 200) if gossip.compare(A, b"differs!")]
    assert asked[0] == limits.SUMMARY_AFTER_BEATS
    assert {later - earlier for earlier, later in pairwise(asked[5:])} == {limits.SUMMARY_MOST_BEATS}


def test_answer_holds_what_is_newer_and_what_is_missing_and_nothing_else() -> None:
    view, gossip = gossip_of([A, B, C], version=5)
    marks = sorted([Mark(ME, 1, 1), Mark(A, 1, 5), Mark(B, 1, 4)], key=lambda mark: mark.peer)
    ends = (Mark(PeerId("0" * 32), 0, 0), *marks, Mark(PeerId("f" * 32), 0, 0))
    assert sent(gossip.answer(A, Summary(ends, False))) == {A: {B, C}}
    ahead = tuple(Mark(one.peer, one.incarnation, 9) for one in view.marks.values())
    assert gossip.answer(A, Summary(tuple(sorted(ahead, key=lambda mark: mark.peer)), False)) == []


def test_an_empty_summary_is_that_of_somebody_who_knows_nothing() -> None:
    _, gossip = gossip_of([A, B])
    assert sent(gossip.answer(C, Summary((), False))) == {C: {ME, A, B}}


def test_the_dead_are_not_offered_but_old_word_of_them_is_corrected() -> None:
    view, gossip = gossip_of([A, B, C], version=5)
    view.hear(frozenset({A, B}), 1.0)
    assert not view.is_present(C)
    whole = gossip.whole(False)
    without = Summary(tuple(mark for mark in whole.marks if mark.peer != C), False)
    assert gossip.answer(A, without) == []
    older = Summary(tuple(Mark(C, 1, 4) if mark.peer == C else mark for mark in whole.marks), False)
    assert sent(gossip.answer(A, older)) == {A: {C}}


def test_a_summary_that_asks_for_a_reply_gets_one_over_the_same_ids() -> None:
    peers = [peer_id(number) for number in range(1, 300)]
    _, gossip = gossip_of(peers)
    (ask,) = (effect for _ in range(2) for effect in gossip.compare(A, b"differs!"))
    assert isinstance(ask, SendSummary)
    assert ask.summary.reply
    _, other = gossip_of(peers[::2], me=A)
    reply = other.answer(ME, ask.summary)[-1]
    assert isinstance(reply, SendSummary)
    assert not reply.summary.reply
    assert reply.summary.marks[0].peer == ask.summary.marks[0].peer
    assert reply.summary.marks[-1].peer == ask.summary.marks[-1].peer


def test_one_who_lost_its_former_life_is_told_of_it() -> None:
    view, gossip = gossip_of([A, B])
    view.take(advert(A, incarnation=7, links=[ME]), 1.0)
    young = Summary((Mark(PeerId("0" * 32), 0, 0), Mark(A, 3, 1), Mark(PeerId("f" * 32), 0, 0)), False)
    assert A in sent(gossip.answer(A, young))[A]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 30), st.integers(0, 2**32))
def test_parts_find_every_difference_between_two_large_views(
    ours: int, theirs: int, newer: int, seed: int
) -> None:
    """Whoever misses whatever: after a round through all parts both know the newest of everybody."""
    random = Random(seed)
    numbers = range(10, 410)
    mine, other = View(advert(ME), {}), View(advert(A), {})
    views = {ME: mine, A: other}
    for view, known in ((mine, ours), (other, theirs)):
        chosen = [peer_id(number) for number in random.sample(numbers, known)]
        view.hear(frozenset(chosen), 0.0)
        for peer in chosen:
            version = 2 if random.randrange(400) < newer else 1
            view.take(advert(peer, version=version, links=[ME, A]), 0.0)
    gossips = {peer: Gossip(view, random) for peer, view in views.items()}
    best: dict[PeerId, int] = {}
    for view in views.values():
        for mark in view.marks.values():
            best[mark.peer] = max(best.get(mark.peer, 0), mark.version)
    for _ in range(len(best) // limits.SUMMARY_PART_MARKS + 2):
        exchange(views, gossips, A, [SendSummary(A, gossips[ME]._part(A))])
    for view in views.values():
        assert {peer: mark.version for peer, mark in view.marks.items()} == best


def exchange(
    views: dict[PeerId, View], gossips: dict[PeerId, Gossip], to: PeerId, effects: list[Effect]
) -> None:
    source = next(peer for peer in views if peer != to)
    for effect in effects:
        if isinstance(effect, SendSummary):
            assert len(effect.summary.marks) <= limits.SUMMARY_MARKS
            exchange(views, gossips, source, gossips[to].answer(source, effect.summary))
        elif isinstance(effect, SendAdverts):
            for one in effect.adverts:
                views[to].take(one, 0.0)


def test_a_part_of_a_large_mesh_is_small_and_parts_go_round() -> None:
    _, gossip = gossip_of([peer_id(number) for number in range(1, 1000)])
    seen: set[PeerId] = set()
    for _ in range(10):
        part = gossip._part(A)
        assert len(part.marks) <= limits.SUMMARY_PART_MARKS + 2
        seen |= {mark.peer for mark in part.marks}
    assert len(seen) >= 1000


def test_neighbours_are_asked_about_different_parts_first() -> None:
    _, gossip = gossip_of([peer_id(number) for number in range(1, 1000)])
    begins = {gossip._part(peer_id(number)).marks[0].peer for number in range(1, 9)}
    assert len(begins) == 8
