"""What this agent has promised: the plans that it stands by, the memory for them, and what is loaded and served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from meshinfer import limits
from meshinfer.mesh.events import Effect, Load, Retire, Serve, Unload
from meshinfer.mesh.placement import Costs, memory_bytes
from meshinfer.mesh.plan import facts_of, owner_shard, plan_id, shards_of
from meshinfer.values import Advert, ModelFacts, ModelId, PeerId, Plan, PlanId, Readiness, ShardKey, Standing


@dataclass(frozen=True, slots=True)
class _Backoff:
    failures: int
    until: float


class Promises:
    """Effects are appended in the order in which they must be carried out: what is unloaded goes before what is
    promised next, so that no byte is promised twice."""

    def __init__(self, me: PeerId, costs: Costs, models: Mapping[ModelId, ModelFacts]) -> None:
        self._me = me
        self._costs = costs
        self._models = models
        self.round = 0
        """The last round that is over: no plan of it, or of one before, is accepted any more."""
        self._standings: dict[PlanId, Standing] = {}
        self._loaded: dict[ShardKey, bool] = {}
        """Shards that are loaded (True) or being loaded (False)."""
        self._served: dict[PlanId, tuple[ShardKey, ...]] = {}
        self._spoilt: set[ShardKey] = set()
        """A standby's shards that could not be loaded here: the span stays uncovered."""
        self._backoffs: dict[ModelId, _Backoff] = {}

    # ── what is promised ────────────────────────────────────────────────────────────────────────────────
    @property
    def standings(self) -> tuple[Standing, ...]:
        """In the order in which the plans were accepted."""
        return tuple(self._standings.values())

    def standing(self, identity: PlanId) -> Standing | None:
        return self._standings.get(identity)

    @property
    def promised(self) -> dict[PlanId, Plan]:
        """The plans that this agent stands by and has not failed for, the earliest first."""
        return {
            identity: standing.plan
            for identity, standing in self._standings.items()
            if standing.readiness is not Readiness.FAILED
        }

    def bytes_of(self, plans: Iterable[Plan], own: Advert) -> int | None:
        """What the distinct shards of plans take here; None where a model is not known."""
        shards = {shard for plan in plans for shard in shards_of(plan, self._me)}
        total = 0
        for model in {shard.model for shard in shards}:
            if model not in self._models:
                return None
            mine = [shard for shard in shards if shard.model == model]
            total += memory_bytes(self._models[model], self._costs, mine, own.precision)
        return total

    def fits(self, plans: Iterable[Plan], own: Advert) -> bool:
        """Whether there is memory for all of these plans at once."""
        needed = self.bytes_of(plans, own)
        return needed is not None and needed <= own.capacity_bytes

    def is_later(self, plan: Plan) -> bool:
        """Whether a plan's round is above all that this agent has accepted or seen the end of."""
        return plan.round > max([self.round, *(one.plan.round for one in self._standings.values())])

    # ── accepting and dropping ──────────────────────────────────────────────────────────────────────────
    def accept(self, plan: Plan, own: Advert) -> bool:
        """Stand by a plan from now on. False, and nothing changes, where that would break a promise."""
        names = facts_of(plan, self._me)
        if names is None or names.incarnation != own.incarnation or len(self._standings) >= limits.STANDINGS:
            return False
        if not self.is_later(plan) or not self.fits([*self.promised.values(), plan], own):
            return False
        self._standings[plan_id(plan)] = Standing(plan, Readiness.ACCEPTED)
        return True

    def drop(self, identity: PlanId, effects: list[Effect]) -> None:
        """Stand by a plan no more; its round is over."""
        standing = self._standings.pop(identity)
        self.round = max(self.round, standing.plan.round)
        self._withdraw(identity, effects)

    def drop_what_cannot_stay(self, own: Advert, now: float, effects: list[Effect]) -> None:
        """Promises that this PC can keep no longer, and failures that have been sat out. Where memory is short, what
        serves goes last."""
        for identity, standing in tuple(self._standings.items()):
            if standing.readiness is Readiness.FAILED:
                backoff = self._backoffs.get(standing.plan.model)
                if backoff is None or backoff.until <= now:
                    self.drop(identity, effects)
        stay: list[Plan] = []
        for identity, plan in sorted(self.promised.items(), key=self._worth):
            if self._suits(plan, own) and self.fits([*stay, plan], own):
                stay.append(plan)
            else:
                self.drop(identity, effects)

    def _worth(self, promised: tuple[PlanId, Plan]) -> tuple[bool, int]:
        identity, plan = promised
        return self._standings[identity].readiness is not Readiness.READY, plan.round

    def _suits(self, plan: Plan, own: Advert) -> bool:
        then = facts_of(plan, self._me)
        if then is None or (then.incarnation, then.precision) != (own.incarnation, own.precision):
            return False
        return all(shard.device == own.device for shard in shards_of(plan, self._me))

    def _withdraw(self, identity: PlanId, effects: list[Effect]) -> None:
        if self._served.pop(identity, None) is not None:
            effects.append(Retire(identity))
        needed = {shard for plan in self.promised.values() for shard in shards_of(plan, self._me)}
        for shard in [shard for shard in self._loaded if shard not in needed]:
            del self._loaded[shard]
            effects.append(Unload(shard))
        self._spoilt &= needed

    # ── loading and serving ─────────────────────────────────────────────────────────────────────────────
    def go_on(self, held: Callable[[PlanId], bool], effects: list[Effect]) -> None:
        """Load what comes next, one shard at a time, and serve what is loaded; nothing before its plan is held."""
        for identity, standing in tuple(self._standings.items()):
            if standing.readiness is Readiness.ACCEPTED and held(identity):
                self._standings[identity] = replace(standing, readiness=Readiness.LOADING)
        self._load_next(effects)
        for identity in self._standings:
            self._serve(identity, effects)

    def _load_next(self, effects: list[Effect]) -> None:
        if not all(self._loaded.values()):
            return
        missing = [shard for shard in self._wished() if shard not in self._loaded]
        if missing:
            self._loaded[missing[0]] = False
            effects.append(Load(missing[0]))

    def _wished(self) -> list[ShardKey]:
        """Owners' shards first, then those to stand by with."""
        begun = [plan for identity, plan in self.promised.items() if self._begun(identity)]
        owned = [shard for plan in begun if (shard := owner_shard(plan, self._me)) is not None]
        others = [shard for plan in begun for shard in shards_of(plan, self._me)]
        return [shard for shard in dict.fromkeys([*owned, *others]) if shard not in self._spoilt]

    def _begun(self, identity: PlanId) -> bool:
        return self._standings[identity].readiness in (Readiness.LOADING, Readiness.READY)

    def _serve(self, identity: PlanId, effects: list[Effect]) -> None:
        standing = self._standings[identity]
        if not self._begun(identity):
            return
        plan = standing.plan
        shards = shards_of(plan, self._me)
        loaded = tuple(shard for shard in shards if self._loaded.get(shard))
        if loaded != self._served.get(identity, ()):
            if loaded:
                self._served[identity] = loaded
                effects.append(Serve(plan, loaded))
            else:
                del self._served[identity]
                effects.append(Retire(identity))
        mine = owner_shard(plan, self._me)
        ready = mine in loaded if mine is not None else loaded == shards
        readiness = Readiness.READY if ready else Readiness.LOADING
        spans = tuple(sorted(shard.span for shard in loaded))
        if (readiness, spans) != (standing.readiness, standing.spans):
            self._standings[identity] = replace(standing, readiness=readiness, spans=spans)

    def load_done(self, shard: ShardKey) -> bool:
        """False for word of a load that was called off meanwhile."""
        if self._loaded.get(shard) is not False:
            return False
        self._loaded[shard] = True
        if any(owner_shard(plan, self._me) == shard for plan in self.promised.values()):
            self._backoffs.pop(shard.model, None)
        return True

    def load_failed(self, shard: ShardKey, sentence: str, now: float, effects: list[Effect]) -> bool:
        """A plan fails here with its owner's shard, and one that this agent only stands by for with any of its own.
        Another standby's shard only stays uncovered."""
        if self._loaded.pop(shard, None) is None:
            return False
        hit = [
            identity
            for identity, plan in self.promised.items()
            if shard in shards_of(plan, self._me) and owner_shard(plan, self._me) in (None, shard)
        ]
        self._spoilt.add(shard)
        for identity in hit:
            self._fail(identity, sentence, now, effects)
        for identity in self._standings:
            self._serve(identity, effects)
        return True

    def _fail(self, identity: PlanId, sentence: str, now: float, effects: list[Effect]) -> None:
        plan = self._standings[identity].plan
        earlier = [
            one
            for one, standing in self._standings.items()
            if standing.readiness is Readiness.FAILED and standing.plan.model == plan.model
        ]
        self._standings[identity] = Standing(plan, Readiness.FAILED, sentence[: limits.DETAIL_CHARS])
        self._withdraw(identity, effects)
        for one in earlier:
            self.drop(one, effects)
        if not earlier:
            self._sit_out(plan.model, now)

    # ── sitting out ─────────────────────────────────────────────────────────────────────────────────────
    def _sit_out(self, model: ModelId, now: float) -> None:
        before = self._backoffs.get(model)
        failures = 1 if before is None else before.failures + 1
        pause_s = min(limits.BACKOFF_S * 2 ** min(failures - 1, 16), limits.BACKOFF_MOST_S)
        self._backoffs[model] = _Backoff(failures, now + pause_s)

    def try_again(self, now: float) -> None:
        """Somebody made room, or took it: what failed before deserves another try."""
        self._backoffs = {model: replace(one, until=now) for model, one in self._backoffs.items()}

    def next_try(self) -> float | None:
        """When a failure has been sat out."""
        failed = [one.plan.model for one in self._standings.values() if one.readiness is Readiness.FAILED]
        return min((self._backoffs[model].until for model in failed if model in self._backoffs), default=None)
