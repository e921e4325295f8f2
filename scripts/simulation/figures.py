"""What a run came to, for programs and for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from simulation.goal import usable_plans

if TYPE_CHECKING:
    from simulation.run import Run

_LISTS = ("command", "violated", "removed_falsely", "unrest", "story", "unmet")

SHOWN = 20
"""Sentences of each kind that are kept: the first ones tell, the others follow from them."""


@dataclass(slots=True)
class Figures:
    """`violations` and `false_removals` are counts; what they were is in `violated` and `removed_falsely`."""

    seed: int
    agents: int
    faults: str
    seconds: float
    command: str
    violations: int
    converged: bool
    converge_s: float | None
    false_removals: int
    messages_per_agent_s: float
    bytes_per_agent_s: float
    virtual_s: float
    virtual_per_real: float
    virtual_per_cpu: float
    events: int
    faults_made: int
    plans: int
    plan_changes: int
    running: int
    violated: list[str] = field(default_factory=list)
    removed_falsely: list[str] = field(default_factory=list)
    unrest: str | None = None
    story: list[str] = field(default_factory=list)
    """Faults, one after the other."""
    unmet: list[str] = field(default_factory=list)
    """What a scenario expected, and what was not so."""

    @property
    def passed(self) -> bool:
        return self.violations == 0 and self.converged and not self.unmet

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "story"}

    def sentence(self) -> str:
        """Why it did not pass."""
        reasons = [*self.violated, *self.unmet]
        if not self.converged:
            reasons.append(f"not at rest in the end: {self.unrest}")
        return "; ".join(reasons) or "passed"

    def show(self, console: Console) -> None:
        table = Table(title=self.command, title_justify="left", show_header=False)
        for name, value in self.as_json().items():
            if name not in _LISTS:
                table.add_row(name.replace("_", " "), _text(value))
        console.print(table)
        for sentence in (*self.violated, *self.removed_falsely, *self.unmet):
            console.print(sentence, style="red", highlight=False)
        if not self.converged:
            console.print(f"not at rest in the end: {self.unrest}", style="red", highlight=False)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def collect(run: Run, real_s: float, cpu_s: float) -> Figures:
    world, task, faults = run.world, run.task, run.faults
    lives = list(world.all_lives())
    agent_s = max(sum(lived_s for lived_s, _ in lives), 1e-9)
    truth = world.truth
    removals = [f"at {one.at_s} s: {one.by} removed {one.of}" for one in truth.false_removals]
    return Figures(
        seed=task.seed,
        agents=task.agents,
        faults=task.faults,
        seconds=run.seconds,
        command=task.command,
        violations=len(truth.violations),
        converged=run.rest_at is not None,
        converge_s=None if run.rest_at is None else round(max(0.0, run.rest_at - faults.last_at), 3),
        false_removals=len(removals),
        messages_per_agent_s=round(world.network.messages / agent_s, 3),
        bytes_per_agent_s=round(world.network.bytes / agent_s, 1),
        virtual_s=round(world.clock.elapsed_s, 3),
        virtual_per_real=round(world.clock.elapsed_s / max(real_s, 1e-9), 2),
        virtual_per_cpu=round(world.clock.elapsed_s / max(cpu_s, 1e-9), 2),
        events=world.clock.events,
        faults_made=faults.count,
        plans=len(usable_plans(world)),
        plan_changes=sum(changes for _, changes in lives),
        running=len(world.processes),
        violated=truth.violations[:SHOWN],
        removed_falsely=removals[:SHOWN],
        story=faults.story,
        unrest=run.reason if run.rest_at is None else None,
    )
