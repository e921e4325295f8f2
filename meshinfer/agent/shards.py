"""The shards that are loaded on this PC, and the plans that they serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshinfer.agent.pace import Pace
from meshinfer.engine.shard import PagedShard
from meshinfer.engine.speed import Speed
from meshinfer.mesh.plan import shard_of
from meshinfer.values import PeerId, Plan, PlanId, ShardKey

KvSequence = tuple[PeerId, int]
"""A sequence as a shard knows it: its asker, and the asker's number for it."""


@dataclass(slots=True, eq=False)
class Loaded:
    """One shard that is loaded and warm. Plans that name it share it, and its KV."""

    key: ShardKey
    shard: PagedShard
    layers: float
    """Its work, in layers of average size."""
    speed: Speed
    pace: Pace
    stepped: dict[KvSequence, PlanId] = field(default_factory=dict)
    """Sequences that may have KV here, each with the plan under which it was stepped last."""

    def held_under(self, plan: PlanId) -> list[KvSequence]:
        """Sequences that have KV here and were stepped under the plan last."""
        held = set(self.shard.sequences)
        return [sequence for sequence, last in self.stepped.items() if last == plan and sequence in held]

    def forget_gone(self) -> None:
        """Those whose KV was freed without their asker's word: their lease ran out, or a step broke them."""
        held = set(self.shard.sequences)
        self.stepped = {sequence: plan for sequence, plan in self.stepped.items() if sequence in held}


@dataclass(slots=True, eq=False)
class Served:
    """A plan under which steps are taken, and the shards of this agent that serve it."""

    plan: Plan
    shards: dict[ShardKey, Loaded]
    stepped_at: float
    under_way: int = 0
    by_hop: dict[int, Loaded] = field(default_factory=dict)
    """Those that are a whole owner's span."""

    def use(self, shards: dict[ShardKey, Loaded]) -> None:
        self.shards = shards
        keys = [shard_of(self.plan, owner) for owner in self.plan.assignments]
        self.by_hop = {hop: shards[key] for hop, key in enumerate(keys) if key in shards}
