"""What people do to a mesh: leave in the middle of an answer, ask too much, mistype, close a laptop, join another."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mesh_processes import Running, mesh, meshinfer, wait_until

from meshinfer.errors import MeshinferError, UserError
from meshinfer.front import client

pytestmark = pytest.mark.mesh

OPTIONS = ("--split", "always", "--memory", "512 MiB")
LEND = (*OPTIONS, "--lend-only")
QUESTION = {
    "messages": [{"role": "user", "content": "Tell me a long story about the sea."}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def couple(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """An agent that asks and runs half of the model, and one that runs the other half."""
    root = tmp_path_factory.mktemp("couple")
    shutil.copytree(smollm2, root / "ann" / "models")
    with mesh(root, {"ann": OPTIONS, "bob": LEND}) as agents:
        wait_until_asked(agents, 2)
        yield agents


def wait_until_asked(agents: dict[str, Running], owners: int) -> None:
    ann = agents["ann"]

    def ready() -> bool:
        return bool(ann.status()["ready"]) and len(ann.get("/api/plan").get("owners") or ()) == owners

    wait_until(f"a plan of {owners} owners", ready, list(agents.values()))


def free_blocks(agent: Running) -> list[tuple[int, int]]:
    return [(span["kv_blocks_free"], span["kv_blocks"]) for span in agent.status()["spans"]]


def all_free(agents: dict[str, Running]) -> bool:
    return all(free == blocks for agent in agents.values() for free, blocks in free_blocks(agent))


def test_who_stops_reading_frees_the_memory_everywhere(couple: dict[str, Running]) -> None:
    """Within a second, on every owner: else people who change their minds fill the mesh."""
    ann = couple["ann"]
    events = client.need(ann.home).events({**QUESTION, "max_tokens": 1000, "ignore_eos": True})
    for _ in range(5):
        assert "text" in next(events)
    assert not all_free(couple)
    events.close()
    left_at = time.monotonic()
    wait_until("all blocks are free", lambda: all_free(couple), list(couple.values()), 5)
    assert time.monotonic() - left_at < 1.0
    assert ann.status()["answers"] == 0


def test_answers_at_the_same_time_are_those_asked_alone(couple: dict[str, Running]) -> None:
    """Sixteen at once share their steps; each still gets its own answer, and all are as when asked alone."""
    from concurrent.futures import ThreadPoolExecutor

    ann = couple["ann"]
    numbers = range(16)

    def ask(number: int) -> str:
        return ann.ask(f"Repeat exactly: apple {number} pear", max_tokens=12)[0]

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, numbers))
    assert len(set(together)) > 8
    # In the default precision a batch may tip a near tie; most answers must not change at all.
    alone = [ask(number) for number in numbers]
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 12
    wait_until("all blocks are free", lambda: all_free(couple), list(couple.values()), 5)


def test_sampling_with_a_seed_is_repeatable_and_stops_where_told(couple: dict[str, Running]) -> None:
    ann = couple["ann"]
    fields: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    assert (
        ann.ask("Invent a name for a boat.", **fields)[0] == ann.ask("Invent a name for a boat.", **fields)[0]
    )
    text, done = ann.ask("Count from one to twenty in digits.", stop=["5"], max_tokens=80)
    assert "5" not in text
    assert done["finish"] in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": "  "}]}, ["empty"]),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, ["tokens", "8,192"]),
        ({"temperature": float("nan")}, ["temperature"]),
        ({"top_p": -1}, ["top_p"]),
        ({"max_tokens": 10**30}, ["max_tokens"]),
        ({"model": "nothing"}, ["nothing", "smollm2"]),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_sentence(
    couple: dict[str, Running], fields: dict[str, Any], words: list[str]
) -> None:
    ann = couple["ann"]
    with pytest.raises(UserError) as caught:
        list(client.need(ann.home).events({**QUESTION, **fields}))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "Paris" in ann.ask("What is the capital of France?")[0], "and nothing else has happened"


def test_the_command_line_tells_programs_and_people(couple: dict[str, Running]) -> None:
    home = couple["ann"].home
    status = json.loads(meshinfer("status", "--home", home, "--json"))
    assert {"peer", "name", "pid", "state", "mesh", "model", "spans", "ready"} <= status.keys()
    assert status["ready"] is True
    assert status["pid"] == couple["ann"].pid
    names = {row["name"] for row in json.loads(meshinfer("peers", "--home", home, "--json"))["peers"]}
    assert names == {"ann", "bob"}
    assert "bob" in meshinfer("plan", "--home", home)
    said = meshinfer("ask", "--home", home, "--stats", "--temperature", "0", "What is the capital of France?")
    assert "Paris" in said
    assert "tokens/s" in said
    refused = meshinfer("ask", "--home", home, "--model", "nothing", "hello", expect=2)
    assert "nothing" in refused
    assert "Traceback" not in refused


def test_an_owner_that_dies_is_said_or_survived(smollm2: Path, tmp_path: Path) -> None:
    """Killed in the middle of an answer: text so far stays and the answer goes on with those who are left, or ends
    with a sentence; the mesh answers again by itself once it has a plan."""
    shutil.copytree(smollm2, tmp_path / "ann" / "models")
    exact = ("--precision", "exact")
    lend = (*LEND, *exact)
    with mesh(tmp_path, {"ann": (*OPTIONS, *exact), "bob": lend, "cyd": lend}) as agents:
        wait_until_asked(agents, 3)
        ann, bob = agents["ann"], agents.pop("bob")
        whole, _ = ann.ask(QUESTION["messages"][0]["content"], max_tokens=150, ignore_eos=True)
        said = ""
        with contextlib.suppress(MeshinferError):  # a sentence of the agent's; anything else fails here
            for number, event in enumerate(
                client.need(ann.home).events({**QUESTION, "max_tokens": 150, "ignore_eos": True})
            ):
                said += event.get("text", "")
                if number == 10:
                    bob.process.kill()
                    bob.process.wait()
        assert whole.startswith(said)
        assert len(said) > 20
        wait_until_asked(agents, 2)
        assert "Paris" in ann.ask("What is the capital of France?")[0]
        names = {row["name"] for row in json.loads(meshinfer("peers", "--home", ann.home, "--json"))["peers"]}
        assert names == {"ann", "cyd"}


def test_who_joins_interrupts_no_answer(smollm2: Path, tmp_path: Path) -> None:
    """A third PC makes a new plan of three; what was being answered goes on along the old one, for which there is room
    beside the new one."""
    shutil.copytree(smollm2, tmp_path / "ann" / "models")
    roomy = ("--split", "always", "--memory", "2 GiB")
    lend = (*roomy, "--lend-only")
    with mesh(tmp_path, {"ann": roomy, "bob": lend}) as agents:
        wait_until_asked(agents, 2)
        ann = agents["ann"]
        token = json.loads(meshinfer("mesh", "token", "--home", ann.home, "--json"))["token"]
        meshinfer("mesh", "join", token, "--home", tmp_path / "cyd")
        events = client.need(ann.home).events({**QUESTION, "max_tokens": 2000, "ignore_eos": True})
        said = next(events)["text"]
        agents["cyd"] = Running(tmp_path / "cyd", *lend)
        after = 0
        while after < 20:
            said += next(events).get("text", "")
            after += len(ann.get("/api/plan").get("owners") or ()) == 3 and ann.status()["ready"]
        assert not ann.status()["metrics"]["counts"].get("refusals.not_accepted")
        events.close()
        whole, done = ann.ask(QUESTION["messages"][0]["content"], max_tokens=20, ignore_eos=True)
        assert said[:40] == whole[:40]
        assert len(done["stats"]["route"]) == 3


def seen_by(agent: Running) -> set[str]:
    """The names of those who are here, as one agent sees it."""
    return {row["name"] for row in agent.get("/api/peers")["peers"]}


def wait_until_seen(agents: list[Running], seconds: float) -> None:
    """Until each of them sees just these."""
    names = {agent.name for agent in agents}
    wait_until(f"all see {names}", lambda: all(seen_by(agent) == names for agent in agents), agents, seconds)


def test_who_comes_goes_dies_or_freezes_is_seen_in_time(tmp_path: Path) -> None:
    """And nobody else: who freezes finds all others when it thaws, and has accused none of them."""
    lone = ("--memory", "256 MiB")
    with mesh(tmp_path, dict.fromkeys(("ann", "bob", "cyd", "dan"), lone)) as agents:
        ann, bob, cyd, dan = agents.values()
        wait_until("ann is up", lambda: ann.status().get("door"), [*agents.values()])
        wait_until("all are up", lambda: all(a.status().get("door") for a in agents.values()), [ann])
        wait_until_seen([ann, bob, cyd, dan], 30)
        bob.process.kill()
        bob.process.wait()
        wait_until_seen([ann, cyd, dan], 3)
        agents["bob"] = bob = Running(bob.home, *lone)
        wait_until("bob is up", lambda: bob.status().get("door"), [ann, bob])
        wait_until_seen([ann, bob, cyd, dan], 5)
        if sys.platform != "win32":
            os.kill(dan.pid, signal.SIGSTOP)
            wait_until_seen([ann, bob, cyd], 5)
            os.kill(dan.pid, signal.SIGCONT)
            wait_until_seen([ann, bob, cyd, dan], 5)
        cyd.process.stdin and cyd.process.stdin.close()
        wait_until_seen([ann, bob, dan], 2)
        assert cyd.process.wait(timeout=20) == 0


def test_a_slip_in_an_interface_is_refused_and_opens_nothing(tmp_path: Path) -> None:
    """Else a mistyped loopback would listen on every network."""
    for slip in ("nosuch0", "127.0.0.l", "300.1.1.1"):
        said = meshinfer("start", "--home", tmp_path / "ann", "--interface", slip, expect=2)
        assert slip in said
        assert "Traceback" not in said


def test_agents_of_different_meshes_ignore_each_other(tmp_path: Path) -> None:
    """Though they hear each other's announcements, and one even knows where the other's door is."""
    lone = ("--memory", "256 MiB")
    with mesh(tmp_path / "one", {"ann": lone, "bob": lone}) as one:
        ann, bob = one["ann"], one["bob"]
        wait_until("ann and bob meet", lambda: ann.status().get("peers") == 1, [ann, bob])
        known = ("--peer", f"127.0.0.1:{ann.status()['door']}")
        with mesh(tmp_path / "two", {"eve": (*lone, *known)}) as two:
            eve = two["eve"]

            def turned_away() -> bool:
                counts = ann.status()["metrics"]["counts"]
                return bool(counts.get("refused.door.mesh", 0) and eve.status().get("problems"))

            wait_until("eve knocks in vain", turned_away, [ann, bob, eve])
            assert eve.status()["peers"] == 0
            assert ann.status()["peers"] == 1


def test_one_configured_address_is_enough_where_multicast_is_not(tmp_path: Path) -> None:
    """Bob knows ann's door, cyd knows bob's: all three know each other."""
    lone = ("--memory", "256 MiB", "--no-discovery")
    with mesh(tmp_path, {"ann": lone}) as first:
        ann = first["ann"]
        everybody = [ann]
        wait_until("ann is up", lambda: ann.status().get("door"), everybody)
        token = json.loads(meshinfer("mesh", "token", "--home", ann.home, "--json"))["token"]
        try:
            for name in ("bob", "cyd"):
                meshinfer("mesh", "join", token, "--home", tmp_path / name)
                door = everybody[-1].status()["door"]
                everybody.append(Running(tmp_path / name, *lone, "--peer", f"127.0.0.1:{door}"))
                wait_until(f"{name} is up", lambda: everybody[-1].status().get("door"), everybody)
            wait_until(
                "all know all", lambda: all(a.status().get("peers") == 2 for a in everybody), everybody, 30
            )
        finally:
            for agent in everybody[1:]:
                agent.stop()
