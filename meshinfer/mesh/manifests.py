"""Whom to ask for the manifest of the model that the mesh serves, and when to ask another."""

from __future__ import annotations

from meshinfer import limits
from meshinfer.mesh.events import NeedModel
from meshinfer.values import ModelId, PeerId


class Manifests:
    """Each time it has not come, the next source goes first: the one that was asked may be out of reach."""

    def __init__(self) -> None:
        self._model: ModelId | None = None
        self._times = 0
        self.ask_again_at: float | None = None

    def ask(self, model: ModelId | None, sources: tuple[PeerId, ...], now: float) -> NeedModel | None:
        """The model is None where there is none, or its manifest is here."""
        if model is None or not sources:
            self._model = self.ask_again_at = None
            return None
        if model != self._model or self.ask_again_at is None:
            self._model, self._times = model, 0
        elif self.ask_again_at <= now:
            self._times += 1
        else:
            return None
        self.ask_again_at = now + limits.NEED_AGAIN_S
        first = self._times % len(sources)
        return NeedModel(model, (*sources[first:], *sources[:first]))
