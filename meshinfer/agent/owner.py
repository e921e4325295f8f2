"""The spans that this agent runs for others: steps come in, are checked, run, and sent on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshinfer.agent.metrics import Metrics
from meshinfer.agent.threads import to_its_end
from meshinfer.engine.runner import Outcome, Runner, Work
from meshinfer.engine.shard import PagedShard
from meshinfer.engine.speed import decode_us
from meshinfer.engine.step import Chunk, MissingKv, Overloaded, PoolFull, StepTiming
from meshinfer.errors import StepError
from meshinfer.limits import DETAIL_CHARS
from meshinfer.mesh.plan import plan_id
from meshinfer.model import mapping
from meshinfer.model.graph import PagedGraph
from meshinfer.model.weights import ModelFiles
from meshinfer.values import PeerId, Plan, PlanId, Precision, Span
from meshinfer.wire.messages import Free, HopTrace, Message, Refusal, RefusalReason, Result, Step

_REASONS: Final[dict[type[Exception], RefusalReason]] = {
    MissingKv: RefusalReason.MISSING_KV,
    PoolFull: RefusalReason.POOL_FULL,
    Overloaded: RefusalReason.OVERLOADED,
}


@dataclass(frozen=True, slots=True)
class Serving:
    """One span that is loaded and warm."""

    plan: Plan
    span: Span
    shard: PagedShard


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
    ) -> None:
        self._me = me
        self._runner = runner
        self._send = send
        self._precision = precision
        self._threads = threads
        self._metrics = metrics
        self._serving: dict[PlanId, Serving] = {}
        self._building = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    # ── spans ───────────────────────────────────────────────────────────────────────────────────────────────
    async def load(self, plan: Plan, span: Span, device: str, pool_tokens: int, files: ModelFiles) -> int:
        """Builds, compiles and warms the span, and returns what one layer takes for a token, in microseconds.

        Steps of other spans go on meanwhile. Raises ModelError or CapacityError.
        """

        def build() -> tuple[PagedShard, int]:
            model = PagedGraph.open(files).span(span)
            context = files.manifest.config.context
            shard = PagedShard(model, device, self._precision, pool_tokens, self._threads, context)
            shard.warm()
            mapping.release(files.weights_path)
            return shard, decode_us(shard, len(span))

        async with self._building:
            shard, measured_us = await to_its_end(build, lambda built: built[0].close())
        self._runner.add(shard)
        self._serving[plan_id(plan)] = Serving(plan, span, shard)
        return measured_us

    def unload(self, plan: PlanId) -> None:
        """Stops serving under this plan; what waits is refused."""
        serving = self._serving.pop(plan, None)
        if serving is not None:
            self._runner.drop(serving.shard, serving.shard.close)

    @property
    def serving(self) -> Sequence[Serving]:
        return tuple(self._serving.values())

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────
    def step(self, sender: PeerId, step: Step) -> None:
        """One step from the hop before; anything wrong with it ends in one refusal to its asker."""
        serving = self._serving.get(step.plan)
        if serving is None or step.route != serving.plan.owners or step.route[step.hop] != self._me:
            self._refuse(step, RefusalReason.NOT_ACCEPTED, "this agent does not serve under that plan")
            return
        if sender != (step.asker if step.hop == 0 else step.route[step.hop - 1]):
            # Whoever sends in another's name is not answered at all.
            self._metrics.count("refused.step.sender")
            return
        last = step.hop == len(step.route) - 1
        chunks = []
        begin = 0
        rows = np.asarray(step.rows, dtype=np.float32)
        for entry in step.entries:
            end = begin + entry.count
            want = entry.want if last else entry.count
            chunks.append(Chunk((step.asker, entry.sequence), entry.position, rows[begin:end], want))
            begin = end

        def done(outcome: Outcome, timing: StepTiming) -> None:
            # In the inference thread: the loop only has to send.
            message = self._outcome(step, outcome, timing)
            self._loop.call_soon_threadsafe(self._reply, step, message)

        try:
            self._runner.submit(serving.shard, Work(step.asker, chunks, done))
        except StepError as error:
            self._reply(step, self._refusal_of(step, error))

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
                self._refuse(step, RefusalReason.FAILED, "the next owner on the route cannot be reached")
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
        for serving in self._serving.values():
            self._runner.free(serving.shard, sequences)

    def _refuse(self, step: Step, reason: RefusalReason, detail: str) -> None:
        self._reply(step, Refusal(step.plan, step.step, step.hop, reason, detail, ()))

    @staticmethod
    def _refusal_of(step: Step, error: StepError) -> Refusal:
        reason = _REASONS.get(type(error), RefusalReason.FAILED)
        held = error.held if isinstance(error, MissingKv) else ()
        return Refusal(step.plan, step.step, step.hop, reason, str(error)[:DETAIL_CHARS], held)
