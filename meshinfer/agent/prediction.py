"""What a plan's route is expected to take now: by what its owners say of their speeds and links today.

A plan is computed from what was known then, and a first one before anybody has run a layer; that figure (the plan's own
`predicted_us`) is what plans are compared by, and this one is what measurements are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from meshinfer.mesh.hops import Hops
from meshinfer.mesh.plan import facts_of
from meshinfer.values import Advert, Assignment, ModelFacts, PeerId, Plan


@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds of one token: of each owner for its span, None for one that has not measured itself, and of the hops
    from the asker through the owners back to it."""

    owners_us: tuple[int | None, ...]
    hops_us: tuple[int, ...]

    @property
    def total_us(self) -> int | None:
        known_us = [us for us in self.owners_us if us is not None]
        return sum(known_us) + sum(self.hops_us) if len(known_us) == len(self.owners_us) else None


def predict(
    plan: Plan,
    facts: ModelFacts | None,
    asker: PeerId,
    advert_of: Callable[[PeerId], Advert | None],
    hops: Hops,
) -> Prediction:
    """For an asker that may own a span itself. Without the model's facts, all layers count as equal."""
    stations = (asker, *plan.owners, asker)
    return Prediction(
        tuple(
            _span_us(_decode_us(plan, owner, advert_of(owner.peer)), owner, facts)
            for owner in plan.assignments
        ),
        # Where a link is broken the route is about to change, and until then it costs what it did.
        tuple(Hops(hops.us).between(*pair) or 0 for pair in pairwise(stations)),
    )


def _decode_us(plan: Plan, owner: Assignment, advert: Advert | None) -> int:
    """0 while nobody knows. A peer's speed is that for the model that the mesh serves."""
    then = facts_of(plan, owner.peer)
    return (advert.decode_us if advert is not None else 0) or (then.decode_us if then is not None else 0)


def _span_us(decode_us: int, owner: Assignment, facts: ModelFacts | None) -> int | None:
    """A speed is for the average layer; a layer takes as long as its bytes are many."""
    if not decode_us:
        return None
    sizes = () if facts is None else facts.layer_bytes
    whole = sum(sizes)
    if not whole:
        return decode_us * len(owner.span)
    return decode_us * len(sizes) * sum(sizes[owner.span.first : owner.span.last]) // whole
