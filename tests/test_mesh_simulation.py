"""A mesh under whatever may go wrong in an office: no promise is broken, and it comes to rest when the faults end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation import run, scenarios
from simulation.run import Task

ROOT = Path(__file__).resolve().parent.parent
SEEDS = 500
SEEDS_EACH = 10


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_EACH))
def test_whatever_goes_wrong_promises_are_kept_and_the_mesh_comes_to_rest(first: int) -> None:
    failed = []
    for seed in range(first, first + SEEDS_EACH):
        figures = run.run(run.harsh(seed))
        if not figures.passed or figures.false_removals:
            failed.append(f"{figures.command}\n    {figures.sentence()} {figures.removed_falsely}")
    assert not failed, "run again:\n" + "\n".join(failed)


def test_a_run_is_replayed_by_its_command_in_any_process() -> None:
    """The order in which Python walks sets differs from process to process, and must not matter."""
    task = Task(17, 7, "harsh", 8.0)
    mine = run.run(task).as_json()
    command = [sys.executable, *task.command.split()[1:], "--json"]
    replayed = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "5"}, capture_output=True, check=True
    )
    theirs = json.loads(replayed.stdout)
    timed = {"virtual_per_real", "virtual_per_cpu"}
    assert {name: mine[name] for name in mine.keys() - timed} == {
        name: theirs[name] for name in theirs.keys() - timed
    }
    assert run.run(Task(18, 7, "harsh", 8.0)).events != mine["events"]


@pytest.mark.parametrize("faults", ["none", "churn", "loss20"])
def test_a_milder_office_is_no_trouble(faults: str) -> None:
    figures = run.run(Task(1, 12, faults, 20.0))
    assert figures.passed, figures.sentence()
    assert figures.converge_s is not None
    assert figures.converge_s < 10.0
    assert figures.false_removals == 0


@pytest.mark.parametrize(
    ("name", "seconds"), [("cold", 20.0), ("crash10", 20.0), ("bystanders", 20.0), ("loss20", 40.0)]
)
def test_stories_of_a_mesh_that_is_too_large_for_all_to_watch_all(name: str, seconds: float) -> None:
    figures = scenarios.play(name, 3, 24, seconds, lambda done, total: None)
    assert figures.passed, f"{figures.command}: {figures.sentence()}"


def test_an_agent_restarted_ten_times_in_a_minute_ends_in_a_plan() -> None:
    begun = run.Run(Task(1, 3, "none"))
    begun.go_on(8.0)
    for _ in range(10):
        begun.world.kill(begun.world.pcs[1])
        begun.world.start(begun.world.pcs[1])
        begun.go_on(6.0)
    begun.faults.last_at = begun.world.clock.now
    begun.settle()
    figures = begun.figures()
    assert figures.passed, figures.sentence()
    assert figures.plans > 0


def test_the_script_says_what_failed_and_how_to_run_it_again(tmp_path: Path) -> None:
    """One agent alone cannot have removed anybody; a bad argument is refused, and a run tells its figures."""
    script = [sys.executable, str(ROOT / "scripts" / "simulate.py"), "--seconds", "5"]
    told = subprocess.run([*script, "--agents", "2", "--json"], capture_output=True, text=True, cwd=tmp_path)
    figures = json.loads(told.stdout)
    assert told.returncode == 0
    assert figures["violations"] == 0
    assert figures["converged"] is True
    assert told.stderr == ""
    table = subprocess.run([*script, "--agents", "2"], capture_output=True, text=True, cwd=tmp_path)
    assert "messages per agent" in table.stdout
    refused = subprocess.run([*script, "--agents", "0"], capture_output=True, text=True, cwd=tmp_path)
    assert refused.returncode == 2
    assert "at least one agent" in refused.stderr
