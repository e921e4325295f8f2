"""Where an answer's time went: from the traces that its steps brought back to a line per stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from meshinfer.answer.question import StageStats
from meshinfer.values import PeerId, Plan, PlanId
from meshinfer.wire.messages import HopTrace

_ROUTES: Final = 8
"""Plans whose recent steps are kept, the newest ones: an asker goes back to few."""

_STEPS: Final = 256
"""Steps kept of each: a few seconds of decoding, about 40 KB for a route of four owners."""


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


@dataclass(frozen=True, slots=True)
class RouteTimes:
    """Medians over an asker's recent tokens, microseconds; `compute_us` and `queue_us` owner by owner."""

    steps: int
    total_us: int
    hop_us: int
    compute_us: tuple[int, ...]
    queue_us: tuple[int, ...]


class Routes:
    """What tokens lately took along each plan's route, as the asker here saw it."""

    def __init__(self) -> None:
        self._recent: dict[PlanId, deque[StepPassed]] = {}

    def note(self, plan: PlanId, passed: StepPassed) -> None:
        """A step of single tokens; steps of prompts are something else."""
        recent = self._recent.get(plan)
        if recent is None:
            while len(self._recent) >= _ROUTES:
                del self._recent[next(iter(self._recent))]
            recent = self._recent[plan] = deque(maxlen=_STEPS)
        recent.append(passed)

    def times(self, plan: PlanId) -> RouteTimes | None:
        """None for a route that no token has passed."""
        recent = self._recent.get(plan)
        if not recent:
            return None
        traces = list(zip(*[passed.trace for passed in recent], strict=True))
        return RouteTimes(
            steps=len(recent),
            total_us=round(median(passed.total_us for passed in recent)),
            hop_us=round(median(passed.hop_us for passed in recent)),
            compute_us=tuple(round(median(hop.compute_us for hop in hops)) for hops in traces),
            queue_us=tuple(round(median(hop.queue_us for hop in hops)) for hops in traces),
        )
