"""What an allocation is computed from: one cell, its peers, and the plans that touch it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshinfer.mesh.cells import Cell
from meshinfer.mesh.picture import Picture
from meshinfer.mesh.placement import Candidate, Costs
from meshinfer.values import Advert, ModelFacts, ModelId, PeerId, PlanId


@dataclass(frozen=True)
class Scene:
    """What an allocation is computed from. `peers` are those of the cell who are here, `rules` how this agent computes;
    `ripe` are held plans for which something better has been possible for long enough."""

    picture: Picture
    cell: Cell
    peers: tuple[PeerId, ...]
    rules: int
    model: ModelId
    models: Mapping[ModelId, ModelFacts]
    costs: Costs
    ripe: frozenset[PlanId] = frozenset()

    @cached_property
    def able(self) -> dict[PeerId, Candidate]:
        """Peers that could own layers of the model, and that no doubt leaves out; see `_able`."""
        return _able(self, in_doubt=False)

    @cached_property
    def in_doubt(self) -> dict[PeerId, Candidate]:
        """Those that could, were it not for doubts."""
        return _able(self, in_doubt=True) if self.picture.left_out() else {}

    @cached_property
    def touching(self) -> frozenset[PlanId]:
        """Plans that name one of the cell's peers, and that somebody stands by."""
        picture = self.picture
        return frozenset(filter(picture.is_promised, set().union(*map(picture.naming, self.peers))))


def _able(scene: Scene, in_doubt: bool) -> dict[PeerId, Candidate]:
    """Peers that plan by the same rules, have the model's manifest and some memory, and did not just fail to load it:
    those that no doubt leaves out, or, with `in_doubt`, the others.

    One that has not run a layer yet counts as the middle one of the cell, whoever of the others is taken already: else
    plans would change while their neighbours are being accepted.
    """
    picture, model = scene.picture, scene.model
    out = picture.left_out()
    if in_doubt and not out:
        return {}
    adverts: list[Advert] = []
    for peer in scene.peers:
        advert = picture.get(peer)
        if (
            advert is not None
            and advert.rules == scene.rules
            and advert.capacity_bytes > 0
            and (peer in out) == in_doubt
            and picture.has_manifest(peer, model)
            and not picture.failed(peer, model)
        ):
            adverts.append(advert)
    decode_us = _middle([advert.decode_us for advert in adverts])
    prefill_us = _middle([advert.prefill_us for advert in adverts])
    return {advert.peer: Candidate.of(advert, decode_us, prefill_us) for advert in adverts}


def _middle(speeds: Iterable[int]) -> int:
    known = sorted(filter(None, speeds))
    return known[(len(known) - 1) // 2] if known else 0
