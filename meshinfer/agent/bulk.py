"""Model bytes between peers: asks for what is missing here, serves what is here.

Everything is named by its SHA-256, so it does not matter who sends it: what arrives is hashed before anyone sees it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshinfer.errors import ModelError
from meshinfer.limits import BLOB_CHUNK_BYTES, FETCHES_SERVED, REQUESTS_IN_FLIGHT
from meshinfer.values import ModelId, PeerId
from meshinfer.wire.messages import Blob, Fetch, Message, Missing

ANSWER_TIMEOUT_S = 15.0
"""A peer that sent no chunk for so long is given up on, and the next one is asked."""


class BlobSource(Protocol):
    """One model on disk, as the sender needs it."""

    def blob_size(self, digest: bytes) -> int | None: ...

    def read_blob(self, digest: bytes, offset: int, length: int) -> bytes: ...


@dataclass(slots=True)
class _Request:
    peer: PeerId
    answer: asyncio.Future[Blob | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Bulk:
    """The bulk channel of one agent."""

    def __init__(
        self,
        send: Callable[[PeerId, Message], bool],
        source: Callable[[ModelId], BlobSource | None],
    ) -> None:
        self._send = send
        self._source = source
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._served: Counter[PeerId] = Counter()

    def received(self, peer: PeerId, message: Message) -> None:
        """Takes one message of the bulk channel; answers that nobody waits for are ignored."""
        if isinstance(message, Fetch):
            if self._served[peer] >= FETCHES_SERVED:
                self._send(peer, Missing(request=message.request, digest=message.digest))
                return
            self._served[peer] += 1
            task = asyncio.create_task(self._serve(peer, message))
            self._serving.add(task)
            task.add_done_callback(lambda done: self._finished(peer, done))
        elif isinstance(message, Blob | Missing):
            request = self._requests.get(message.request)
            if request is not None and request.peer == peer and not request.answer.done():
                request.answer.set_result(message if isinstance(message, Blob) else None)

    def _finished(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._served[peer] -= 1
        if not self._served[peer]:
            del self._served[peer]

    async def fetch(self, peers: Sequence[PeerId], model: ModelId, digest: bytes, most_bytes: int) -> bytes:
        """The bytes whose SHA-256 is `digest`, from the first of `peers` that has them whole and right.

        Raises ModelError, with the reason of each peer, when none has.
        """
        reasons = []
        for peer in peers:
            try:
                return await self._fetch_from(peer, model, digest, most_bytes)
            except ModelError as error:
                reasons.append(f"{peer[:8]}: {error}")
        raise ModelError(
            f"no peer could send a part of model {model[:12]} ({'; '.join(reasons) or 'none of those here has it'})"
        )

    async def _fetch_from(self, peer: PeerId, model: ModelId, digest: bytes, most_bytes: int) -> bytes:
        first = await self._ask(peer, model, digest, 0, BLOB_CHUNK_BYTES)
        if first.total > most_bytes:
            raise ModelError(f"announced {first.total} bytes where {most_bytes} are the most")
        data = bytearray(first.total)
        self._put(data, first)
        slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

        async def one(offset: int) -> None:
            async with slots:
                self._put(data, await self._ask(peer, model, digest, offset, BLOB_CHUNK_BYTES))

        try:
            async with asyncio.TaskGroup() as group:
                for offset in range(len(first.body), first.total, BLOB_CHUNK_BYTES):
                    group.create_task(one(offset))
        except* ModelError as errors:
            raise errors.exceptions[0] from None
        if hashlib.sha256(data).digest() != digest:
            raise ModelError("sent bytes whose hash is wrong")
        return bytes(data)

    @staticmethod
    def _put(data: bytearray, blob: Blob) -> None:
        due = min(BLOB_CHUNK_BYTES, len(data) - blob.offset)
        if blob.total != len(data) or len(blob.body) != due:
            raise ModelError("sent a chunk of another length than asked for")
        data[blob.offset : blob.offset + due] = blob.body

    async def _ask(self, peer: PeerId, model: ModelId, digest: bytes, offset: int, length: int) -> Blob:
        number = next(self._numbers)
        request = self._requests[number] = _Request(peer)
        try:
            fetch = Fetch(model=model, digest=digest, offset=offset, length=length, request=number)
            if not self._send(peer, fetch):
                raise ModelError("is not connected")
            blob = await asyncio.wait_for(request.answer, ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise ModelError(f"sent nothing for {ANSWER_TIMEOUT_S:.0f} s") from None
        finally:
            del self._requests[number]
        if blob is None:
            raise ModelError("does not have it")
        if blob.digest != digest or blob.offset != offset:
            raise ModelError("sent another chunk than asked for")
        return blob

    async def _serve(self, peer: PeerId, fetch: Fetch) -> None:
        source = self._source(fetch.model)
        total = source.blob_size(fetch.digest) if source is not None else None
        if source is None or total is None or fetch.offset >= max(total, 1):
            self._send(peer, Missing(request=fetch.request, digest=fetch.digest))
            return
        length = min(fetch.length, BLOB_CHUNK_BYTES, total - fetch.offset)
        try:
            body = await asyncio.to_thread(source.read_blob, fetch.digest, fetch.offset, length)
        except (OSError, ModelError):
            self._send(peer, Missing(request=fetch.request, digest=fetch.digest))
            return
        self._send(
            peer,
            Blob(request=fetch.request, digest=fetch.digest, offset=fetch.offset, total=total, body=body),
        )

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
