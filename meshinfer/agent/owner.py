"""The shards that this agent runs for others: steps come in, are checked, run, and sent on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from meshinfer.agent.measuring import Kept, Measuring
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.pace import Pace
from meshinfer.agent.shards import KvSequence, Loaded, Served
from meshinfer.agent.speeds import Speeds
from meshinfer.agent.threads import to_its_end
from meshinfer.engine.runner import Outcome, Runner, Work
from meshinfer.engine.shard import PagedShard
from meshinfer.engine.speed import Speed, measure
from meshinfer.engine.step import Chunk, MissingKv, Overloaded, PoolFull, StepTiming
from meshinfer.errors import StepError
from meshinfer.limits import DETAIL_CHARS, PLAN_IDLE_S
from meshinfer.mesh.plan import plan_id
from meshinfer.model import mapping
from meshinfer.model.graph import PagedGraph
from meshinfer.model.weights import ModelFiles
from meshinfer.values import PeerId, Plan, PlanId, Precision, ShardKey
from meshinfer.wire.messages import Free, HopTrace, Message, Refusal, RefusalReason, Result, Step

_REASONS: Final[dict[type[Exception], RefusalReason]] = {
    MissingKv: RefusalReason.MISSING_KV,
    PoolFull: RefusalReason.POOL_FULL,
    Overloaded: RefusalReason.OVERLOADED,
}

_log = logging.getLogger(__name__)


class Owner:
    """All methods belong to the loop; what the runner calls back is carried into it."""

    def __init__(
        self,
        me: PeerId,
        runner: Runner,
        send: Callable[[PeerId, Message], bool],
        precision: Precision,
        threads: int | None,
        metrics: Metrics,
        speeds: Speeds,
        speed_drifted: Callable[[ShardKey, Speed], None],
    ) -> None:
        """`speeds` keeps what is measured. `speed_drifted` is called whenever it keeps something else than before: then
        the advert is to be published anew."""
        self._me = me
        self._runner = runner
        self._send = send
        self._precision = precision
        self._threads = threads
        self._metrics = metrics
        kept = Kept(speeds, precision, threads)
        self._measuring = Measuring(runner, kept, self._wanting, speed_drifted)
        self._loaded: dict[ShardKey, Loaded] = {}
        self._served: dict[PlanId, Served] = {}
        self._building = asyncio.Lock()
        self._closing: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()

    # ── shards ──────────────────────────────────────────────────────────────────────────────────────────────
    async def load(self, shard: ShardKey, files: ModelFiles) -> Speed:
        """Builds, compiles and warms the shard, measures it, and keeps its speed. One that is loaded stays as it is.

        Steps of other shards go on meanwhile. Raises ModelError or CapacityError.
        """
        layers = _work(files, shard)

        def build() -> tuple[PagedShard, Speed]:
            model = PagedGraph.open(files).span(shard.span)
            context = files.manifest.config.context
            built = PagedShard(
                model, shard.device, self._precision, shard.pool_tokens, self._threads, context
            )
            built.warm()
            mapping.release(files.weights_path)
            return built, measure(built, layers)

        async with self._building:
            known = self._loaded.get(shard)
            if known is not None:
                return known.speed
            if self._closing:
                # What was unloaded may be in the middle of a batch: its memory must not be used twice.
                await asyncio.wait(self._closing)
            built, speed = await to_its_end(build, lambda made: made[0].close())
        self._runner.add(built)
        loaded = self._loaded[shard] = Loaded(shard, built, layers, speed, Pace(layers))
        self._measuring.begin(loaded)
        return speed

    def unload(self, shard: ShardKey) -> None:
        """Gives its memory back; steps that wait for it are refused. Nothing happens where it is not loaded."""
        loaded = self._loaded.pop(shard, None)
        if loaded is None:
            return
        for served in self._served.values():
            served.use({key: other for key, other in served.shards.items() if key != shard})
        closed: asyncio.Future[None] = self._loop.create_future()
        self._closing.add(closed)
        closed.add_done_callback(self._closing.discard)

        def close() -> None:
            loaded.shard.close()
            self._loop.call_soon_threadsafe(closed.set_result, None)

        self._runner.drop(loaded.shard, close)

    @property
    def loaded(self) -> Sequence[Loaded]:
        """In order of layers."""
        return sorted(self._loaded.values(), key=lambda loaded: (loaded.key.span, loaded.key.device))

    def _wanting(self, loaded: Loaded) -> bool:
        """Whether a shard is there still and nobody else needs the device: no step for a while, nothing that loads."""
        if self._loaded.get(loaded.key) is not loaded or self._building.locked():
            return False
        now = self._loop.time()
        return not any(one.under_way or now - one.stepped_at < PLAN_IDLE_S for one in self._served.values())

    def observed(self, shard: ShardKey) -> Speed | None:
        """How fast real steps were lately; None for a shard that is not loaded, or had none. A figure of 0 says that
        there were none of its kind."""
        loaded = self._loaded.get(shard)
        return None if loaded is None else loaded.pace.observed

    # ── plans ───────────────────────────────────────────────────────────────────────────────────────────────
    def serve(self, plan: Plan, shards: tuple[ShardKey, ...]) -> None:
        """Take steps under this plan from now on, each on the shard whose span is the hop's. Called again when more of
        its shards are loaded."""
        missing = [shard for shard in shards if shard not in self._loaded]
        if missing:
            _log.warning("layers %s are not loaded, and not served", ", ".join(str(s.span) for s in missing))
        held = {shard: self._loaded[shard] for shard in shards if shard in self._loaded}
        served = self._served.setdefault(plan_id(plan), Served(plan, {}, self._loop.time()))
        served.use(held)

    def retire(self, plan: PlanId) -> None:
        """Take no more steps under this plan; those that were taken end.

        KV belongs to a sequence on a shard. Where another plan serves the shard, the answer may go on under that, and
        its KV stays until its asker frees it. Where none does, nobody will step it any more.
        """
        served = self._served.pop(plan, None)
        if served is None:
            return
        for loaded in served.shards.values():
            if not any(loaded.key in other.shards for other in self._served.values()):
                self._free(loaded, [sequence for sequence, last in loaded.stepped.items() if last == plan])

    def idle(self, plan: PlanId) -> bool:
        """Whether no answer is under way under this plan: no step for a while, and none of the sequences that were
        stepped under it last has KV here still."""
        served = self._served.get(plan)
        if served is None:
            return True
        if served.under_way or self._loop.time() - served.stepped_at < PLAN_IDLE_S:
            return False
        return not any(loaded.held_under(plan) for loaded in served.shards.values())

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────
    def step(self, sender: PeerId, step: Step) -> None:
        """One step from the hop before; anything wrong with it ends in one refusal to its asker."""
        served = self._served.get(step.plan)
        if served is None or step.route != served.plan.owners or step.route[step.hop] != self._me:
            self._refuse(step, RefusalReason.NOT_ACCEPTED, "this agent does not serve under that plan")
            return
        if sender != (step.asker if step.hop == 0 else step.route[step.hop - 1]):
            # Whoever sends in another's name is not answered at all.
            self._metrics.count("refused.step.sender")
            return
        loaded = served.by_hop.get(step.hop)
        if loaded is None:
            self._refuse(step, RefusalReason.NOT_ACCEPTED, "these layers are not loaded here")
            return
        self._run(served, loaded, step)

    def _run(self, served: Served, loaded: Loaded, step: Step) -> None:
        chunks = _chunks(step)

        def done(outcome: Outcome, timing: StepTiming) -> None:
            # In the inference thread: the loop only has to send.
            message = self._outcome(step, outcome, timing)
            self._loop.call_soon_threadsafe(self._ran, served, loaded, step, message, timing)

        served.stepped_at = self._loop.time()
        served.under_way += 1
        if len(loaded.stepped) > 2 * loaded.shard.blocks_total:  # each that has KV has a block at least
            loaded.forget_gone()
        for entry in step.entries:
            loaded.stepped[step.asker, entry.sequence] = step.plan
        try:
            self._runner.submit(loaded.shard, Work(step.asker, chunks, done))
        except StepError as error:
            served.under_way -= 1
            self._reply(step, self._refusal_of(step, error))

    def _ran(self, served: Served, loaded: Loaded, step: Step, message: Message, timing: StepTiming) -> None:
        self._reply(step, message)
        # Behind the sending: nobody waits for it.
        served.under_way -= 1
        rows = len(step.rows)
        if rows != timing.batch_tokens or len(step.entries) > 1 or isinstance(message, Refusal):
            return  # other sequences were in the batch, or nothing was computed
        self._measuring.note(loaded, timing.compute_us, rows, step.entries[0].position)

    def _outcome(self, step: Step, outcome: Outcome, timing: StepTiming) -> Message:
        if isinstance(outcome, StepError):
            return self._refusal_of(step, outcome)
        trace = (*step.trace, HopTrace(timing.queue_us, timing.compute_us, timing.batch_tokens))
        rows = outcome[0] if len(outcome) == 1 else np.concatenate(outcome)
        if step.hop + 1 < len(step.route):
            return replace(step, hop=step.hop + 1, trace=trace, rows=rows)
        return Result(step.plan, step.step, step.entries, trace, rows)

    def _reply(self, step: Step, message: Message) -> None:
        if isinstance(message, Step):
            if not self._send(message.route[message.hop], message):
                # As if the next one had said no: the answer goes on along another route, and does not end here.
                detail = "the next owner on the route cannot be reached"
                self._refuse(step, RefusalReason.NOT_ACCEPTED, detail)
        elif not self._send(step.asker, message):
            # The asker is gone or cannot take more; its own deadline tells it.
            self._metrics.count("unsent.result")
        if isinstance(message, Refusal):
            self._metrics.count(f"refused.step.{message.reason.name.lower()}")
        else:
            self._metrics.count("steps")

    def free(self, sender: PeerId, message: Free) -> None:
        """The asker is done with these sequences of its own."""
        sequences = [(sender, sequence) for sequence in message.sequences]
        for loaded in self._loaded.values():
            self._free(loaded, sequences)

    def _free(self, loaded: Loaded, sequences: Iterable[KvSequence]) -> None:
        freed = list(sequences)
        for sequence in freed:
            loaded.stepped.pop(sequence, None)
        if freed:
            self._runner.free(loaded.shard, freed)

    def _refuse(self, step: Step, reason: RefusalReason, detail: str) -> None:
        self._reply(step, Refusal(step.plan, step.step, step.hop, reason, detail, ()))

    @staticmethod
    def _refusal_of(step: Step, error: StepError) -> Refusal:
        reason = _REASONS.get(type(error), RefusalReason.FAILED)
        held = error.held if isinstance(error, MissingKv) else ()
        return Refusal(step.plan, step.step, step.hop, reason, str(error)[:DETAIL_CHARS], held)


def _chunks(step: Step) -> list[Chunk]:
    """What each sequence of the step asks of the shard; rows come back as wanted from the last owner only."""
    last = step.hop == len(step.route) - 1
    rows = np.asarray(step.rows, dtype=np.float32)
    chunks = []
    begin = 0
    for entry in step.entries:
        end = begin + entry.count
        want = entry.want if last else entry.count
        chunks.append(Chunk((step.asker, entry.sequence), entry.position, rows[begin:end], want))
        begin = end
    return chunks


def _work(files: ModelFiles, shard: ShardKey) -> float:
    """In layers of average size, as speeds are given: large layers take longer."""
    sizes = files.manifest.facts(files.name).layer_bytes
    whole = sum(sizes)
    return sum(sizes[shard.span.first : shard.span.last]) * len(sizes) / whole if whole else len(shard.span)
