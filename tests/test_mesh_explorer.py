"""Every interleaving of two to four agents: never a broken promise, and always a way to agreement.

If one of these failed, there would be an order of perfectly ordinary events (who hears of whom first, who dies when)
after which an office promises memory twice, asks under a plan that nobody serves, or never agrees again.
"""

from __future__ import annotations

from typing import Any

import pytest
from mesh_explorer import Explorer
from mesh_samples import advert, model

from meshinfer import limits
from meshinfer.mesh.promises import Promises
from meshinfer.values import Advert

FACTS = model(layers=4)

HALF_MIB = 26
"""Room for two of the four layers."""
ONE_LAYER_MIB = 14
ALL_MIB = 60


def agents(*capacities_mib: int) -> tuple[Advert, ...]:
    """The first has the model whole and wants it."""
    first, *others = capacities_mib
    return (
        advert(1, first, whole=FACTS.model, wants=FACTS.model),
        *(advert(number, size, partial=FACTS.model) for number, size in enumerate(others, start=2)),
    )


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plan is kept for a while in the hope that it is whole again: here the while is over at any moment."""
    monkeypatch.setattr(limits, "KEEP_BROKEN_S", 0.0)


@pytest.mark.parametrize(
    ("capacities", "bounds"),
    [
        pytest.param((30, 30), {"crashes": 1, "returns": 1, "losses": 1}, id="two that need each other"),
        pytest.param(
            (ALL_MIB, 30), {"crashes": 1, "returns": 1, "losses": 1}, id="two, one could do it alone"
        ),
        pytest.param((HALF_MIB, HALF_MIB, 8), {"loading": False, "crashes": 1}, id="two and a bystander"),
        pytest.param(
            (HALF_MIB, ONE_LAYER_MIB, ONE_LAYER_MIB), {"loading": False, "crashes": 1}, id="all three"
        ),
        pytest.param((HALF_MIB,) * 3, {"loading": False, "met": True, "crashes": 1}, id="any two of three"),
        pytest.param((HALF_MIB,) * 3, {"loading": False, "rounds": 1}, id="any two of three, cold"),
        pytest.param((HALF_MIB, *(ONE_LAYER_MIB,) * 3), {"loading": False, "met": True}, id="all four"),
    ],
)
def test_no_order_of_events_breaks_a_promise_or_ends_without_agreement(
    capacities: tuple[int, ...], bounds: dict[str, Any]
) -> None:
    found = Explorer(agents(*capacities), FACTS, **bounds).run()
    assert found.violations == ()
    assert found.stuck == 0
    assert found.converged > 0
    assert found.states > 100
    assert not found.cut or "rounds" in bounds


def test_an_agent_that_comes_back_to_old_rounds_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Promises, "is_later", lambda _self, _plan: True)
    monkeypatch.setattr(
        Promises, "round", property(lambda _self: 0, lambda _self, _round: None), raising=False
    )
    found = Explorer(agents(30, 30), FACTS, loading=False, losses=1, most=20_000).run()
    assert any("accepts a plan of round" in violation for violation in found.violations)


def test_an_agent_that_promises_its_memory_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Promises, "fits", lambda _self, _plans, _own: True)
    monkeypatch.setattr(
        "meshinfer.mesh.agreement.Agreement._drop_others", lambda *_arguments: None, raising=True
    )
    found = Explorer(
        agents(HALF_MIB, HALF_MIB, HALF_MIB), FACTS, loading=False, losses=1, met=True, rounds=1
    ).run()
    assert any("promises more memory" in violation for violation in found.violations)
