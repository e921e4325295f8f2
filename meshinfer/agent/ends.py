"""The two ends of the model that asking needs here, embedding and head: had before somebody asks, and given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from meshinfer.agent.asker import Asker
from meshinfer.agent.config import EngineConfig
from meshinfer.agent.library import Library
from meshinfer.agent.speaker import Speaker
from meshinfer.agent.threads import to_its_end
from meshinfer.answer.question import Question
from meshinfer.engine.runner import Runner
from meshinfer.errors import CapacityError, ModelError
from meshinfer.model.weights import ModelFiles
from meshinfer.net import loop as clock
from meshinfer.net.process import give_back
from meshinfer.values import ModelId, Plan

PREPARE_AGAIN_S: Final = 30.0
"""Embedding and head that could not be had are tried again after so long: who has them may be back, or a disk empty."""

FAREWELL_S: Final = 20.0
"""Answers under way are ended so long after the mesh has begun to serve another model; who asks that one waits."""

_log = logging.getLogger(__name__)


class Fetch(Protocol):
    """Brings the files that asking needs to this PC's disk."""

    async def __call__(self, files: ModelFiles) -> None: ...


class Ends:
    """Belongs to the loop."""

    def __init__(
        self,
        asker: Asker,
        library: Library,
        runner: Runner,
        engine: EngineConfig,
        device: str,
        fetch: Fetch,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._asker = asker
        self._library = library
        self._runner = runner
        self._engine = engine
        self._device = device
        self._fetch = fetch
        self._spawn = spawn
        self._speaker: Speaker | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._making = asyncio.Lock()
        self._again: tuple[float, Plan] | None = None
        self.trouble: str | None = None
        """Why nobody can be answered here though there is a plan."""

    def prepare(self, plan: Plan, refused: str | None) -> None:
        """Have embedding, head and tokenizer at hand for this plan; `refused` says why nobody may ask here."""
        self.drop_plan()
        self.trouble = refused
        if refused is not None:
            return
        if self._speaker is not None and self._speaker.model == plan.model:
            self._asker.use(plan, self._speaker)
        else:
            self._preparing = self._spawn(self._prepare(plan))

    def drop_plan(self) -> None:
        """No plan is usable: nothing is prepared, but what is at hand stays there for the next one."""
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None
        self.trouble = self._again = None

    def look_again(self) -> None:
        """Try anew what failed a while ago."""
        if self._again is not None and self._again[0] <= clock.monotonic():
            self.prepare(self._again[1], None)

    async def prepared(self) -> None:
        """Until what is being prepared is at hand, or is not to be had."""
        if self._preparing is not None:
            await asyncio.wait([self._preparing])

    def check_model(self, question: Question) -> None:
        """Raises ModelError for a question to a model that is not served."""
        served, wanted = self._speaker, question.model
        if wanted is None or served is None:
            return
        if wanted != served.name and not (len(wanted) >= 6 and served.model.startswith(wanted)):
            raise ModelError(
                f"the mesh serves {served.name}, not {wanted!r}: ask without naming a model, or set [model] default"
            )

    async def _prepare(self, plan: Plan) -> None:
        try:
            self._asker.use(plan, await self._make_speaker(plan.model))
        except (ModelError, CapacityError) as error:
            self.trouble = str(error)
            self._again = (clock.monotonic() + PREPARE_AGAIN_S, plan)
            _log.warning("nobody can ask here: %s", error)
        except Exception as error:
            self.trouble = f"an unexpected {type(error).__name__} while loading the model's ends: see the log"
            _log.exception("nobody can ask here")

    async def _make_speaker(self, model: ModelId) -> Speaker:
        if self._speaker is not None:
            # Answers of the model that was served so far may end as they began, for as long as its owners serve it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._asker.quiet.wait()
        self._drop_speaker()
        files = self._library.files(model)
        if files is None:
            raise ModelError(f"the description of model {model[:12]} is gone from this PC's disk")
        await self._fetch(files)
        engine = self._engine
        async with self._making:
            speaker = await to_its_end(
                lambda: Speaker(files, self._device, engine.precision, engine.threads), Speaker.close
            )
        self._speaker = speaker
        await asyncio.to_thread(give_back)
        return speaker

    def _drop_speaker(self) -> None:
        """Memory of one model's ends is given back before another's are loaded; nobody may use them any more."""
        self._asker.end("the mesh is about to serve another model")
        speaker, self._speaker = self._speaker, None
        if speaker is not None:
            self._runner.call(speaker.close, lambda _: None)
