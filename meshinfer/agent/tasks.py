"""What an agent does side by side in its loop: begun with it, ended with it, and never ended by an error alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from meshinfer import limits

_log = logging.getLogger(__name__)


class Tasks:
    """Belongs to one loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep_doing(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begins `work`, which has no end, anew where something breaks it: a disk, an interface, a defect."""
        self.spawn(self._keep_doing(work))

    async def end(self) -> None:
        """Cancels all, and waits until they have ended."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_doing(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                _log.exception("the agent goes on after an error")
                await asyncio.sleep(limits.HEARTBEAT_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A defect: said loudly, and the agent goes on with what still works.
            _log.error("a task of the agent failed", exc_info=error)
