"""Who watches whom: everybody is watched by several, both sides know it, and a crowd costs no more than a few."""

from __future__ import annotations

from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from membership_net import advert, peer_id

from meshinfer import limits
from meshinfer.mesh.rings import FEW, RINGS, Circle, Rings, neighbours
from meshinfer.mesh.view import View
from meshinfer.values import PeerId

peers_of_a_mesh = st.sets(st.integers(0, 10_000), min_size=1, max_size=60).map(
    lambda numbers: frozenset(peer_id(number) for number in numbers)
)


@given(peers_of_a_mesh)
def test_each_watches_those_who_watch_it(peers: frozenset[PeerId]) -> None:
    watched = {peer: neighbours(peer, peers) for peer in peers}
    for one, other in combinations(sorted(peers), 2):
        assert (other in watched[one]) == (one in watched[other])
    assert all(peer not in watched[peer] for peer in peers)


def test_few_watch_all_and_many_watch_eight() -> None:
    few = [peer_id(number) for number in range(FEW)]
    assert all(neighbours(peer, few) == frozenset(few) - {peer} for peer in few)
    many = Rings(peer_id(number) for number in range(1000))
    counts = [len(many.neighbours(peer_id(number))) for number in range(1000)]
    assert max(counts) == 2 * RINGS
    assert min(counts) >= 2 * RINGS - 2, "places on different rings are unrelated"


def test_rings_of_a_thousand_stay_whole_when_a_third_vanishes_at_once() -> None:
    rings, random = Rings(peer_id(number) for number in range(1000)), Random(3)
    alive = {peer_id(number) for number in range(1000)}
    watched = {peer: rings.neighbours(peer) for peer in alive}
    for peer in random.sample(sorted(alive), 333):
        alive.discard(peer)
    reached: set[PeerId] = set()
    front = {min(alive)}
    while front:
        reached |= front
        front = set().union(*[watched[peer] for peer in front]) & alive - reached
    assert reached == alive


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120))
def test_a_change_at_a_time_gives_the_same_as_all_at_once(changes: list[tuple[bool, int]]) -> None:
    rings, peers = Rings(), set()
    for comes, number in changes:
        (rings.add if comes else rings.discard)(peer_id(number))
        (peers.add if comes else peers.discard)(peer_id(number))
    for number in range(5):
        assert rings.neighbours(peer_id(number)) == neighbours(peer_id(number), peers)
    assert len(rings) == len(peers)


def test_an_outsider_has_neighbours_on_rings_that_it_is_not_on() -> None:
    many = [peer_id(number) for number in range(1, 100)]
    outsider = peer_id(0)
    found = neighbours(outsider, many)
    assert found == neighbours(outsider, [outsider, *many])


# ── whom to watch ───────────────────────────────────────────────────────────────────────────────────────────
def circle_of(present: int) -> tuple[View, Circle]:
    """The circle of the first of so many, each joined to the first, so that one may leave without the others."""
    me = peer_id(0)
    view = View(advert(me), {})
    circle = Circle(view)
    others = [peer_id(number) for number in range(1, present)]
    for other in others:
        view.take(advert(other, links=[me, *others]), 0.0)
    view.hear(frozenset(others), 0.0)
    for peer in view.take_moves():
        circle.place(peer, 0.0)
    return view, circle


def test_those_that_plans_name_are_watched_while_they_are_named() -> None:
    _, circle = circle_of(40)
    far = next(
        peer_id(number) for number in range(1, 40) if peer_id(number) not in circle.watched(set(), 0.0)
    )
    circle.want(frozenset({far}))
    assert circle.changed
    assert far in circle.watched(set(), 0.0)
    circle.want(frozenset())
    assert far not in circle.watched(set(), 0.0)


def test_whoever_speaks_from_outside_is_watched_until_it_falls_silent() -> None:
    _, circle = circle_of(3)
    stranger = peer_id(99)
    circle.spoken_to(stranger, 1.0)
    assert stranger in circle.watched(set(), 1.0)
    assert stranger not in circle.watched(set(), 1.0 + limits.SPEAKER_S)


def test_speakers_are_bounded_and_the_first_ones_stay() -> None:
    _, circle = circle_of(3)
    crowd = [peer_id(number) for number in range(100, 200)]
    for peer in crowd:
        circle.spoken_to(peer, 0.0)
    watched = circle.watched(set(), 0.0)
    assert set(crowd) & watched == set(crowd[: limits.SPEAKERS])


def test_a_peer_just_heard_of_is_no_target_before_it_had_time_to_become_present() -> None:
    view, circle = circle_of(3)
    view.take(advert(peer_id(50)), 10.0)
    for peer in view.take_moves():
        circle.place(peer, 10.0)
    assert peer_id(50) not in circle.watched(set(), 10.0)
    assert circle.unsettled
    assert peer_id(50) in circle.watched(set(), 10.0 + limits.STRANGER_S)


def test_who_was_here_is_looked_for_again_at_once_unless_it_has_left() -> None:
    view, circle = circle_of(4)
    view.hear(frozenset({peer_id(1), peer_id(2)}), 1.0)
    view.take(advert(peer_id(1), version=2, links=[peer_id(0), peer_id(2)]), 1.0)
    view.take(advert(peer_id(2), version=2, links=[peer_id(0), peer_id(1)]), 1.0)
    for peer in view.take_moves():
        circle.place(peer, 1.0)
    assert not view.is_present(peer_id(3))
    assert peer_id(3) in circle.watched(set(), 1.0)


def test_a_heard_peer_lingers_half_a_minute_after_it_is_needed() -> None:
    _, circle = circle_of(40)
    far = next(
        peer_id(number) for number in range(1, 40) if peer_id(number) not in circle.watched(set(), 0.0)
    )
    assert far in circle.watched({far}, 1.0), "its successors' links must stand first"
    assert far in circle.watched({far}, 1.0 + limits.LINGER_S - 0.1)
    assert far not in circle.watched({far}, 1.0 + limits.LINGER_S)


def test_an_edge_that_alone_joins_two_parts_is_never_let_go_of() -> None:
    view, circle = circle_of(40)
    lonely = peer_id(77)
    view.take(advert(lonely, links=[view.me]), 0.0)
    view.hear(frozenset(peer_id(number) for number in range(1, 40)) | {lonely}, 0.0)
    for peer in view.take_moves():
        circle.place(peer, 0.0)
    assert view.is_present(lonely)
    circle._inside.discard(lonely)
    for beat in range(200):
        assert lonely in circle.watched({lonely}, beat * 0.5)


def test_few_linger_at_once() -> None:
    view, circle = circle_of(200)
    heard = {peer_id(number) for number in range(1, 200)}
    watched = circle.watched(heard, 0.0)
    assert len(watched) <= 2 * RINGS + limits.LINGERING
    assert view.is_present(max(heard - watched))
