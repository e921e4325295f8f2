"""A person sees the peers that can be reached, and no ghosts: presence is what the edges between peers say."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from membership_net import advert, peer_id

from meshinfer import limits
from meshinfer.mesh.view import View
from meshinfer.values import Advert, PeerId

A, B, C, D, E = (peer_id(number) for number in range(5))


def view_of(edges: dict[PeerId, list[PeerId]], me: PeerId = A) -> View:
    view = View(advert(me), {})
    view.hear(frozenset(edges[me]), 0.0)
    for peer, links in edges.items():
        if peer != me:
            view.take(advert(peer, links=links), 0.0)
    return view


def ids(view: View) -> set[PeerId]:
    return {one.peer for one in view.present}


def test_alone_is_a_mesh_of_one() -> None:
    view = View(advert(A), {})
    assert view.present == (view.own,)
    assert len(view) == 1
    assert view.heard_s(A, 7.0) == 0.0


def test_present_are_those_reached_over_edges_in_order_of_id() -> None:
    view = view_of({A: [B], B: [A, C], C: [B], D: [E], E: [D]})
    assert ids(view) == {A, B, C}, "a pair that vouches for itself is not reached"
    assert [one.peer for one in view.present] == sorted([A, B, C])
    assert view.get(D) is None
    assert view.known[D].peer == D


def test_one_way_is_no_edge() -> None:
    assert ids(view_of({A: [B], B: []})) == {A}
    assert ids(view_of({A: [], B: [A]})) == {A}
    assert ids(view_of({A: [B], B: [A, C], C: []})) == {A, B}


def test_one_bad_link_changes_nothing() -> None:
    view = view_of({A: [B, C], B: [A, C], C: [A, B]})
    view.take_changes()
    view.hear(frozenset({B}), 1.0)
    assert ids(view) == {A, B, C}
    assert view.take_changes() == frozenset(), "nobody need look at anything again"


def test_who_is_heard_by_nobody_any_more_is_gone() -> None:
    view = view_of({A: [B, C], B: [A, C], C: [A, B]})
    view.hear(frozenset({B}), 1.0)
    view.take(advert(B, version=2, links=[A]), 1.1)
    assert ids(view) == {A, B}, "though its last word lists both"
    assert C in view.take_changes()


def test_a_bridge_that_breaks_cuts_off_the_far_part_and_brings_it_back() -> None:
    view = view_of({A: [B], B: [A, C], C: [B, D], D: [C]})
    view.take(advert(B, version=2, links=[A]), 1.0)
    assert ids(view) == {A, B}
    view.take(advert(B, version=3, links=[A, C]), 2.0)
    assert ids(view) == {A, B, C, D}


def test_one_that_loses_all_edges_at_once_may_leave_several_parts_behind() -> None:
    hub = {A: [B], B: [A, C, D, E], C: [B], D: [B, E], E: [B, D]}
    view = view_of(hub)
    assert len(view) == 5
    view.take(advert(B, version=2, links=[A]), 1.0)
    assert ids(view) == {A, B}


def test_newest_incarnation_then_version_wins_whatever_the_order_of_arrival() -> None:
    view = View(advert(A), {})
    assert view.take(advert(B, incarnation=2), 0.0)
    assert not view.take(advert(B, incarnation=1, version=99), 0.1), "the former self is superseded"
    assert view.take(advert(B, incarnation=2, version=3), 0.2)
    assert not view.take(advert(B, incarnation=2, version=2), 0.3)
    assert not view.take(advert(B, incarnation=2, version=3), 0.4)
    assert (view.known[B].incarnation, view.known[B].version) == (2, 3)


def test_a_new_life_has_only_its_own_edges() -> None:
    view = view_of({A: [B], B: [A]})
    view.take(advert(B, incarnation=2), 1.0)
    assert ids(view) == {A}
    view.take(advert(B, incarnation=2, version=2, links=[A]), 1.5)
    assert ids(view) == {A, B}


def test_word_of_a_new_life_ends_the_old_one_before_its_advert_has_come() -> None:
    view = view_of({A: [B], B: [A]})
    view.outdate(B, 1.0)
    assert ids(view) == {A}
    assert view.take(advert(B, incarnation=2, links=[A]), 1.1)
    assert ids(view) == {A, B}


def test_who_leaves_is_gone_at_once_and_old_news_does_not_bring_it_back() -> None:
    view = view_of({A: [B, C], B: [A, C], C: [A, B]})
    last = advert(C, version=9, links=[A, B])
    view.take(replace_leaving(last), 1.0)
    assert ids(view) == {A, B}
    assert not view.take(advert(C, version=8, links=[A, B]), 1.1)
    assert ids(view) == {A, B}
    view.take(advert(C, incarnation=2, links=[A, B]), 1.2)
    assert ids(view) == {A, B, C}, "nobody is locked out for having left"


def test_what_others_say_of_this_agent_is_ignored() -> None:
    view = view_of({A: [B], B: [A]})
    assert not view.take(advert(A, incarnation=9), 1.0)
    assert view.own == advert(A)


def test_digests_are_equal_for_equal_present_adverts_and_only_then() -> None:
    one, other = view_of({A: [B], B: [A]}), view_of({A: [B], B: [A]}, me=B)
    assert one.digest == other.digest
    one.take(advert(C), 0.0)
    assert one.digest == other.digest, "what is known of the absent may differ"
    one.take(advert(B, version=2, links=[A]), 1.0)
    assert one.digest != other.digest
    other.publish(advert(B, version=2, links=[A]))
    assert one.digest == other.digest


def test_the_absent_are_kept_for_a_time_and_then_forgotten() -> None:
    view = view_of({A: [B], B: [A]})
    view.hear(frozenset(), 5.0)
    view.forget(5.0 + limits.ABSENT_S - 1)
    assert B in view.known
    view.forget(5.0 + limits.ABSENT_S)
    assert B not in view.known
    assert B in view.take_changes()
    view.take(advert(B, links=[A]), 1000.0)
    view.hear(frozenset({B}), 1000.0)
    assert ids(view) == {A, B}


def test_adverts_known_are_bounded_and_the_longest_absent_go_first() -> None:
    view = view_of({A: [B], B: [A]})
    for number in range(10, 10 + limits.ROSTER_MEMBERS):
        view.take(advert(peer_id(number)), float(number))
    assert len(view.known) == limits.ROSTER_MEMBERS
    assert ids(view) == {A, B}
    assert peer_id(10) not in view.known
    assert peer_id(9 + limits.ROSTER_MEMBERS) in view.known


def test_what_has_not_changed_is_the_same_object() -> None:
    view = view_of({A: [B], B: [A]})
    assert view.present is view.present
    before = view.present
    view.take(advert(C), 1.0)
    assert view.present is before, "news of the absent is no news of the present"
    assert view.take_moves() == sorted([B, C])
    assert view.take_moves() == []


def test_whether_the_mesh_holds_without_one_edge() -> None:
    view = view_of({A: [B, C], B: [A, C], C: [A, B, D], D: [C]})
    assert view.holds_without(B)
    assert view.holds_without(D), "it is no edge of this agent"
    view.hear(frozenset({B}), 1.0)
    assert not view.holds_without(B)
    assert ids(view) == {A, B, C, D}, "asking changes nothing"


changes_of_claims = st.lists(
    st.tuples(st.integers(0, 7), st.sets(st.integers(0, 7), max_size=5), st.booleans()), max_size=40
)


@settings(deadline=None)
@given(changes_of_claims)
def test_step_by_step_gives_what_a_full_search_gives(changes: list[tuple[int, set[int], bool]]) -> None:
    peers = [peer_id(number) for number in range(8)]
    view, claims, versions = (
        View(advert(peers[0]), {}),
        {peer: frozenset[PeerId]() for peer in peers},
        dict.fromkeys(peers, 1),
    )
    for now, (number, heard, leaving) in enumerate(changes):
        peer = peers[number]
        links = frozenset(peers[other] for other in heard if other != number)
        versions[peer] += 1
        if number == 0:
            view.hear(links, now)
            claims[peer] = links
        else:
            word = advert(peer, version=versions[peer], links=links)
            view.take(replace_leaving(word) if leaving else word, now)
            claims[peer] = frozenset() if leaving else links
        expected = reached(peers[0], claims)
        assert {one.peer for one in view.present} == expected
        assert [one.peer for one in view.present] == sorted(expected)
        assert set(view.known) - expected == set(view._absent)


def reached(start: PeerId, claims: dict[PeerId, frozenset[PeerId]]) -> set[PeerId]:
    found, front = set[PeerId](), {start}
    while front:
        found |= front
        front = {b for a in front for b in claims[a] if a in claims[b]} - found
    return found


def replace_leaving(word: Advert) -> Advert:
    return replace(word, leaving=True)


def test_a_large_view_under_churn_stays_true() -> None:
    random = Random(11)
    peers = [peer_id(number) for number in range(200)]
    claims = {peer: frozenset(random.sample(peers, 6)) - {peer} for peer in peers}
    for peer in peers:
        for other in claims[peer]:
            claims[other] |= {peer}
    view, versions = View(advert(peers[0]), {}), dict.fromkeys(peers, 1)
    for step in range(600):
        peer = random.choice(peers)
        versions[peer] += 1
        if random.random() < 0.5:
            claims[peer] = frozenset(random.sample(sorted(claims[peer]), len(claims[peer]) // 2))
        else:
            claims[peer] |= frozenset(random.sample(peers, 3)) - {peer}
        if peer == peers[0]:
            view.hear(claims[peer], step)
        else:
            view.take(advert(peer, version=versions[peer], links=claims[peer]), step)
    for peer in peers[1:]:
        versions[peer] += 1
        view.take(advert(peer, version=versions[peer], links=claims[peer]), 600.0)
    view.hear(claims[peers[0]], 600.0)
    assert ids(view) == reached(peers[0], claims)


def test_those_who_ceased_to_be_present_are_told_once_with_their_last_advert() -> None:
    view = view_of({A: [B], B: [A, C], C: [B]})
    assert view.take_gone() == {}
    last = view.get(C)
    view.take(advert(B, links=[A], version=2), 1.0)
    assert view.take_gone() == {C: last}
    assert view.take_gone() == {}


def test_of_two_edges_that_are_spare_one_by_one_both_are_not() -> None:
    view = view_of({A: [B, C], B: [A, C], C: [A, B]})
    assert view.holds_without(B)
    assert view.holds_without(C)
    assert not view.holds_without(C, [B])
    assert ids(view) == {A, B, C}
    assert view.joined(A) == {B, C}, "nothing was changed by looking"
