"""How fast this PC's shards are: measured when they are loaded, again when that has settled, and watched ever after."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshinfer.agent.shards import Loaded
from meshinfer.agent.speeds import Speeds, differs
from meshinfer.engine.runner import Runner
from meshinfer.engine.speed import PREFILL_ROWS, Speed, measure
from meshinfer.errors import StepError
from meshinfer.limits import MEASURE_AGAIN, MEASURE_AGAIN_S, MEASURE_S
from meshinfer.values import ModelId, Precision, ShardKey

FEW_LAYERS: Final = 4
"""In a shorter span, what a step costs however few its layers (0.3 ms) weighs too much: it tells a speed only where
none is known."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of the speeds on this PC as it is set up now."""

    speeds: Speeds
    precision: Precision
    threads: int | None

    def get(self, shard: ShardKey) -> Speed:
        return self.speeds.get(shard.model, shard.device, self.precision, self.threads)

    def put(self, shard: ShardKey, speed: Speed) -> bool:
        """Whether it was news."""
        return self.speeds.put(shard.model, shard.device, self.precision, self.threads, speed)


class Measuring:
    """All methods belong to the loop."""

    def __init__(
        self,
        runner: Runner,
        kept: Kept,
        wanting: Callable[[Loaded], bool],
        changed: Callable[[ShardKey, Speed], None],
    ) -> None:
        """`wanting` says whether a shard may be measured now; `changed` hears of what is kept from now on."""
        self._runner = runner
        self._kept = kept
        self._wanting = wanting
        self._changed = changed
        self._best: dict[tuple[ModelId, str], Speed] = {}
        self._loop = asyncio.get_running_loop()

    def begin(self, loaded: Loaded) -> None:
        """A shard has been loaded and measured.

        Other shards were perhaps loading meanwhile, here or on the same PC, so that it may be far too slow: it is
        measured again when that has settled, until it says the same twice. Till then it only tells what was not known
        at all.
        """
        best = self._take(loaded, loaded.speed)
        known = self._kept.get(loaded.key)
        self._keep(loaded, Speed(known.decode_us or best.decode_us, known.prefill_us or best.prefill_us))
        self._later(loaded, MEASURE_AGAIN)

    def _later(self, loaded: Loaded, times: int) -> None:
        if times:
            self._loop.call_later(MEASURE_AGAIN_S, self._measure_again, loaded, times - 1)

    def _measure_again(self, loaded: Loaded, times: int) -> None:
        if not self._wanting(loaded):
            self._later(loaded, times)
            return
        # Whoever asks just then waits for it: so long that a large span's prompts are not tried again.
        prompts = loaded.speed.prefill_us * loaded.layers * PREFILL_ROWS < MEASURE_S * 1e6

        def done(outcome: Speed | Exception) -> None:
            self._loop.call_soon_threadsafe(self._measured_again, loaded, outcome, times)

        try:
            self._runner.call(lambda: measure(loaded.shard, loaded.layers, prompts=prompts), done)
        except StepError:
            _log.debug("the device's thread has ended: nothing is measured any more")

    def _measured_again(self, loaded: Loaded, outcome: Speed | Exception, times: int) -> None:
        if isinstance(outcome, Exception):
            _log.info("layers %s could not be measured again: %s", loaded.key.span, outcome)
            return
        settled = not times or not differs(outcome.decode_us, loaded.speed.decode_us)
        loaded.speed = loaded.speed.best(outcome)
        best = self._take(loaded, loaded.speed)
        if not settled:
            self._later(loaded, times)
        elif loaded.layers < FEW_LAYERS:
            self._keep(loaded, best.best(self._kept.get(loaded.key)))
        else:
            self._keep(loaded, best)

    def _take(self, loaded: Loaded, measured: Speed) -> Speed:
        """The best that shards of one model on one device have shown since the last drift.

        Each by itself would say something else, and the advert would go up and down.
        """
        subject = loaded.key.model, loaded.key.device
        best = self._best.get(subject)
        if best is None:
            best = measured
        elif loaded.layers >= FEW_LAYERS:
            best = best.best(measured)
        self._best[subject] = best
        return best

    def note(self, loaded: Loaded, compute_us: int, rows: int, position: int) -> None:
        """A real step of one sequence, alone in its batch."""
        if not loaded.pace.note(self._loop.time(), compute_us, rows, position) or loaded.layers < FEW_LAYERS:
            return
        drifted = loaded.pace.drifted(self._kept.get(loaded.key))
        if drifted is not None:
            self._keep(loaded, drifted)
            self._best[loaded.key.model, loaded.key.device] = self._kept.get(loaded.key)

    def _keep(self, loaded: Loaded, speed: Speed) -> None:
        before = self._kept.get(loaded.key)
        if self._kept.put(loaded.key, speed):
            now = self._kept.get(loaded.key)
            _log.info("a layer takes %s now, and took %s", now, before)
            self._changed(loaded.key, now)
