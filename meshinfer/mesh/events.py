"""What happens to an agent's part of the mesh, and what it asks the agent to do."""

from __future__ import annotations

from dataclasses import dataclass

from meshinfer.values import Advert, ModelFacts, ModelId, PeerId, Plan, PlanId, ShardKey
from meshinfer.wire.messages import Heartbeat, Summary

# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LinkUp:
    """This agent's own control connection to a peer of the roster stands."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkDown:
    """It has broken, or its far end gave no sign of life. A starved peer still has its links: libzmq answers."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class HeartbeatHeard:
    peer: PeerId
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class AdvertsHeard:
    """`peer` sent these; their authors are of the roster, and the signatures have been verified."""

    peer: PeerId
    adverts: tuple[Advert, ...]


@dataclass(frozen=True, slots=True)
class SummaryHeard:
    peer: PeerId
    summary: Summary


@dataclass(frozen=True, slots=True)
class BandwidthMeasured:
    """To a peer, in kbit/s."""

    peer: PeerId
    kbit_s: int


@dataclass(frozen=True, slots=True)
class SelfChanged:
    """This agent's portrait has changed. What the mesh itself says of it (`version`, `links`, `broken`, `doubts`,
    `round`, `standings`, `leaving`) counts for nothing here."""

    portrait: Advert


@dataclass(frozen=True, slots=True)
class ModelKnown:
    """This agent has a model's manifest. It lists the model among its holdings from then on."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The shard is loaded and warm: a step that comes now is served."""

    shard: ShardKey


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A shard could not be fetched or loaded, or runs no more; its memory is free. `sentence` says why, to a person."""

    shard: ShardKey
    sentence: str


@dataclass(frozen=True, slots=True)
class PlanIdle:
    """No answer is under way here under this plan: one that has been replaced may be let go of."""

    plan: PlanId


@dataclass(frozen=True, slots=True)
class Leave:
    """This agent is about to stop."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    LinkUp
    | LinkDown
    | HeartbeatHeard
    | AdvertsHeard
    | SummaryHeard
    | BandwidthMeasured
    | SelfChanged
    | ModelKnown
    | LoadDone
    | LoadFailed
    | PlanIdle
    | Leave
    | Tick
)

# ── effects ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    peer: PeerId
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class SendAdverts:
    """To each of these peers, whose links are up: the newest adverts of these authors, this agent itself perhaps
    among them, as `adverts` says. What is lost on the way comes again, by summaries."""

    peers: tuple[PeerId, ...]
    adverts: tuple[Advert, ...]


@dataclass(frozen=True, slots=True)
class SendSummary:
    peer: PeerId
    summary: Summary


@dataclass(frozen=True, slots=True)
class Watch:
    """Keep links to these peers (said again whenever it changes); to others they may be closed."""

    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class NeedModel:
    """Fetch this model's manifest from one of these peers, complete holders first; then report ModelKnown.

    Repeated while it is missing: who is fetching already ignores it.
    """

    model: ModelId
    sources: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch what is missing of this shard, load it and warm it; then report LoadDone or LoadFailed."""

    shard: ShardKey


@dataclass(frozen=True, slots=True)
class Unload:
    """Stop loading this shard, or give its memory back, before any effect that follows. No plan is served by it."""

    shard: ShardKey


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve steps under this plan from now on, with these shards, which are loaded. Said again with more of them when a
    standby's has been loaded too."""

    plan: Plan
    shards: tuple[ShardKey, ...]


@dataclass(frozen=True, slots=True)
class Retire:
    """Serve no step under this plan any more; its shards may serve another."""

    plan: PlanId


@dataclass(frozen=True, slots=True)
class PlanUsable:
    """All owners are ready: new questions are asked under this plan. Answers under an earlier one may go on while its
    owners serve it."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanUnusable:
    """No question can be asked now; the sentence says why, and is sent again when the reason changes."""

    reason: str


Effect = (
    SendHeartbeat
    | SendAdverts
    | SendSummary
    | Watch
    | NeedModel
    | Load
    | Unload
    | Serve
    | Retire
    | PlanUsable
    | PlanUnusable
)
