"""A span of layers, compiled and with its KV memory: takes hidden states in, gives hidden states back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from meshinfer.engine.blocks import BlockPool
from meshinfer.engine.device import compile_properties, core
from meshinfer.engine.step import BadStep, Chunk, Rows
from meshinfer.engine.tensors import KvMemory, RowsTensor, ScalarInput
from meshinfer.errors import CapacityError, ModelError, StepError
from meshinfer.limits import CONTEXT_TOKENS, PREFILL_CHUNK_TOKENS
from meshinfer.values import Precision

INDICES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


class PagedShard:
    """One span on one device. It may be made in any thread; then one thread at a time may use it.

    `model` is an `openvino.Model` after the paged-attention pass with an input "hidden" (f32 `[rows, hidden]`
    or `[rows, 1, hidden]`), the pass's own inputs, and one output of the same shape; an `input_ids` that is
    left in it for its shape alone is fed with zeros. `pool_tokens` is KV room in tokens, rounded up to whole
    blocks. Raises `ModelError` for a model of another kind, `CapacityError` where the device cannot hold it.

    On GPU the same code runs with the block size and KV type that the compiled model names and caches in the
    device's memory; it has not been run on a real GPU.
    """

    def __init__(
        self,
        model: Any,
        device: str,
        precision: Precision,
        pool_tokens: int,
        threads: int | None = None,
        context: int = CONTEXT_TOKENS,
    ) -> None:
        try:
            compiled = core().compile_model(model, device, compile_properties(device, precision, threads))
        except RuntimeError as error:
            raise CapacityError(f"{device} cannot compile the span: {_first_line(error)}") from error
        ports = {name: port for port in compiled.inputs for name in port.get_names()}
        hidden = _take(ports, "hidden")
        caches = [
            ports.pop(name) for name in sorted(ports) if name.startswith(("key_cache.", "value_cache."))
        ]
        self.device = device
        self.precision = precision
        self.context = context
        self.hidden, self._trailing = _row_shape(hidden)
        self._request = compiled.create_infer_request()
        self._rows = RowsTensor.reading(self._request, hidden, self._trailing)
        self._out = RowsTensor.writing(self._request, compiled.outputs[0], self._trailing)
        self._past, self._begins, self._blocks, self._block_begins = (
            RowsTensor.reading(self._request, _take(ports, name)) for name in INDICES
        )
        self._longest = ScalarInput(self._request, _take(ports, "max_context_len"))
        positions, ids = ports.pop("position_ids", None), ports.pop("input_ids", None)
        self._positions = RowsTensor.reading(self._request, positions) if positions is not None else None
        self._ids = RowsTensor.reading(self._request, ids) if ids is not None else None
        if ports:
            raise ModelError(
                f"the span wants inputs that the engine does not know: {', '.join(sorted(ports))}"
            )
        self._pool = BlockPool(max(1, -(-pool_tokens // _block_tokens(caches))), _block_tokens(caches))
        try:
            self._kv = KvMemory(self._request, caches, self._pool.blocks_total, device)
        except (MemoryError, RuntimeError) as error:
            raise CapacityError(
                f"{device} has no room for KV of {pool_tokens} tokens: {_first_line(error)}"
            ) from error

    @property
    def block_tokens(self) -> int:
        return self._pool.block_tokens

    @property
    def blocks_total(self) -> int:
        return self._pool.blocks_total

    @property
    def blocks_free(self) -> int:
        return self._pool.blocks_free

    @property
    def kv_bytes(self) -> int:
        """KV memory promised to this shard; resident only as far as it was used."""
        return self._kv.size_bytes

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        return self._pool.sequences

    def position(self, sequence: Hashable) -> int:
        """Tokens of `sequence` whose KV is here."""
        return self._pool.held(sequence)

    def free(self, sequence: Hashable) -> bool:
        """Give back the KV of `sequence`; False if there was none."""
        return self._pool.free(sequence)

    def expire(self, now: float) -> list[Hashable]:
        """Free and return the sequences whose lease ran out."""
        return self._pool.expire(now)

    def warm(self) -> None:
        """Run a piece of prompt and one token: the first inference repacks the weights, which is slow."""
        rows = np.linspace(-1, 1, PREFILL_CHUNK_TOKENS * self.hidden, dtype=np.float32)
        rows = rows.reshape(PREFILL_CHUNK_TOKENS, self.hidden)
        count = min(PREFILL_CHUNK_TOKENS, self.context - 1, self.blocks_total * self.block_tokens - 1)
        scratch = object()
        try:
            self.step([Chunk(scratch, 0, rows[:count], 0)], time.monotonic())
            self.step([Chunk(scratch, count, rows[:1], 1)], time.monotonic())
        finally:
            self.free(scratch)

    def step(self, chunks: Sequence[Chunk], now: float) -> list[Rows]:
        """Run `chunks` in one inference: f32 `[want, hidden]` for each, memory of its own.

        All or nothing: raises what `reserve` raises, and `StepError` where the result is not finite.
        """
        self.reserve(chunks, now)
        outcomes = self.run(chunks)
        for outcome in outcomes:
            if isinstance(outcome, StepError):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, StepError)]

    def reserve(self, chunks: Sequence[Chunk], now: float) -> None:
        """Check `chunks` and make room for them, all or none; then they may `run`, alone or with others'
        chunks.

        `now` is seconds, monotonic. Raises `BadStep`, `MissingKv` or `PoolFull`, with nothing changed.
        """
        for chunk in chunks:
            self._check(chunk)
        self._pool.reserve(chunks, now)

    def run(self, chunks: Sequence[Chunk]) -> list[Rows | StepError]:
        """One inference over `chunks`, all reserved, no sequence twice: f32 `[want, hidden]` or an error for
        each.

        An error means that this chunk's rows or its result were not finite: it is abandoned, or its sequence
        freed. Raises what OpenVINO raises; then all `chunks` are abandoned: their sequences hold what lies
        before them.
        """
        rows = self._feed(chunks)
        if not np.isfinite(rows).all():
            return self._run_sound(chunks)
        try:
            self._request.infer(share_outputs=True)
        except BaseException:
            self._pool.abandon(chunks)
            raise
        self._pool.commit(chunks)
        return self._collect(chunks, len(rows))

    def close(self) -> None:
        """Let go of the device's memory. Nothing else may be called afterwards."""
        del self._request, self._kv, self._rows, self._out, self._past, self._begins, self._blocks
        del self._block_begins, self._longest, self._positions, self._ids

    def _check(self, chunk: Chunk) -> None:
        rows = chunk.rows
        if rows.ndim != 2 or rows.shape[1] != self.hidden or rows.dtype != np.float32:
            raise BadStep(
                f"rows of {rows.dtype}{list(rows.shape)} for a span that takes float32[count, {self.hidden}]"
            )
        if not 0 <= chunk.want <= len(rows) or not len(rows):
            raise BadStep(f"{chunk.want} rows wanted back of {len(rows)}")
        if chunk.position < 0 or chunk.position + len(rows) > self.context:
            raise BadStep(f"positions {chunk.position}+{len(rows)} in a context of {self.context} tokens")

    def _run_sound(self, chunks: Sequence[Chunk]) -> list[Rows | StepError]:
        """`run`, without the chunks whose rows hold NaN or infinity. Found for the whole batch at once, since
        that is cheap, and looked into only then."""
        broken = [not np.isfinite(chunk.rows).all() for chunk in chunks]
        self._pool.abandon(chunk for chunk, bad in zip(chunks, broken, strict=True) if bad)
        sound = [chunk for chunk, bad in zip(chunks, broken, strict=True) if not bad]
        outcomes = iter(self.run(sound) if sound else ())
        return [BadStep("rows hold NaN or infinity") if bad else next(outcomes) for bad in broken]

    def _feed(self, chunks: Sequence[Chunk]) -> Rows:
        """Write the inputs of a step; returns all its rows, `[rows, *trailing]`."""
        counts = [len(chunk.rows) for chunk in chunks]
        total = sum(counts)
        rows = self._rows.view(total)
        self._out.view(total)
        if self._ids is not None:
            self._ids.view(total)
        flat = rows.reshape(total, self.hidden)
        end = 0
        begins = [0]
        for chunk, count in zip(chunks, counts, strict=True):
            flat[end : end + count] = chunk.rows
            end += count
            begins.append(end)
        past = [chunk.position for chunk in chunks]
        self._past.view(len(chunks))[:] = past
        self._begins.view(len(begins))[:] = begins
        self._longest.set(max(map(int.__add__, past, counts)))
        self._feed_positions(past, counts)
        self._feed_blocks(chunks)
        return rows

    def _feed_positions(self, past: Sequence[int], counts: Sequence[int]) -> None:
        if self._positions is None:
            return
        positions = self._positions.view(sum(counts))
        if len(positions) == len(past):
            positions[:] = past
        else:
            np.concatenate([np.arange(p, p + n) for p, n in zip(past, counts, strict=True)], out=positions)

    def _feed_blocks(self, chunks: Sequence[Chunk]) -> None:
        tables = [self._pool.blocks(chunk.sequence) for chunk in chunks]
        begins = list(itertools.accumulate(map(len, tables), initial=0))
        self._block_begins.view(len(begins))[:] = begins
        indices = self._blocks.view(begins[-1])
        for begin, table in zip(begins, tables, strict=False):
            indices[begin : begin + len(table)] = table

    def _collect(self, chunks: Sequence[Chunk], total: int) -> list[Rows | StepError]:
        out: Rows = self._out.view(total).reshape(total, self.hidden)
        sound = np.isfinite(out).all()
        outcomes: list[Rows | StepError] = []
        end = 0
        for chunk in chunks:
            begin, end = end, end + len(chunk.rows)
            if sound or np.isfinite(out[begin:end]).all():
                outcomes.append(out[end - chunk.want : end].copy())
            else:
                self._scrap(chunk.sequence)
                outcomes.append(StepError("the span computed NaN or infinity for this sequence"))
        return outcomes

    def _scrap(self, sequence: Hashable) -> None:
        self._kv.scrub(self._pool.blocks(sequence))
        self._pool.free(sequence)


def _take(ports: dict[str, Any], name: str) -> Any:
    if name not in ports:
        raise ModelError(f"the span has no input {name!r}: it was not made by the paged-attention pass")
    return ports.pop(name)


def _row_shape(port: Any) -> tuple[int, tuple[int, ...]]:
    """Width of a rows input and its dimensions after the first."""
    trailing = list(port.partial_shape)[1:]
    if not trailing or any(dimension.is_dynamic for dimension in trailing):
        raise ModelError(f"the span's rows have no fixed width: {port.partial_shape}")
    lengths = tuple(dimension.get_length() for dimension in trailing)
    return lengths[-1], lengths


def _block_tokens(caches: Iterable[Any]) -> int:
    """Tokens in a block, from the value caches' third dimension (keys may carry their quantization's rows in
    theirs)."""
    found = {
        list(port.partial_shape)[2].get_length()
        for port in caches
        if any(name.startswith("value_cache.") for name in port.get_names())
    }
    if len(found) != 1:
        raise ModelError(
            f"the span's KV caches have blocks of {sorted(found) or 'no'} tokens: one size was expected"
        )
    return int(found.pop())


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
