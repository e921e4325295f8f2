"""Runs a mesh of real agents' machines in one process under virtual time, and checks its invariants after each event.

    python scripts/simulate.py [--agents N] [--seconds T] [--seed S] [--faults PROFILE | --scenario NAME] [--json]

Everything follows from the arguments: a run that failed is repeated by them. Exit code 1 when an invariant did not
hold, the mesh did not come to rest after the last fault, or a scenario did not go as it should.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from simulation import run, scenarios
from simulation.profiles import PROFILES

BAR_AFTER_S = 2.0
"""A run that is shorter needs no bar."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A mesh in one process under virtual time.")
    parser.add_argument("--agents", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seconds", type=float, help="virtual seconds of faults (default: the profile's)")
    parser.add_argument("--seed", type=int, default=0, help="what all choices come from (default: 0)")
    parser.add_argument(
        "--faults", choices=sorted(PROFILES), default="none", help="what goes wrong (default: none)"
    )
    parser.add_argument(
        "--scenario", choices=sorted(scenarios.SCENARIOS), help="a story with an expected end"
    )
    parser.add_argument("--json", action="store_true", help="figures for programs")
    parser.add_argument("--story", action="store_true", help="tell what went wrong when, on standard error")
    parser.add_argument(
        "--strict", action="store_true", help="stop with a traceback where an invariant fails first"
    )
    given = parser.parse_args()
    if given.agents < 1 or (given.seconds is not None and given.seconds <= 0):
        parser.error("there must be at least one agent, and more than no time")
    return given


@contextmanager
def bar() -> Iterator[Callable[[float, float], None]]:
    """A progress bar on standard error: only on a terminal, and only once a run has taken a while."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("virtual time"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with ExitStack() as shown:
        progress = Progress(*columns, console=console, transient=True)
        task = progress.add_task("run")
        began = time.monotonic()

        def show(done: float, total: float) -> None:
            if not progress.live.is_started:
                if time.monotonic() - began < BAR_AFTER_S:
                    return
                shown.enter_context(progress)
            progress.update(task, completed=done, total=total)

        yield show


def main() -> int:
    given = arguments()
    with bar() as show:
        if given.scenario is not None:
            figures = scenarios.play(
                given.scenario, given.seed, given.agents, given.seconds, show, strict=given.strict
            )
        else:
            task = run.Task(given.seed, given.agents, given.faults, given.seconds)
            figures = run.run(task, show, strict=given.strict)
    if given.story:
        print("\n".join(figures.story), file=sys.stderr)
    if given.json:
        print(json.dumps(figures.as_json()))
    else:
        figures.show(Console())
    return 0 if figures.passed else 1


if __name__ == "__main__":
    sys.exit(main())
