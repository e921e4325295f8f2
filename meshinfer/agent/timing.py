"""Where an answer's time went: from the traces that its steps brought back to a line per stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from meshinfer.answer.question import StageStats
from meshinfer.values import PeerId, Plan
from meshinfer.wire.messages import HopTrace


@dataclass(frozen=True, slots=True)
class StepPassed:
    """One step: microseconds from sending it to its result, and what each owner measured."""

    total_us: int
    trace: tuple[HopTrace, ...]

    @property
    def hop_us(self) -> float:
        """What was neither waiting nor computing, shared out evenly: N owners make N + 1 hops, and clocks of different
        PCs cannot tell them apart."""
        spent = sum(hop.queue_us + hop.compute_us for hop in self.trace)
        return max(0.0, (self.total_us - spent) / (len(self.trace) + 1))


def route_stats(
    plan: Plan, steps: Sequence[StepPassed], name_of: Callable[[PeerId], str]
) -> tuple[StageStats, ...]:
    """A line per owner; those that an answer went through before a change of plan are left out."""
    known = [step for step in steps if len(step.trace) == len(plan.assignments)]
    if not known:
        return ()
    hop_ms = median(step.hop_us for step in known) / 1000
    return tuple(
        StageStats(
            peer=assignment.peer,
            name=name_of(assignment.peer),
            span=assignment.span,
            device=assignment.device,
            hops=len(known),
            step_ms_p50=median(step.trace[index].compute_us for step in known) / 1000,
            queue_ms_p50=median(step.trace[index].queue_us for step in known) / 1000,
            hop_ms_p50=hop_ms,
        )
        for index, assignment in enumerate(plan.assignments)
    )
