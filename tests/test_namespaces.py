"""Real agents on a network of their own, with the real model: what happens to offices happens to it, and answers are
right throughout. Each test prints how long things took (`pytest -rP` shows it)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from mesh_processes import wait_until
from namespaces import (
    DOCKER_ADDRESS,
    NAMESPACES,
    PREFIX,
    Host,
    Resident,
    ip,
    lan,
    refusal,
    remove,
    residents,
    sweep,
)
from office import (
    ASKERS,
    LEND,
    NAMES,
    SHARE,
    Five,
    UnderWay,
    UnsplitModel,
    agreed,
    ask_and_check,
    ready,
    took,
)

from meshinfer.limits import SILENCE_S

pytestmark = pytest.mark.mesh

AGREE_S: Final = 3.0
RETURN_S: Final = 15.0
"""Until who is back takes part again: a place that was silent for long is knocked at every 10 s."""


@pytest.fixture(scope="module")
def network_allowed() -> None:
    reason = refusal()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def unsplit(network_allowed: None, smollm2: Path) -> UnsplitModel:
    return UnsplitModel(smollm2)


@pytest.fixture(scope="module")
def office(unsplit: UnsplitModel, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Five]:
    root = tmp_path_factory.mktemp("office")
    for name in ASKERS:
        shutil.copytree(smollm2, root / name / "models")
    with lan(NAMES) as network:
        for host in network.hosts.values():
            host.run_docker()
        with residents(network, root, {name: SHARE if name in ASKERS else LEND for name in NAMES}) as agents:
            five = Five(network, agents)
            five.come_up()
            yield five


@pytest.fixture
def five(office: Five) -> Five:
    office.mend()
    return office


def test_five_that_start_at_the_same_second_agree(five: Five, unsplit: UnsplitModel) -> None:
    """Else the office waits every Monday morning."""
    assert five.agreed_s < AGREE_S
    for name in ASKERS:
        ask_and_check(five.agents[name], unsplit)


def linked(agent: Resident, others: set[str]) -> bool:
    return agent.host.linked_to() == others


def test_an_address_that_every_pc_has_leads_nobody_astray(five: Five) -> None:
    """Docker gives its bridge the same one everywhere: who connects to it is connected to itself."""
    (ann,) = five.of("ann")
    rows = ann.get("/api/peers")["peers"]
    assert all(DOCKER_ADDRESS in row["addresses"] for row in rows), "the danger was there"
    for agent in five.all:
        others = {host.address for name, host in five.network.hosts.items() if name != agent.name}
        wait_until(f"{agent.name} is linked to the others alone", partial(linked, agent, others), [agent], 10)


def test_one_that_is_killed_is_replaced(five: Five, unsplit: UnsplitModel) -> None:
    """The plan without it is agreed in under three seconds; the answer under way goes on; it may come back."""
    (ann, cyd), rest = five.of("ann", "cyd"), five.of("ann", "bob", "dan", "eve")
    ask_and_check(ann, unsplit)
    answer = UnderWay(ann)
    killed_at = time.monotonic()
    cyd.kill()
    replanned_s = took("four agree after the kill", lambda: agreed(rest), rest, killed_at)
    answer.check(unsplit)
    took("four are ready after the kill", lambda: ready(rest), rest, killed_at)
    for asker in five.of(*ASKERS):
        ask_and_check(asker, unsplit)
    back_at = time.monotonic()
    five.agents["cyd"] = cyd.again()
    took("five agree once it is back (from its start)", lambda: agreed(five.all), five.all, back_at)
    ask_and_check(ann, unsplit)
    assert replanned_s < AGREE_S


def test_a_network_in_two_halves_works_in_both_and_heals(five: Five, unsplit: UnsplitModel) -> None:
    """Each half agrees on a plan of its own, since each holds the whole model; together they are one mesh again."""
    near, far = five.of("ann", "bob", "cyd"), five.of("dan", "eve")
    for asker in five.of(*ASKERS):
        ask_and_check(asker, unsplit)
    answers = [UnderWay(asker) for asker in five.of(*ASKERS)]
    cut_at = time.monotonic()
    five.network.split(["dan", "eve"])
    parted_s = took("both halves agree", lambda: agreed(near) and agreed(far), five.all, cut_at)
    for answer in answers:
        answer.check(unsplit)
    took("both halves are ready", lambda: ready(near) and ready(far), five.all, cut_at)
    for asker in five.of(*ASKERS):
        ask_and_check(asker, unsplit)
    answers = [UnderWay(asker) for asker in five.of(*ASKERS)]
    healed_at = time.monotonic()
    five.network.heal()
    whole_s = took("five agree after healing", lambda: agreed(five.all), five.all, healed_at)
    for answer in answers:
        answer.check(unsplit)
    for asker in five.of(*ASKERS):
        ask_and_check(asker, unsplit)
    assert parted_s < SILENCE_S + AGREE_S
    assert whole_s < RETURN_S


def test_an_interface_that_goes_down_comes_back(five: Five, unsplit: UnsplitModel) -> None:
    """A cable out: the others go on, it knows that it is alone, and takes part again once the cable is in."""
    (ann, bob), rest = five.of("ann", "bob"), five.of("ann", "cyd", "dan", "eve")
    host = five.network.hosts["bob"]
    ask_and_check(ann, unsplit)
    answer = UnderWay(ann)
    down_at = time.monotonic()
    host.interface_down()
    without_s = took("four agree without it", lambda: agreed(rest), rest, down_at)
    answer.check(unsplit)
    ask_and_check(ann, unsplit)
    wait_until("it knows that it is alone", lambda: plans_of(bob) <= {frozenset({"bob"})}, [bob])
    assert plans_of(bob) or bob.get("/api/plan")["reason"], "it has all layers by now, or says which it lacks"
    up_at = time.monotonic()
    host.interface_up()
    back_s = took("five agree once it is up again", lambda: agreed(five.all), five.all, up_at)
    for asker in five.of(*ASKERS):
        ask_and_check(asker, unsplit)
    assert without_s < SILENCE_S + AGREE_S
    assert back_s < RETURN_S


def plans_of(agent: Resident) -> set[frozenset[str]]:
    """The owners of each plan that it knows."""
    plans = agent.get("/api/plan")["plans"]
    return {frozenset(owner["name"] for owner in plan["owners"]) for plan in plans}


def test_one_that_freezes_is_replaced_and_thaws(five: Five, unsplit: UnsplitModel) -> None:
    """A suspended PC: its sockets stand, and nobody waits for it. Its stale work counts for nothing when it wakes."""
    (ann, eve), rest = five.of("ann", "eve"), five.of("ann", "bob", "cyd", "dan")
    answer = UnderWay(ann)
    frozen_at = time.monotonic()
    eve.freeze()
    without_s = took("four agree without the frozen one", lambda: agreed(rest), rest, frozen_at)
    answer.check(unsplit)
    ask_and_check(ann, unsplit)
    thawed_at = time.monotonic()
    eve.thaw()
    back_s = took("five agree once it is thawed", lambda: agreed(five.all), five.all, thawed_at)
    ask_and_check(ann, unsplit)
    assert without_s < SILENCE_S + AGREE_S
    assert back_s < RETURN_S


# ── no multicast ────────────────────────────────────────────────────────────────────────────────────────────────


def hears_multicast(listener: Host, speaker: Host) -> bool:
    """Whether a datagram to mDNS's group arrives: one sent after it, to the listener alone, does."""
    group, port = "224.0.0.251", 29_999
    with listener.entered():
        ears = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with speaker.entered():
        mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with ears, mouth:
        ears.bind(("", port))
        joined = socket.inet_aton(group) + socket.inet_aton(listener.address)
        ears.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
        mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(speaker.address))
        mouth.sendto(b"to all", (group, port))
        mouth.sendto(b"to one", (listener.address, port))
        ears.settimeout(5)
        return ears.recv(16) == b"to all"


def test_one_configured_address_is_enough_where_multicast_is_blocked(
    unsplit: UnsplitModel, smollm2: Path, tmp_path: Path
) -> None:
    """Bob is told of ann, cyd of bob: all three know each other, and answer."""
    names = ("ann", "bob", "cyd")
    shutil.copytree(smollm2, tmp_path / "ann" / "models")
    with lan(names) as network:
        ann, bob, cyd = network.hosts.values()
        assert hears_multicast(cyd, ann)
        network.block_multicast()
        assert not hears_multicast(cyd, ann)
        told = {"ann": SHARE, "bob": (*LEND, "--peer", ann.address), "cyd": (*LEND, "--peer", bob.address)}
        with residents(network, tmp_path, told) as agents:
            three = list(agents.values())
            started_at = time.monotonic()
            took(
                "the last of three is up",
                lambda: all(a.status().get("door") for a in three),
                three,
                started_at,
            )
            up_at = time.monotonic()
            agreed_s = took("three agree without multicast", lambda: agreed(three), three, up_at)
            wait_until("three are ready", lambda: ready(three), [*three])
            ask_and_check(agents["ann"], unsplit)
            assert agreed_s < RETURN_S


def test_a_network_is_gone_after_its_block_whatever_happened(network_allowed: None) -> None:
    """Else a day of failing tests would fill the PC with namespaces."""

    def interrupted() -> None:
        with lan(["ann", "bob"]) as network:
            made.extend(set(NAMESPACES.iterdir()) - before)
            ann, bob = network.hosts.values()
            sleeper.append(ann.start("sleep", "60", stdin=subprocess.DEVNULL))
            with ann.entered(), pytest.raises(ConnectionRefusedError):
                socket.create_connection((bob.address, 9), timeout=5)
            raise KeyboardInterrupt

    before, made, sleeper = set(NAMESPACES.iterdir()), list[Path](), list[subprocess.Popen[bytes]]()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(made) == 3
    assert not any(path.exists() for path in made)
    assert sleeper[0].wait(timeout=5) != 0


def test_what_a_killed_test_left_is_swept_and_what_a_living_one_has_is_not(network_allowed: None) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = (f"{PREFIX}-{pid}-{os.getpid()}-ann" for pid in (ended.pid, os.getppid()))
    try:
        ip(f"netns add {dead}", f"netns add {alive}")
        sweep()
        assert not (NAMESPACES / dead).exists()
        assert (NAMESPACES / alive).exists()
    finally:
        remove(dead)
        remove(alive)
