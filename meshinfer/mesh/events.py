"""What happens to ownership, and what it asks the agent to do."""

from __future__ import annotations

from dataclasses import dataclass

from meshinfer.values import Advert, ModelFacts, ModelId, PeerId, Plan, PlanId, Span, Standing

# ── events ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AdvertHeard:
    """A peer of the roster said this; its signature has been verified."""

    advert: Advert


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer said goodbye. A broken connection is no goodbye: silence tells about that."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class SelfChanged:
    """This agent's own advert has changed, in anything but its standing."""

    advert: Advert


@dataclass(frozen=True, slots=True)
class ModelKnown:
    """This agent has a model's manifest. It lists the model among its holdings from then on."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The span is loaded and warm: a step that comes now is served."""

    plan: PlanId


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A span could not be fetched or loaded, or runs no more. `sentence` says why, for a person."""

    plan: PlanId
    sentence: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = AdvertHeard | PeerLeft | SelfChanged | ModelKnown | LoadDone | LoadFailed | Tick

# ── effects ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Publish:
    """Send a new version of the own advert with this standing, at once."""

    standing: Standing | None


@dataclass(frozen=True, slots=True)
class NeedModel:
    """Fetch this model's manifest from one of these peers, complete holders first; then report ModelKnown.

    Repeated while it is missing: who is fetching already ignores it.
    """

    model: ModelId
    sources: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch what is missing of this span, load it and warm it; then report LoadDone or LoadFailed."""

    plan: Plan
    span: Span
    device: str
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Stop loading or serving under this plan and give its memory back, before any effect that follows."""

    plan: PlanId


@dataclass(frozen=True, slots=True)
class PlanUsable:
    """All owners are ready: questions may be asked under this plan, and under no other."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanUnusable:
    """No question can be asked now; the sentence says why, and is sent again when the reason changes."""

    reason: str


Effect = Publish | NeedModel | Load | Unload | PlanUsable | PlanUnusable
