"""The simulation would notice: each rule that safety rests on is broken here, and must be missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulation import run
from simulation.run import Task
from simulation.truth import Violation

from meshinfer.mesh.agreement import Agreement
from meshinfer.mesh.picture import Picture
from meshinfer.mesh.promises import Promises
from meshinfer.values import Plan, PlanId

SEEDS = 60
"""Each mutation must be noticed within so many."""


def _accepts_twice_in_a_round(patch: pytest.MonkeyPatch) -> str:
    """Rounds neither grow with what was accepted nor are looked at."""
    patch.setattr(Picture, "floor", lambda self, peer: 0)
    patch.setattr(Promises, "is_later", lambda self, plan: True)
    return "accepts two plans of round"


def _uses_a_plan_before_all_have_accepted(patch: pytest.MonkeyPatch) -> str:
    def any_ready(self: Picture, identity: PlanId) -> bool:
        return any(self.readiness(self.plan(identity), peer) for peer in self.plan(identity).owners)

    patch.setattr(Picture, "ready", any_ready)
    return "which pc"


def _accepts_whatever_names_it(patch: pytest.MonkeyPatch) -> str:
    def all_named(self: Agreement, allocation: object) -> list[Plan]:
        known = [self.picture.plan(one) for one in sorted(self.picture.naming(self.me))]
        return sorted(known, key=lambda plan: plan.round)

    patch.setattr(Agreement, "acceptable", all_named)
    return "which nobody computed"


def _promises_memory_twice(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Promises, "fits", lambda self, plans, own: True)
    return "promises"


def _loads_before_all_have_accepted(patch: pytest.MonkeyPatch) -> str:
    go_on = Promises.go_on
    patch.setattr(Promises, "go_on", lambda self, held, effects: go_on(self, lambda identity: True, effects))
    return "before all owners have accepted"


@pytest.mark.parametrize(
    "mutate",
    [
        _accepts_twice_in_a_round,
        _uses_a_plan_before_all_have_accepted,
        _accepts_whatever_names_it,
        _promises_memory_twice,
        _loads_before_all_have_accepted,
    ],
)
def test_a_broken_rule_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = mutate(monkeypatch)
    with pytest.raises(Violation, match=expected):
        _run_seeds(SEEDS)


def test_an_unbroken_mesh_is_not_blamed() -> None:
    _run_seeds(5)


def _run_seeds(count: int) -> None:
    """The first violation is raised."""
    for seed in range(count):
        begun = run.Run(Task(seed, 4 + seed % 5, "harsh"), strict=True)
        _let_one_forge(begun)
        begun.to_its_end()


def _let_one_forge(begun: run.Run) -> None:
    """One agent names others in plans that nobody computed: whoever checks accepts none of them."""
    first, *_, last = begun.world.pcs
    last.forging, last.holdings = True, first.holdings
