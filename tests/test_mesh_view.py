"""A person sees the peers that are really here: no ghosts, no PC locked out for having been away."""

from __future__ import annotations

from mesh_simulator import advert, peer_id

from meshinfer import limits
from meshinfer.mesh.view import View


def test_own_advert_is_always_there_and_peers_are_in_order_of_id() -> None:
    view = View(advert(2))
    view.heard(advert(3), 10.0)
    view.heard(advert(1), 10.0)
    assert [one.peer for one in view.peers(10.0)] == [peer_id(1), peer_id(2), peer_id(3)]


def test_newest_incarnation_then_version_wins_whatever_the_order_of_arrival() -> None:
    view = View(advert(1))
    assert view.heard(advert(2, incarnation=2, version=1), 0.0)
    assert not view.heard(advert(2, incarnation=1, version=99), 0.1), "the former self is superseded"
    assert view.heard(advert(2, incarnation=2, version=3), 0.2)
    assert not view.heard(advert(2, incarnation=2, version=2), 0.3)
    newest = view.get(peer_id(2))
    assert newest is not None
    assert (newest.incarnation, newest.version) == (2, 3)


def test_a_silent_peer_vanishes_at_the_bound_and_not_before() -> None:
    view = View(advert(1))
    view.heard(advert(2), 0.0)
    assert view.expire(limits.SILENCE_S - 0.01) == ()
    assert view.expire(limits.SILENCE_S) == (peer_id(2),)
    assert [one.peer for one in view.peers(limits.SILENCE_S)] == [peer_id(1)]
    assert view.next_expiry() is None


def test_the_same_advert_again_keeps_a_peer_alive_and_an_older_one_does_not() -> None:
    view = View(advert(1))
    view.heard(advert(2, version=2), 0.0)
    assert not view.heard(advert(2, version=2), 4.0)
    view.heard(advert(2, version=1), 8.0)
    assert view.expire(8.5) == ()
    assert view.expire(9.0) == (peer_id(2),)


def test_a_silent_peer_that_is_heard_again_is_back_at_once() -> None:
    view = View(advert(1))
    view.heard(advert(2), 0.0)
    view.expire(6.0)
    assert view.heard(advert(2), 6.1)
    assert view.get(peer_id(2)) is not None
    assert view.next_expiry() == 6.1 + limits.SILENCE_S


def test_goodbye_holds_against_adverts_that_were_still_on_their_way() -> None:
    view = View(advert(1))
    view.heard(advert(2, version=5), 0.0)
    assert view.left(peer_id(2), 1.0)
    assert not view.left(peer_id(2), 1.0)
    assert not view.heard(advert(2, version=6), 1.1)
    assert view.heard(advert(2, incarnation=2), 1.2), "a restarted peer is welcome at once"


def test_nobody_is_blocked_for_longer_than_silence_lasts() -> None:
    view = View(advert(1))
    view.heard(advert(2), 0.0)
    view.left(peer_id(2), 1.0)
    assert view.heard(advert(2, version=2), 1.0 + limits.SILENCE_S)


def test_what_others_say_of_this_agent_is_ignored() -> None:
    view = View(advert(1, capacity_mib=10))
    assert not view.heard(advert(1, capacity_mib=99, incarnation=9), 0.0)
    assert view.own.capacity_bytes == 10 * limits.MIB


def test_how_long_ago_a_peer_was_heard() -> None:
    view = View(advert(1))
    view.heard(advert(2), 1.0)
    assert view.heard_s(peer_id(1), 3.0) == 0.0
    assert view.heard_s(peer_id(2), 3.0) == 2.0
    assert view.heard_s(peer_id(3), 3.0) is None
