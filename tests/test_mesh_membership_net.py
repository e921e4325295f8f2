"""Many PCs that see each other: whatever happens to some of them, the views of the rest are the truth."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from membership_net import Net, mesh, peer_id

from meshinfer import limits
from meshinfer.mesh.events import Leave
from meshinfer.values import PeerId


# ── many machines ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("size", [2, 5, 12])
def test_all_who_start_at_once_see_each_other_within_two_seconds(size: int) -> None:
    net = mesh(size, seed=size, settle=False)
    assert net.run_until(net.agrees, 2.0) < 2.0
    assert not net.removed


def test_one_known_place_is_enough_for_all_and_the_mesh_does_not_hang_by_it() -> None:
    net = mesh(30, seed=4)
    net.run(limits.LINGER_S + 10)
    most = max(len(machine.view.joined(peer)) for peer, machine in net.machines.items())
    assert most <= 16, "whoever was asked first watches no more than others in the end"
    net.allowed_removals = lambda _seen_by, peer: peer == peer_id(0)
    net.crash(peer_id(0))
    net.run_until(net.agrees, 3.0)


def test_a_killed_one_is_gone_everywhere_within_a_second_and_a_half() -> None:
    net = mesh(5, seed=1)
    net.run(20.0)
    net.allowed_removals = lambda _seen_by, peer: peer == peer_id(2)
    net.crash(peer_id(2))
    assert net.run_until(net.agrees, 1.5) > 0.3
    net.run(30.0)
    assert all(machine.broken == () for machine in net.machines.values())


def test_a_vanished_one_is_gone_by_deadline_and_no_link_is_blamed() -> None:
    net = mesh(20, seed=1)
    net.run(20.0)
    net.allowed_removals = lambda _seen_by, peer: peer == peer_id(2)
    net.crash(peer_id(2), silently=True)
    net.run_until(net.agrees, 5.0)
    net.run(30.0)
    assert all(machine.broken == () for machine in net.machines.values())


def test_a_restart_supersedes_the_former_self() -> None:
    net = mesh(6, seed=2)
    net.run(5.0)
    net.allowed_removals = lambda seen_by, peer: peer_id(3) in (seen_by, peer)
    for _ in range(10):
        net.crash(peer_id(3))
        net.run(0.3)
        net.start(peer_id(3), [peer_id(0)])
        net.run(3.0)
    net.run_until(net.agrees, 3.0)
    assert net.machines[peer_id(0)].view.known[peer_id(3)].incarnation == 11


def test_a_restart_with_the_clock_set_back_is_not_locked_out() -> None:
    net = mesh(6, seed=2)
    net.run(5.0)
    net.allowed_removals = lambda seen_by, peer: peer_id(3) in (seen_by, peer)
    for incarnation in (5000, 20):
        net.crash(peer_id(3))
        net.run(0.2)
        net.start(peer_id(3), [peer_id(0)], incarnation=incarnation)
        net.run_until(net.agrees, 8.0)
    assert net.machines[peer_id(3)].view.own.incarnation == 5001


def test_a_frozen_one_is_dropped_and_rejoins_cleanly_a_minute_later() -> None:
    net = mesh(6, seed=3)
    net.run(10.0)
    net.allowed_removals = lambda seen_by, peer: peer_id(1) in (seen_by, peer)
    net.freeze(peer_id(1))
    net.run_until(net.agrees, 8.0)
    net.run(60.0)
    net.thaw(peer_id(1))
    net.run_until(net.agrees, 6.0)
    net.run(10.0)
    assert all(machine.broken == () for machine in net.machines.values())


def test_a_starved_one_whose_links_stand_is_not_dropped() -> None:
    net = mesh(6, seed=3)
    net.run(10.0)
    for _ in range(5):
        net.frozen[peer_id(1)] = []
        net.run(3.0)
        net.thaw(peer_id(1))
        net.run(2.0)
    assert net.agrees()
    assert not [pair for pair in net.removed if pair[0] > 10]


@pytest.mark.parametrize("split", [(3, 2), (12, 12), (1, 4)])
def test_a_split_gives_each_side_its_own_view_and_healing_joins_them(split: tuple[int, int]) -> None:
    net = mesh(sum(split), seed=5)
    net.run(5.0)
    here = {peer_id(number) for number in range(split[0])}
    there = set(net.machines) - here
    net.allowed_removals = lambda seen_by, peer: (seen_by in here) != (peer in here)
    net.wall(here, there)
    net.run_until(net.agrees, 6.0)
    net.run(60.0)
    assert all(machine.broken == () for machine in net.machines.values())
    net.heal()
    net.run_until(net.agrees, 3.0)


def test_a_one_way_link_removes_nobody_and_is_told_of() -> None:
    net = mesh(6, seed=6)
    net.run(10.0)
    net.deaf = {(peer_id(0), peer_id(1))}
    net.run(limits.SILENCE_S + limits.BROKEN_AFTER_S + 2)
    assert net.agrees()
    assert net.machines[peer_id(1)].broken == (peer_id(0),)
    assert net.machines[peer_id(0)].broken == ()


def test_one_who_hears_all_and_is_heard_by_nobody_is_out_and_comes_back() -> None:
    net = mesh(6, seed=6)
    net.run(10.0)
    mute = peer_id(0)
    net.allowed_removals = lambda seen_by, peer: mute in (seen_by, peer)
    net.deaf = {(mute, other) for other in net.machines}
    net.run_until(net.agrees, limits.SILENCE_S + 4.0)
    net.run(20.0)
    net.deaf.clear()
    net.run_until(net.agrees, 3.0)


def test_a_flapping_link_is_kept_out_for_longer_each_time() -> None:
    net = mesh(6, seed=7)
    net.run(10.0)
    pair = {peer_id(0)}, {peer_id(1)}
    broken = 0.0
    for _ in range(30):
        net.wall(*pair)
        net.run(6.0)
        net.heal()
        net.run(14.0)
        broken += 20.0 * any(net.machines[peer_id(n)].broken for n in (0, 1))
    assert net.agrees()
    assert broken > 540, "its plans would flap with it"


def test_one_who_leaves_is_gone_at_once_everywhere() -> None:
    net = mesh(20, seed=8)
    net.run(5.0)
    gone = peer_id(4)
    net.allowed_removals = lambda _seen_by, peer: peer == gone
    net._handle(gone, Leave())
    net.run(0.6)
    assert all(not m.view.is_present(gone) for peer, m in net.machines.items() if peer != gone)


# ── noise ───────────────────────────────────────────────────────────────────────────────────────────────────
def quiet_mesh() -> Net:
    """One that has been up for a while, on wires that do not jitter."""
    net = mesh(40, seed=9, jitter_s=0.0005)
    net.run(limits.LINGER_S + 50)  # until those let go of after the start are no longer missed
    net.sent.clear()
    return net


def test_an_idle_large_mesh_says_heartbeats_and_nothing_else() -> None:
    net = quiet_mesh()
    net.run(10.0)
    assert net.sent["HeartbeatHeard"] <= 40 * 10 * 2 * 8
    assert net.sent["SummaryHeard"] == 0
    assert net.sent["AdvertsHeard"] * 10 < net.sent["HeartbeatHeard"], "now and then a figure changes"


def test_a_lone_change_goes_over_each_link_once() -> None:
    net = quiet_mesh()
    edges = sum(len(machine.watched) for machine in net.machines.values()) // 2
    machine = net.machines[peer_id(7)]
    own = machine.view.own
    net._act(peer_id(7), machine.publish(replace(own, version=own.version + 1, capacity_bytes=77), net.now))
    net.run(1.0)
    assert net.agrees()
    assert net.sent["AdvertsHeard"] <= 1.3 * edges
    assert net.sent["SummaryHeard"] == 0


def test_a_bystander_that_comes_or_goes_costs_each_other_a_few_messages() -> None:
    net = quiet_mesh()
    bystander = peer_id(999)
    net.allowed_removals = lambda seen_by, peer: bystander in (seen_by, peer)
    net.start(bystander, [peer_id(0)])
    net.run_until(net.agrees, 4.0)
    net.run(10.0)
    assert net.sent["AdvertsHeard"] / 40 < 60
    assert net.sent["SummaryHeard"] / 40 < 5


# ── anything at all ─────────────────────────────────────────────────────────────────────────────────────────
def test_twenty_per_cent_loss_for_ten_minutes_removes_nobody() -> None:
    net = mesh(6, seed=20, loss=0.2)
    net.run(600.0)
    net.run_until(net.agrees, 10.0)
    assert all(machine.broken == () for machine in net.machines.values())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_views_come_to_be_the_truth(seed: int) -> None:
    """Crashes, silent ones, freezes, splits, deaf links, restarts, at 20 % loss: nobody is dropped by whom it could
    reach without any of that, and when it has ended all views are equal and true."""
    random = Random(seed)
    net = mesh(random.randint(8, 18), seed, loss=0.2)
    net.run(5.0)
    everybody = sorted(net.machines)
    spared = set(everybody[:3])
    net.allowed_removals = lambda seen_by, peer: not {seen_by, peer} <= spared
    for _ in range(12):
        trouble(net, random, [peer for peer in everybody if peer not in spared])
        net.run(random.choice([0.2, 1.0, 4.0, 9.0]))
    net.heal()
    net.deaf.clear()
    for peer in sorted(net.frozen):
        net.thaw(peer)
    net.run_until(net.agrees, 20.0)
    print(f"seed {seed}: {net.sizes()}")


def trouble(net: Net, random: Random, victims: list[PeerId]) -> None:
    peer = random.choice(victims)
    kind = random.choice(["crash", "vanish", "start", "start", "freeze", "thaw", "wall", "heal", "deaf"])
    if kind in ("crash", "vanish") and peer in net.machines:
        net.crash(peer, kind == "vanish")
    elif kind == "start" and peer not in net.machines:
        net.start(peer)
    elif kind == "freeze" and peer in net.machines and peer not in net.frozen:
        net.freeze(peer)
    elif kind == "thaw" and peer in net.frozen:
        net.thaw(peer)
    elif kind == "wall":
        cut = random.sample(victims, random.randint(1, len(victims)))
        net.wall(cut, set(net.machines) - set(cut))
    elif kind == "heal":
        net.heal()
    elif kind == "deaf":
        net.deaf = {(random.choice(victims), other) for other in random.sample(victims, 2)}
