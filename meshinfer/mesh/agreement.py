"""Which plans this agent stands by, and under which one it asks. PROTOCOL.md beside this file gives the rules, and why
they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshinfer import limits
from meshinfer.mesh import reasons
from meshinfer.mesh.allocation import Allocation, Better, allocate
from meshinfer.mesh.asking import Asking
from meshinfer.mesh.cells import OwnCell
from meshinfer.mesh.events import Effect, PlanUnusable, PlanUsable
from meshinfer.mesh.manifests import Manifests
from meshinfer.mesh.picture import Picture, Status
from meshinfer.mesh.placement import Costs, Shortfall
from meshinfer.mesh.plan import flaw, plan_id
from meshinfer.mesh.promises import Promises
from meshinfer.mesh.scene import Scene
from meshinfer.mesh.timing import Calm, Doubts, Lasting, Patience
from meshinfer.values import Advert, ModelFacts, ModelId, PeerId, Plan, PlanId, ShardKey, Standing


class Agreement:
    """One agent's part in agreeing on plans. Times are monotonic seconds.

    The caller tells of changes (`heard`, `changed`, `model_known`, `load_done`, `load_failed`, `idle`), then asks for
    what is to be done: `decide`. `own` is then what the own advert has to say.
    """

    def __init__(self, own: Advert, costs: Costs, now: float) -> None:
        self.me: PeerId = own.peer
        self.picture = Picture()
        self.model: ModelId | None = None
        """The model that the mesh serves, or is about to; None while nobody who is here has one."""
        self.plan: Plan | None = None
        self.usable = False
        self.reason = "the agent has just started"
        self.models: dict[ModelId, ModelFacts] = {}
        self.promises = Promises(self.me, costs, self.models)
        self._base = self._own = own
        self._told: tuple[Advert, tuple[PeerId, ...], int, tuple[Standing, ...]] | None = None
        self._costs = costs
        self._started_at = now
        self._calm = Calm(now)
        self._quiet = Calm(now)
        self._lasting = Lasting()
        self._doubts = Doubts(self.me)
        self._patience = Patience()
        self._lost_at: dict[PlanId, float] = {}
        self._replaced_at: dict[PlanId, float] = {}
        self._idle: set[PlanId] = set()
        self._manifests = Manifests()
        self.allocation = Allocation()
        """What all of this agent's cell are to follow, as it was last computed."""
        self._stale = True
        self._unseen = True
        """Whether anything has changed since targets were last computed, or what they depend on was last noted."""
        self._waiting = True
        """Whether something is to be done about the targets when its time has come."""
        self._own_cell = OwnCell(self.me, costs)
        self._again = False
        """Whether plans have been held here before."""
        self._concerned: frozenset[PeerId] = frozenset()
        self._measure_at: float | None = None
        self._look_around_at: float | None = None
        self._due: float | None = now
        self._asking = Asking(self.me, self.picture, self.models)
        self._said: Plan | str | None = None
        self._sync()

    # ── what it says ────────────────────────────────────────────────────────────────────────────────────
    @property
    def own(self) -> Advert:
        """This agent's advert, but for its version."""
        told = (self._base, self._doubts.peers, self.promises.round, self.promises.standings)
        if told != self._told:
            base, doubts, ended, standings = self._told = told
            self._own = replace(base, doubts=doubts, round=ended, standings=standings)
        return self._own

    @property
    def shortfall(self) -> Shortfall | None:
        """The figures, where memory is the reason."""
        return self.allocation.shortfall

    def plans(self) -> tuple[Plan, ...]:
        """All that are held, as far as is known here, in order of id."""
        held = (one for one in sorted(self.picture.plans()) if self.picture.held(one))
        return tuple(map(self.picture.plan, held))

    def usable_plans(self) -> tuple[Plan, ...]:
        """Those under which this agent may ask, in order of id."""
        return tuple(
            self.picture.plan(one) for one in sorted(self.picture.plans()) if self._asking.may_use(one)
        )

    def partners(self) -> frozenset[PeerId]:
        """Peers named in the plans that this agent stands by, which it has to hear itself."""
        return frozenset(peer for plan in self.promises.promised.values() for peer in plan.named)

    def next_deadline(self) -> float | None:
        """When `decide` is due though nothing happens."""
        return self._due

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────
    def heard(self, peer: PeerId, advert: Advert | None, now: float) -> bool:
        """Another's newest advert, None when it is gone. True where there is something to decide."""
        before = self.picture.get(peer)
        changed = self.picture.put(peer, advert)
        many = len(self.picture) > limits.ONE_CELL
        if not self._concerns(peer, before, advert):
            if changed:
                self._look_around(now + limits.LOOK_AROUND_S)
            return False
        if before is not None and advert is not None and before.links != advert.links:
            self._measured(now)
        if before is None and advert is not None and any(holding.complete for holding in advert.holdings):
            # Here is somebody to fetch from: a load that failed for want of that deserves another try.
            self.promises.try_again(now)
        if changed:
            self._outdate()
            if many:
                self._look_around(now + limits.LOOK_SOON_S)
        return changed and not many

    def _outdate(self) -> None:
        self._stale = self._unseen = True

    def _look_around(self, at: float) -> None:
        if self._look_around_at is None or at < self._look_around_at:
            self._look_around_at = at
            self._later(at)

    def _concerns(self, peer: PeerId, before: Advert | None, advert: Advert | None) -> bool:
        """Whether a peer's advert has to do with this agent's cell, or with the plan that it asks under."""
        cell = self._own_cell.cell
        if cell.bits == 0 or peer in cell or peer in self._concerned:
            return True
        if self.plan is not None and peer in self.plan.named:
            return True
        if advert is None or (before is not None and before.standings == advert.standings):
            return False
        return any(one in cell for standing in advert.standings for one in standing.plan.named)

    def _measured(self, now: float) -> None:
        """What links cost is no reason to plan, but may make a plan better: it is enough to look at it soon."""
        if self._measure_at is None:
            self._measure_at = now + limits.LINKS_SETTLE_S
            self._later(self._measure_at)

    def changed(self, base: Advert, now: float) -> bool:
        """What the own advert says besides plans. True where there is something to decide."""
        before, self._base = self._base, base
        if before.links != base.links:
            self._measured(now)
        if base.capacity_bytes != before.capacity_bytes:
            self.promises.try_again(now)
        return self._sync()

    def model_known(self, facts: ModelFacts) -> None:
        self.models[facts.model] = facts
        self._outdate()

    def load_done(self, shard: ShardKey) -> bool:
        return self.promises.load_done(shard)

    def load_failed(self, shard: ShardKey, sentence: str, now: float, effects: list[Effect]) -> bool:
        return self.promises.load_failed(shard, sentence, now, effects)

    def idle(self, identity: PlanId) -> bool:
        """No answer is under way here under a plan. It counts where the plan has been replaced."""
        if identity not in self._replaced_at:
            return False
        self._idle.add(identity)
        return True

    # ── decisions ───────────────────────────────────────────────────────────────────────────────────────
    def decide(self, now: float, effects: list[Effect]) -> None:
        """Bring all that depends on what has changed, or on time, up to date."""
        if self._measure_at is not None and self._measure_at <= now:
            self._measure_at = None
            self._outdate()
        if self._look_around_at is not None and self._look_around_at <= now:
            self._look_around_at = None
        if self._pass(now, effects):
            self._pass(now, effects)

    def _pass(self, now: float, effects: list[Effect]) -> bool:
        """True where it has changed what this agent itself says, so that a second look is due."""
        self._due = None
        self._later(self._measure_at)
        self._later(self._look_around_at)
        self.promises.drop_what_cannot_stay(self._base, now, effects)
        self._later(self.promises.next_try())
        self._later(self._patience.pass_time(self.promises.promised, self.picture, self._doubts, now))
        self._sync()
        self.model = self.picture.chosen_model()
        self._ask_for_manifest(now, effects)
        self._follow_targets(now, effects)
        changed = self._sync()
        self.promises.go_on(self.picture.held, effects)
        changed = self._sync() or changed
        self._retire(now, effects)
        changed = self._sync() or changed
        self._conclude(effects)
        return changed

    def _later(self, time: float | None) -> None:
        if time is not None and (self._due is None or time < self._due):
            self._due = time

    def _sync(self) -> bool:
        changed = self.picture.put(self.me, self.own)
        if changed:
            self._outdate()
        return changed

    def _ask_for_manifest(self, now: float, effects: list[Effect]) -> None:
        model = None if self.model in self.models else self.model
        sources = () if model is None else self.picture.sources(model, self.me)
        need = self._manifests.ask(model, sources, now)
        if need is not None:
            effects.append(need)
        self._later(self._manifests.ask_again_at)

    # ── targets ─────────────────────────────────────────────────────────────────────────────────────────
    def _follow_targets(self, now: float, effects: list[Effect]) -> None:
        if self.model is None or self.model not in self.models:
            self.allocation, self._waiting = Allocation(), True
            self._outdate()
            return
        if self._own_cell.choose(self.picture, self.models[self.model], now):
            self._outdate()
        self._later(self._own_cell.again_at)
        if not (self._stale or self._waiting) and self._lasting.ripe(now) == self._lasting.taken:
            self._later(self._lasting.next_ripe(now))
            return
        self._waiting = False
        scene = self._scene(self.model, now)
        if self._unseen:
            self._unseen = False
            self._observe(scene, now)
        if (settles_at := self._settles_at()) > now:
            self._wait(settles_at)
            return
        self._calm.acted(now)
        self._allocate(scene, now)
        self._follow(self.acceptable(self.allocation), now, effects)

    def _wait(self, time: float) -> None:
        self._waiting = True
        self._later(time)

    def _scene(self, model: ModelId, now: float) -> Scene:
        cell = self._own_cell.cell
        peers = tuple(self.picture.peers)
        if cell.bits:
            peers = tuple(peer for peer in peers if peer in cell)
        ripe = self._lasting.ripe(now)
        return Scene(self.picture, cell, peers, self._base.rules, model, self.models, self._costs, ripe)

    def _observe(self, scene: Scene, now: float) -> None:
        """Note what plans depend on, and which proposals are under way, so that it shows for how long both have been
        the same."""
        picture = self.picture
        candidates = scene.able
        broken = picture.broken_among(candidates)
        # Who has just come and is still fetching the model's description takes part as soon as it has it.
        late = tuple(
            peer
            for peer in scene.peers
            if (advert := picture.get(peer)) is not None
            and advert.capacity_bytes > 0
            and not picture.has_manifest(peer, scene.model)
        )
        content = (
            scene.model,
            late,
            tuple(candidates.values()),
            picture.min_owners(),
            picture.objective(),
            broken,
        )
        self._calm.note(content, now)
        plans = scene.touching
        self._concerned = frozenset(peer for one in plans for peer in picture.plan(one).named)
        waiting = [one for one in plans if picture.status(one) is not Status.HELD]
        self._quiet.note(frozenset(waiting), now)
        self._again = any(picture.status(one) is not Status.OPEN for one in plans)

    def _settles_at(self) -> float:
        alone = len(self.picture) == 1
        settles_at = self._calm.settles_at(limits.SETTLE_AGAIN_S if self._again else limits.SETTLE_S)
        return max(settles_at, self._started_at + limits.ALONE_SETTLE_S if alone else 0.0)

    def _allocate(self, scene: Scene, now: float) -> None:
        """Compute anew where anything has changed, or an improvement has been possible for long enough."""
        if not self._stale and self._lasting.ripe(now) == self._lasting.taken:
            self._later(self._lasting.next_ripe(now))
            return
        self._stale = False
        found = allocate(scene)
        self._lasting.note({one: _LASTS[why] for one, why in found.better}, now)
        self.allocation = found
        self._later(self._lasting.next_ripe(now))

    def acceptable(self, allocation: Allocation) -> list[Plan]:
        """The plans that this agent may accept or go on standing by: those that it has computed itself, and no others,
        whoever else stands by them."""
        return [plan for plan in allocation.targets if self.me in plan.named and flaw(plan) is None]

    def _follow(self, targets: Iterable[Plan], now: float, effects: list[Effect]) -> None:
        """Stand by the targets and by nothing else. A plan that somebody stands by already is joined at once, a new one
        is proposed when proposals have been quiet, so that two do not cross again and again."""
        wanted = {plan_id(plan): plan for plan in targets}
        for plan in self.allocation.elsewhere:
            if self.promises.standing(plan_id(plan)) is not None:
                wanted[plan_id(plan)] = plan
        new = {one: plan for one, plan in wanted.items() if self.promises.standing(one) is None}
        if any(not self.picture.known(one) for one in new):
            quiet_at = self._quiet.settles_at(limits.SETTLE_AGAIN_S)
            if quiet_at > now:
                self._wait(quiet_at)
                return
        self._drop_others(wanted, bool(wanted), now, effects)
        for plan in new.values():
            self._make_room(plan, effects)
            self.promises.accept(plan, self._base)

    def _drop_others(
        self, wanted: Mapping[PlanId, Plan], at_once: bool, now: float, effects: list[Effect]
    ) -> None:
        """Plans that are no targets; a broken one only when it has had a moment to be whole again."""
        lost = [one for one in self.promises.promised if one not in wanted]
        self._lost_at = {one: self._lost_at.get(one, now) for one in lost}
        for identity in lost:
            may_return = self.picture.status(identity) is Status.OVER and not self.picture.passed_by(identity)
            until = self._lost_at[identity] + limits.KEEP_BROKEN_S
            if may_return and not at_once and until > now:
                self._wait(until)
            else:
                self._drop(identity, effects)

    def _make_room(self, plan: Plan, effects: list[Effect]) -> None:
        """A weak plan that serves nobody goes before its successor is loaded, where there is no memory for both."""
        for identity, old in tuple(self.promises.promised.items()):
            if self.promises.fits([*self.promises.promised.values(), plan], self._base):
                return
            if self.picture.is_weak(old) and self.picture.may_be_replaced_in_place(identity):
                self._drop(identity, effects)

    def _drop(self, identity: PlanId, effects: list[Effect]) -> None:
        self.promises.drop(identity, effects)
        for times in (self._lost_at, self._replaced_at):
            times.pop(identity, None)
        self._patience.drop(identity)
        self._idle.discard(identity)

    # ── replaced plans ────────────────────────────────────────────────────────────────────
    def _retire(self, now: float, effects: list[Effect]) -> None:
        """Let go of a plan when the one that replaces it here works, and no answer needs it or it has had its time."""
        promised = self.promises.promised
        ready = [plan.round for one, plan in promised.items() if self.picture.ready(one)]
        for identity, plan in promised.items():
            if plan.round >= max(ready, default=0):
                self._replaced_at.pop(identity, None)
                continue
            until = self._replaced_at.setdefault(identity, now) + limits.RETIRE_S
            if identity in self._idle or until <= now:
                self._drop(identity, effects)
            else:
                self._later(until)

    # ── which plan to ask under ─────────────────────────────────────────────────────────────────────────
    def _conclude(self, effects: list[Effect]) -> None:
        """Tell whether questions can be asked, when that or its reason has changed."""
        using = self._asking.choose(self.model)
        self.usable = using is not None
        self.plan = self.picture.plan(using) if using is not None else self._awaited()
        self.reason = "" if self.usable else self._why_not()
        said = self.plan if self.usable else self.reason
        if said == self._said:
            return
        self._said = said
        effects.append(PlanUsable(said) if isinstance(said, Plan) else PlanUnusable(self.reason))

    def _why_not(self) -> str:
        known, shortfall = self.model in self.models, self.allocation.shortfall
        return reasons.why_not(self.picture, self.me, self.model, known, self.plan, shortfall)

    def _awaited(self) -> Plan | None:
        """What will be asked under, as far as can be told."""
        mine = self.acceptable(self.allocation)
        return next(iter([*mine, *self.promises.promised.values(), *self.allocation.targets]), None)


_LASTS = {Better.FASTER: limits.FASTER_LASTS_S, Better.STANDBY: limits.STANDBY_LASTS_S}
