"""What `meshinfer plan`, `peers` and `status` tell of a real mesh, before and after it was asked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mesh_processes import Running, mesh, meshinfer, wait_until

pytestmark = pytest.mark.mesh

OPTIONS = ("--split", "always", "--memory", "512 MiB")


@pytest.fixture(scope="module")
def couple(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """An agent that asks and runs half of the model, and one that runs the other half."""
    root = tmp_path_factory.mktemp("shown")
    shutil.copytree(smollm2, root / "ann" / "models")
    with mesh(root, {"ann": OPTIONS, "bob": (*OPTIONS, "--lend-only")}) as agents:
        ann = agents["ann"]
        wait_until(
            "a plan of two",
            lambda: ann.status()["ready"] and len(ann.get("/api/plan")["owners"]) == 2,
            list(agents.values()),
        )
        yield agents


def test_what_was_predicted_and_what_is_measured(couple: dict[str, Running]) -> None:
    ann, bob = couple["ann"], couple["bob"]
    ann.ask("Tell me a story about the sea.", max_tokens=40, ignore_eos=True)
    plan = ann.get("/api/plan")
    assert plan["usable"] is True
    assert plan["measured_steps"] > 20
    owners = plan["owners"]
    assert {owner["name"] for owner in owners} == {"ann", "bob"}
    assert {owner["readiness"] for owner in owners} == {"ready"}
    assert all(owner["predicted_us"] > 0 for owner in owners)
    assert plan["predicted_us"] >= sum(owner["predicted_us"] for owner in owners)
    parts_us = sum(owner["measured_us"] + owner["queue_us"] for owner in owners)
    # Medians of parts need not add up to the median of the whole; they do roughly.
    assert parts_us + 3 * plan["hops"]["measured_us"] == pytest.approx(plan["measured_us"], rel=0.3)
    # Somebody else's figures are those of a PC that asked nothing: it knows its own span only.
    seen = {owner["name"]: owner for owner in bob.get("/api/plan")["owners"]}
    assert seen["bob"]["measured_by"] == "owner"
    assert seen["bob"]["measured_us"] > 0
    assert seen["ann"]["measured_us"] is None
    text = meshinfer("plan", "--home", ann.home)
    assert "MEASURED MS" in text
    assert "bob" in text
    assert f"last {plan['measured_steps']} tokens asked here" in text


def test_speeds_and_links_are_told(couple: dict[str, Running]) -> None:
    ann = couple["ann"]
    rows = {row["name"]: row for row in ann.get("/api/peers")["peers"]}
    assert rows["ann"]["link"] is None
    assert rows["bob"]["link"]["up"] is True
    assert rows["bob"]["link"]["broken"] is False
    wait_until("speeds", lambda: all(row["decode_us"] for row in ann.get("/api/peers")["peers"]), [ann], 20)
    assert all(row["prefill_us"] > 0 for row in ann.get("/api/peers")["peers"])
    wait_until(
        "a round trip",
        lambda: any((row["link"] or {}).get("round_trip_us") for row in ann.get("/api/peers")["peers"]),
        [ann],
        20,
    )
    assert all(loaded["speed"]["decode_us"] > 0 for loaded in ann.status()["spans"])
    assert "µs" in meshinfer("status", "--home", ann.home)
