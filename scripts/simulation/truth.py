"""What really happened, kept by the simulator, and the invariants that are checked against it after every event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshinfer.mesh.plan import plan_id, shards_of
from meshinfer.values import (
    Advert,
    ModelFacts,
    PeerId,
    Plan,
    PlanId,
    Precision,
    Readiness,
    ShardKey,
    Standing,
)
from simulation.process import STARVED_S, Process

if TYPE_CHECKING:
    from simulation.world import World

CALM_S = 4.5
"""Nobody may be removed who was alive and reachable, and has been for so long. A link that breaks by a fault may take
2.2 s to be found dead, and as long to be tried again once the fault is over."""

Life = tuple[PeerId, int]
"""A peer and its incarnation: what another incarnation said does not count."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Removal:
    at_s: float
    by: str
    of: str


class Truth:
    """Plans as they were accepted, by whom, and how far; removals from views; violations.

    With `strict` the first violation is raised, so that a debugger stops where it happens.
    """

    def __init__(self, world: World, strict: bool) -> None:
        self._world = world
        self._strict = strict
        self.violations: list[str] = []
        self.false_removals: list[Removal] = []
        self.removed: dict[PeerId, int] = {}
        """How often each peer was removed from somebody's view."""
        self.checks = 0
        self.forged: set[PlanId] = set()
        """Plans that nobody computed."""
        self.accepted: dict[PlanId, set[Life]] = {}
        self.ready: dict[PlanId, set[Life]] = {}
        self._rounds: dict[Life, dict[int, PlanId]] = {}
        self._standing: dict[Life, dict[PlanId, Standing]] = {}
        self._dropped: dict[Life, set[PlanId]] = {}
        self._said: dict[tuple[PeerId, int, int], Advert] = {}
        self._loads: list[ShardKey] = []
        self._bytes: dict[tuple[ShardKey, Precision], int] = {}

    def violated(self, process: Process | None, what: str) -> None:
        who = "" if process is None else f"{process.pc.name}: "
        sentence = f"at {self._world.clock.elapsed_s:.3f} s: {who}{what}"
        self.violations.append(sentence)
        if self._strict:
            raise Violation(sentence)

    # ── what processes do ───────────────────────────────────────────────────────────────────────────────────
    def published(self, process: Process, advert: Advert) -> None:
        """One version has one content, for everybody."""
        key = (advert.peer, advert.incarnation, advert.version)
        known = self._said.setdefault(key, advert)
        if known is not advert and known != advert:
            self.violated(process, f"published two different adverts as version {advert.version}")
        if advert.incarnation < process.pc.incarnation:
            self.violated(process, "published an advert of a former life")

    def loads(self, process: Process, shard: ShardKey) -> None:
        if shard in process.shards:
            self.violated(process, f"loads layers {shard.span} a second time")
        self._loads.append(shard)

    def unloads(self, process: Process, shard: ShardKey) -> None:
        if shard not in process.shards:
            self.violated(process, f"unloads layers {shard.span}, which were not loaded")

    def uses(self, process: Process, plan: Plan) -> None:
        """Called when an agent begins to use a plan: all its owners must have said that they are ready."""
        plan_hash = plan_id(plan)
        self._note_standings(process)
        owners = set(plan.owners)
        for facts in plan.inputs:
            life = (facts.peer, facts.incarnation)
            if facts.peer not in owners:
                continue
            name = self._world.by_peer[facts.peer].name
            if life not in self.accepted.get(plan_hash, ()):
                self.violated(process, f"uses plan {plan_hash[:8]}, which {name} did not accept")
            elif life not in self.ready.get(plan_hash, ()):
                self.violated(process, f"uses plan {plan_hash[:8]} before {name} was ready")

    # ── after every event ───────────────────────────────────────────────────────────────────────────────────
    def check(self, process: Process, due: float | None) -> None:
        self.checks += 1
        if due is not None and due <= self._world.clock.now:
            late_s = self._world.clock.now - due
            self.violated(process, f"wants to be run {late_s:.6f} s ago: the agent would spin")
        if process.deaf:
            pass  # what it says of plans binds nobody
        elif self._note_standings(process) or process.touched:
            process.touched = False
            self._check_promises(process)
        self._note_view(process)

    def _note_standings(self, process: Process) -> bool:
        """Take in what the machine stands by now; False if that is what it was."""
        own = process.machine.own
        life = (process.me, own.incarnation)
        if process.seen_standings is own.standings:
            return False
        process.seen_standings = own.standings
        before = self._standing.get(life, {})
        standing = {plan_id(one.plan): one for one in own.standings if one.readiness is not Readiness.FAILED}
        self._standing[life] = standing
        self._dropped.setdefault(life, set()).update(before.keys() - standing.keys())
        for plan_hash, one in standing.items():
            if plan_hash not in before:
                self._accepts(process, life, plan_hash, one.plan)
            if one.readiness is Readiness.READY:
                self.ready.setdefault(plan_hash, set()).add(life)
        return True

    def _accepts(self, process: Process, life: Life, plan_hash: PlanId, plan: Plan) -> None:
        self.accepted.setdefault(plan_hash, set()).add(life)
        if plan_hash in self._dropped[life]:
            self.violated(process, f"accepts plan {plan_hash[:8]} again, which it had dropped")
        rounds = self._rounds.setdefault(life, {})
        if rounds.setdefault(plan.round, plan_hash) != plan_hash:
            self.violated(process, f"accepts two plans of round {plan.round}")
        if plan.round < max(rounds):
            self.violated(process, f"accepts a plan of round {plan.round} after one of round {max(rounds)}")
        if plan_hash in self.forged:
            self.violated(process, f"accepts plan {plan_hash[:8]}, which nobody computed")
        facts = next((one for one in plan.inputs if one.peer == process.me), None)
        if facts is None:
            self.violated(process, f"accepts plan {plan_hash[:8]}, which does not name it")
        elif facts.incarnation != life[1]:
            self.violated(process, f"accepts plan {plan_hash[:8]}, which names another incarnation of it")

    def _check_promises(self, process: Process) -> None:
        """Memory, loads, and what is served, against what this process stands by."""
        own = process.machine.own
        standing = self._standing.get((process.me, own.incarnation), {})
        promised = {shard for one in standing.values() for shard in shards_of(one.plan, process.me)}
        needed = sum(self.shard_bytes(shard, own.precision) for shard in promised | process.shards.keys())
        if needed > own.capacity_bytes:
            self.violated(process, f"promises {needed} bytes and has {own.capacity_bytes}")
        for shard in self._loads:
            # One that was called off in the same breath was never begun.
            if shard in process.shards and not any(
                self._may_load(shard, one.plan, process.me) for one in standing.values()
            ):
                self.violated(process, f"loads layers {shard.span} before all owners have accepted")
        self._loads.clear()
        for plan_hash, one in standing.items():
            self._check_readiness(process, plan_hash, one)
        for plan_hash, (_, shards) in process.serving.items():
            if plan_hash not in standing:
                self.violated(process, f"serves plan {plan_hash[:8]}, which it does not stand by")
            if not shards or not all(process.shards.get(shard) for shard in shards):
                self.violated(process, f"serves plan {plan_hash[:8]} without its layers")

    def _may_load(self, shard: ShardKey, plan: Plan, peer: PeerId) -> bool:
        if shard not in shards_of(plan, peer):
            return False
        accepted = self.accepted.get(plan_id(plan), set())
        owners = set(plan.owners)
        return all((one.peer, one.incarnation) in accepted for one in plan.inputs if one.peer in owners)

    def _check_readiness(self, process: Process, plan_hash: PlanId, one: Standing) -> None:
        loaded = {shard.span for shard in shards_of(one.plan, process.me) if process.shards.get(shard)}
        if not set(one.spans) <= loaded:
            self.violated(process, f"says that it serves layers of plan {plan_hash[:8]} that are not loaded")
        if one.readiness is Readiness.READY:
            needed = {part.span for part in one.plan.assignments if part.peer == process.me}
            needed = needed or {part.span for part in one.plan.standbys if part.peer == process.me}
            if not needed <= loaded:
                self.violated(process, f"says ready for plan {plan_hash[:8]} before its layers are loaded")
            if plan_hash not in process.serving:
                self.violated(process, f"says ready for plan {plan_hash[:8]} and does not serve it")

    def shard_bytes(self, shard: ShardKey, precision: Precision) -> int:
        key = (shard, precision)
        known = self._bytes.get(key)
        if known is None:
            known = self._bytes[key] = self._weigh(self._world.models[shard.model], shard, precision)
        return known

    def _weigh(self, facts: ModelFacts, shard: ShardKey, precision: Precision) -> int:
        costs, span = self._world.costs, shard.span
        weights = sum(costs.layer_bytes(size) for size in facts.layer_bytes[span.first : span.last])
        kv = sum(costs.kv_bytes(one, precision, shard.device) for one in facts.kv[span.first : span.last])
        return costs.span_bytes(facts.hidden) + weights + kv * shard.pool_tokens

    # ── views ───────────────────────────────────────────────────────────────────────────────────────────────
    def _note_view(self, process: Process) -> None:
        view = process.machine.view
        for peer, advert in view.take_gone().items():
            if not view.is_present(peer):
                self._removed(process, advert)

    def _removed(self, process: Process, advert: Advert) -> None:
        world, pc = self._world, self._world.by_peer[advert.peer]
        self.removed[pc.peer] = self.removed.get(pc.peer, 0) + 1
        if pc.process is None or advert.incarnation < pc.process.own.incarnation:
            return
        now, calm_s = world.clock.now, CALM_S
        for one in (pc.process, process):
            if one.starved or one.starved_until > now - STARVED_S - CALM_S:
                # What it does now may answer to what was so before it stood still.
                calm_s = CALM_S + STARVED_S
        for one in (pc.process, process):
            if one.leaving or one.pc.faults or max(one.pc.calm_since, one.started_at) > now - calm_s:
                return
        if world.paths.together(pc, process.pc, calm_s):
            self.false_removals.append(Removal(round(world.clock.elapsed_s, 3), process.pc.name, pc.name))
