"""Work in threads that takes memory: a thread cannot be stopped, so what it makes must not be left lying about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(make: Callable[[], T], discard: Callable[[T], None]) -> T:
    """What `make` returns, made in a thread. Raises what it raises.

    Cancelled, it still waits for the thread and discards the result: else the next one would be made beside it, and
    memory be used twice.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        if not making.cancelled() and making.exception() is None:
            discard(making.result())
        raise
