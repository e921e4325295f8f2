"""All interleavings of a small mesh's agreement: the real machine, without its network and its clock.

A state is what each agent has promised and what it knows of the others. Whatever may happen next is tried from every
state: an agent hears another's present advert, in any order or never; it notices that one is gone; its patience ends;
what it loads is loaded; and, a bounded number of times, one crashes, comes back, or is lost sight of though it lives.
Timers that only delay are left out: patience may end at any moment, which covers every way in which clocks may differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mesh_samples import COSTS

from meshinfer.mesh.agreement import Agreement
from meshinfer.mesh.events import Effect, Load
from meshinfer.mesh.placement import memory_bytes
from meshinfer.mesh.plan import plan_id, shards_of
from meshinfer.values import Advert, ModelFacts, PeerId, Plan, PlanId, Readiness, ShardKey, Standing

PATIENCE_S = 2.5
"""Longer than any settling time, shorter than what makes an agent doubt another."""


@dataclass(frozen=True)
class Local:
    """One agent: its promises, and the newest advert that it has of each other agent that it believes to be here.
    `highest` is the greatest round that it has ever accepted in this incarnation; the machine does not know it."""

    base: Advert
    round: int = 0
    standings: tuple[tuple[PlanId, Standing], ...] = ()
    loaded: tuple[tuple[ShardKey, bool], ...] = ()
    served: tuple[tuple[PlanId, tuple[ShardKey, ...]], ...] = ()
    using: PlanId | None = None
    known: tuple[Advert, ...] = ()
    highest: int = 0


@dataclass(frozen=True)
class Learn:
    """It hears another's present advert."""

    advert: Advert


@dataclass(frozen=True)
class Lose:
    """It does not hear a peer any more."""

    peer: PeerId


@dataclass(frozen=True)
class Loaded:
    """What it loads is loaded."""

    shard: ShardKey


@dataclass(frozen=True)
class Idle:
    """No answer is under way under a plan."""

    plan: PlanId


@dataclass(frozen=True)
class Patience:
    """It has waited for long enough."""


Action = Learn | Lose | Loaded | Idle | Patience


@dataclass(frozen=True)
class State:
    """Agents by number, as indices into what the explorer has met; None for one that is not running."""

    agents: tuple[int | None, ...]
    crashes: int
    returns: int
    losses: int


@dataclass(frozen=True)
class Found:
    """What an exploration came to."""

    states: int
    converged: int
    cut: int
    violations: tuple[str, ...]
    stuck: int
    """States from which no converged one can be reached, whatever happens."""


class Explorer:
    """`adverts` are the agents' portraits; the numbers bound what goes wrong.

    Without `loading`, what is to be loaded is there at once, which leaves out states in which some are still at it.
    With `met`, all begin with each other's portrait. States with more than so many `rounds` are not gone on from: a
    scheduler that lets agents hear of each other in the worst order can always make one more.
    """

    def __init__(
        self,
        adverts: tuple[Advert, ...],
        facts: ModelFacts,
        *,
        crashes: int = 0,
        returns: int = 0,
        losses: int = 0,
        loading: bool = True,
        met: bool = False,
        rounds: int = 1000,
        most: int = 200_000,
    ) -> None:
        self._portraits = adverts
        self._facts = facts
        self._loading = loading
        self._rounds = rounds
        self._most = most
        self._locals: list[Local] = []
        self._numbers: dict[Local, int] = {}
        self._own: list[Advert] = []
        self._outcomes: dict[tuple[int, Action], tuple[int, tuple[str, ...]]] = {}
        self._usable: dict[int, tuple[Plan, ...]] = {}
        begun = tuple(self._begin(number, met) for number in range(len(adverts)))
        self._start = State(begun, crashes, returns, losses)

    def run(self) -> Found:
        """Breadth first. Raises OverflowError where there are more states than were allowed for."""
        reached = {self._start: 0}
        states, queue = [self._start], deque([self._start])
        back: list[list[int]] = [[]]
        quiet: list[int] = []
        cut: list[int] = []
        violations: dict[str, None] = {}
        while queue:
            state = queue.popleft()
            here, at_rest = reached[state], True
            if any(one is not None and self._locals[one].highest > self._rounds for one in state.agents):
                cut.append(here)
                continue
            for after, faulty in self._next(state, violations):
                if not faulty and after != state:
                    at_rest = False
                if after not in reached:
                    if len(states) >= self._most:
                        raise OverflowError(f"more than {self._most} states")
                    reached[after] = len(states)
                    states.append(after)
                    queue.append(after)
                    back.append([])
                if not faulty:
                    back[reached[after]].append(here)
            if at_rest:
                quiet.append(here)
                if (trouble := self._trouble(state)) is not None:
                    violations[f"at rest, and {trouble}"] = None
        reaching = _reaching(back, [*quiet, *cut])
        return Found(len(states), len(quiet), len(cut), tuple(violations), len(states) - len(reaching))

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────
    def _next(self, state: State, violations: dict[str, None]) -> Iterator[tuple[State, bool]]:
        """States that may follow, and whether a fault leads there."""
        for number, here in enumerate(state.agents):
            if here is None:
                if state.returns:
                    yield replace(_with(state, number, self._again(number)), returns=state.returns - 1), True
                continue
            for action in self._actions(state, number, here):
                after, wrong = self._outcome(here, action)
                violations.update(dict.fromkeys(wrong))
                yield _with(state, number, after), False
            if state.crashes:
                yield replace(_with(state, number, None), crashes=state.crashes - 1), True
            if state.losses:
                for advert in self._locals[here].known:
                    after, wrong = self._outcome(here, Lose(advert.peer))
                    violations.update(dict.fromkeys(wrong))
                    yield replace(_with(state, number, after), losses=state.losses - 1), True

    def _actions(self, state: State, number: int, here: int) -> Iterator[Action]:
        local = self._locals[here]
        known = {advert.peer: advert for advert in local.known}
        for other, there in enumerate(state.agents):
            peer = self._portraits[other].peer
            if other == number:
                continue
            if there is None:
                if peer in known:
                    yield Lose(peer)
            elif known.get(peer) != self._own[there]:
                yield Learn(self._own[there])
        for shard, done in local.loaded:
            if not done:
                yield Loaded(shard)
        for identity, _ in local.standings:
            yield Idle(identity)
        yield Patience()

    def _outcome(self, here: int, action: Action) -> tuple[int, tuple[str, ...]]:
        """What an agent makes of what happens. It depends on nothing but its own state, so it is computed once."""
        known = self._outcomes.get((here, action))
        if known is None:
            known = self._outcomes[here, action] = self._compute(self._locals[here], action)
        return known

    def _compute(self, local: Local, action: Action) -> tuple[int, tuple[str, ...]]:
        machine, effects, now = self._machine(local), list[Effect](), 1000.0
        match action:
            case Learn(advert):
                machine.heard(advert.peer, advert, now)
            case Lose(peer):
                machine.heard(peer, None, now)
            case Loaded(shard):
                machine.load_done(shard)
            case Idle(identity):
                machine.decide(now, effects)
                machine.idle(identity)
            case Patience():
                machine.decide(now, effects)
                now += PATIENCE_S
        machine.decide(now, effects)
        while not self._loading and (
            missing := [one for one, done in machine.promises._loaded.items() if not done]
        ):
            machine.load_done(missing[0])
            machine.decide(now, effects)
        after = self._state_of(machine, local)
        return self._number(after), tuple(self._wrong(local, after, effects))

    # ── agents as values ────────────────────────────────────────────────────────────────────────────────
    def _begin(self, number: int, met: bool) -> int:
        others = tuple(portrait for portrait in self._portraits if portrait != self._portraits[number])
        local = Local(self._portraits[number], known=others if met else ())
        return self._number(self._state_of(self._machine(local), None))

    def _again(self, number: int) -> int:
        portrait = self._portraits[number]
        local = Local(replace(portrait, incarnation=portrait.incarnation + 1))
        return self._number(self._state_of(self._machine(local), None))

    def _machine(self, local: Local) -> Agreement:
        machine = Agreement(local.base, COSTS, 0.0)
        machine.model_known(self._facts)
        promises = machine.promises
        promises.round = local.round
        promises._standings = dict(local.standings)
        promises._loaded = dict(local.loaded)
        promises._served = dict(local.served)
        machine._asking.using = local.using
        for advert in local.known:
            machine.heard(advert.peer, advert, 0.0)
        machine.changed(local.base, 0.0)
        return machine

    def _state_of(self, machine: Agreement, before: Local | None) -> Local:
        promises = machine.promises
        rounds = [standing.plan.round for standing in promises.standings]
        others = (advert for advert in machine.picture.adverts if advert.peer != machine.me)
        return Local(
            base=machine._base,
            round=promises.round,
            standings=tuple(promises._standings.items()),
            loaded=tuple(promises._loaded.items()),
            served=tuple(promises._served.items()),
            using=machine._asking.using,
            known=tuple(others),
            highest=max([0 if before is None else before.highest, *rounds]),
        )

    def _number(self, local: Local) -> int:
        known = self._numbers.get(local)
        if known is None:
            known = self._numbers[local] = len(self._locals)
            self._locals.append(local)
            self._own.append(self._machine(local).own)
        return known

    # ── what must never be ──────────────────────────────────────────────────────────────────────────────
    def _wrong(self, before: Local, after: Local, effects: list[Effect]) -> Iterator[str]:
        name = after.base.name
        standing_before = {identity for identity, _ in before.standings}
        for identity, standing in after.standings:
            if identity not in standing_before and standing.plan.round <= before.highest:
                yield f"{name} accepts a plan of round {standing.plan.round} after one of {before.highest}"
        promised = {
            shard
            for _, standing in after.standings
            if standing.readiness is not Readiness.FAILED
            for shard in shards_of(standing.plan, after.base.peer)
        }
        shards = promised | {shard for shard, _ in after.loaded}
        if memory_bytes(self._facts, COSTS, shards, after.base.precision) > after.base.capacity_bytes:
            yield f"{name} promises more memory than it has"
        for effect in effects:
            if isinstance(effect, Load) and not self._may_load(after, effect.shard):
                yield f"{name} loads before all owners of its plan have accepted"
        for plan in self._plans_usable(after):
            if not _all_stand_by(after, plan, (Readiness.READY,)):
                yield f"{name} uses a plan before all its owners are ready"

    def _may_load(self, local: Local, shard: ShardKey) -> bool:
        plans = (standing.plan for _, standing in local.standings)
        return any(
            shard in shards_of(plan, local.base.peer) and _all_stand_by(local, plan, ()) for plan in plans
        )

    def _plans_usable(self, local: Local) -> tuple[Plan, ...]:
        return self._machine(local).usable_plans()

    def _trouble(self, state: State) -> str | None:
        """What is not as it should be when nothing more happens."""
        alive = [self._locals[here] for here in state.agents if here is not None]
        held = {plan_id(standing.plan) for local in alive for _, standing in local.standings}
        for local in alive:
            for identity, standing in local.standings:
                if standing.readiness is not Readiness.READY:
                    return f"{local.base.name} is {standing.readiness} with its plan"
                if not all(self._stands_by(alive, peer, identity) for peer in standing.plan.owners):
                    return f"{local.base.name} stands by a plan alone"
        machines = [self._machine(local) for local in alive]
        for machine in machines:
            if {plan_id(plan) for plan in machine.usable_plans()} != held:
                return f"{machine._base.name} does not see the plans that are held"
        enough = bool(alive) and self._can_serve(alive)
        return "no plan is held though there is room for one" if enough and not held else None

    def _stands_by(self, alive: list[Local], peer: PeerId, identity: PlanId) -> bool:
        return any(identity in dict(local.standings) for local in alive if local.base.peer == peer)

    def _can_serve(self, alive: list[Local]) -> bool:
        """Whether these agents, had they just met, would make a plan."""
        fresh = Local(alive[0].base, known=tuple(local.base for local in alive[1:]))
        machine, effects = self._machine(fresh), list[Effect]()
        machine.decide(1000.0, effects)
        machine.decide(1000.0 + PATIENCE_S, effects)
        return bool(machine.allocation.targets)


def _all_stand_by(local: Local, plan: Plan, readiness: tuple[Readiness, ...]) -> bool:
    """Whether all owners stand by a plan, by what the agent has heard from themselves and has promised itself."""
    words = {advert.peer: (advert.incarnation, advert.standings) for advert in local.known}
    words[local.base.peer] = (local.base.incarnation, tuple(standing for _, standing in local.standings))
    then = {facts.peer: facts.incarnation for facts in plan.inputs}
    for peer in plan.owners:
        incarnation, standings = words.get(peer, (0, ()))
        mine = [standing for standing in standings if standing.plan == plan]
        if incarnation != then[peer] or not mine or mine[0].readiness is Readiness.FAILED:
            return False
        if readiness and mine[0].readiness not in readiness:
            return False
    return True


def _with(state: State, number: int, agent: int | None) -> State:
    return replace(state, agents=(*state.agents[:number], agent, *state.agents[number + 1 :]))


def _reaching(back: list[list[int]], ends: list[int]) -> set[int]:
    """States from which one of `ends` can be reached without a further fault."""
    found, queue = set(ends), deque(ends)
    while queue:
        for before in back[queue.popleft()]:
            if before not in found:
                found.add(before)
                queue.append(before)
    return found
