"""What a model's layers take of a peer's memory, and so which spans fit where and with how much room for keys and
values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshinfer.mesh.lanes import Lane
from meshinfer.mesh.plan import facts_of, shards_of
from meshinfer.values import Advert, KvShape, ModelFacts, PeerId, Plan, Precision, ShardKey, Span

LEAST_POOL_TOKENS = 2048
"""KV room that an owner must have at least, or the model's context where that is shorter: one long
question."""

MOST_POOL_TOKENS = 65_536
CONTEXTS_IN_POOL = 16
"""More KV room than 16 full contexts or 65,536 tokens serves nobody, and the memory is better left to the
PC's user."""

POOL_STEP_TOKENS = 32
"""Pools are whole blocks of the engine's (32 tokens on CPU), rounded down, so that none exceeds its memory."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What memory a device needs, in bytes; the engine knows, and agents of one program version agree.

    `kv_bytes`: one layer, one token. `layer_bytes`: one layer with weights of so many bytes on disk, loaded.
    `span_bytes`: what a span of a model of this width takes besides, however many layers it has.
    """

    kv_bytes: Callable[[KvShape, Precision, str], int]
    layer_bytes: Callable[[int], int]
    span_bytes: Callable[[int], int]


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A peer that could own a span. `decode_us` and `prefill_us` are for one average layer and one token, 0 while
    unknown."""

    peer: PeerId
    incarnation: int
    capacity_bytes: int
    allocation_bytes: int
    decode_us: int
    prefill_us: int
    precision: Precision
    device: str

    @classmethod
    def of(cls, advert: Advert, decode_us: int = 0, prefill_us: int = 0) -> Candidate:
        """The times are those of a peer that has not measured its own."""
        return cls(
            advert.peer,
            advert.incarnation,
            advert.capacity_bytes,
            advert.allocation_bytes,
            advert.decode_us or decode_us,
            advert.prefill_us or prefill_us,
            advert.precision,
            advert.device,
        )


def memory_bytes(facts: ModelFacts, costs: Costs, shards: Iterable[ShardKey], precision: Precision) -> int:
    """What shards of one model take of a peer's memory: weights and the whole KV pools, equal ones once."""
    total = 0
    for shard in set(shards):
        first, last = shard.span.first, shard.span.last
        weights = sum(map(costs.layer_bytes, facts.layer_bytes[first:last]))
        each = sum(costs.kv_bytes(kv, precision, shard.device) for kv in facts.kv[first:last])
        total += costs.span_bytes(facts.hidden) + weights + shard.pool_tokens * each
    return total


class Table:
    """A model's sums: bytes, work and KV of layers [0, b), so that every span is a difference."""

    def __init__(self, facts: ModelFacts, costs: Costs) -> None:
        self.facts = facts
        self.costs = costs
        self.least_tokens = max(1, min(facts.context, LEAST_POOL_TOKENS))
        self.fixed = costs.span_bytes(facts.hidden)
        self.layer_bytes = tuple(map(costs.layer_bytes, facts.layer_bytes))
        self.weights = tuple(accumulate(self.layer_bytes, initial=0))
        # A layer's time follows its bytes: decoding is bound by reading them.
        work = facts.layer_bytes if any(facts.layer_bytes) else (1,) * facts.layers
        self.done = tuple(accumulate(work, initial=0))
        self.all_work = self.done[-1]
        self._kv: dict[tuple[Precision, str], tuple[int, ...]] = {}
        self._reach: dict[tuple[Precision, str, int, int], tuple[int, ...]] = {}
        self._load: dict[frozenset[Span], tuple[int, ...]] = {}

    def kv(self, precision: Precision, device: str) -> tuple[int, ...]:
        """KV bytes of one token in layers [0, b)."""
        known = self._kv.get((precision, device))
        if known is None:
            each = (self.costs.kv_bytes(shape, precision, device) for shape in self.facts.kv)
            known = self._kv[precision, device] = tuple(accumulate(each, initial=0))
        return known

    def kv_of(self, candidate: Candidate, span: Span) -> int:
        kv = self.kv(candidate.precision, candidate.device)
        return kv[span.last] - kv[span.first]

    def bytes_of(self, candidate: Candidate, span: Span, pool_tokens: int = 0) -> int:
        """What a span takes there with so much KV, or with the least."""
        weights = self.weights[span.last] - self.weights[span.first]
        return self.fixed + weights + (pool_tokens or self.least_tokens) * self.kv_of(candidate, span)

    def reach(self, candidate: Candidate, free_bytes: int) -> tuple[int, ...]:
        """See `lanes.Lane.reach`. Many peers are alike, so equal ones share it."""
        key = (candidate.precision, candidate.device, free_bytes, candidate.allocation_bytes)
        known = self._reach.get(key)
        if known is None:
            known = self._reach[key] = self._measure(candidate, free_bytes)
        return known

    def _measure(self, candidate: Candidate, free_bytes: int) -> tuple[int, ...]:
        kv = self.kv(candidate.precision, candidate.device)
        sums = [weights + self.least_tokens * each for weights, each in zip(self.weights, kv, strict=True)]
        end = self.facts.layers
        reach = [end]
        for first in range(self.facts.layers - 1, -1, -1):
            if not self._allocatable(candidate, first):
                end = first
            fits = bisect_right(sums, sums[first] + free_bytes - self.fixed) - 1
            reach.append(max(first, min(end, fits)))
        return tuple(reversed(reach))

    def _allocatable(self, candidate: Candidate, layer: int) -> bool:
        bound = candidate.allocation_bytes
        return bound <= 0 or self.buffer_bytes(candidate, layer) <= bound

    def buffer_bytes(self, candidate: Candidate, layer: int) -> int:
        """The largest piece of memory that a layer takes there: its weights, or its least KV."""
        kv = self.kv_of(candidate, Span(layer, layer + 1))
        return max(self.layer_bytes[layer], self.least_tokens * kv)

    def most_tokens(self, candidate: Candidate, span: Span) -> int:
        """The largest pool that makes sense there, and that the device can allocate."""
        context = self.facts.context
        most = max(context, min(CONTEXTS_IN_POOL * context, MOST_POOL_TOKENS), self.least_tokens)
        kv = self.kv(candidate.precision, candidate.device)
        largest = max(kv[layer + 1] - kv[layer] for layer in range(span.first, span.last))
        if candidate.allocation_bytes > 0 and largest > 0:
            most = min(most, candidate.allocation_bytes // largest)
        return most

    def load(self, there: frozenset[Span]) -> tuple[int, ...]:
        """Bytes that loading layers [0, b) moves where the weights of these spans are on disk: each layer once into
        memory, and once over the network where it is not there."""
        known = self._load.get(there)
        if known is None:
            sizes = (
                size if any(layer in span for span in there) else 2 * size
                for layer, size in enumerate(self.facts.layer_bytes)
            )
            known = self._load[there] = tuple(accumulate(sizes, initial=0))
        return known


class Room:
    """A candidate with what it has room for. `pools` are the tokens of the spans that are loaded there, `kept` those of
    them whose memory is promised already."""

    def __init__(
        self,
        candidate: Candidate,
        table: Table,
        price_us: int,
        taken_bytes: int = 0,
        kept: Iterable[ShardKey] = (),
        keep: Plan | None = None,
    ) -> None:
        self.candidate = candidate
        self.table = table
        self.free_bytes = candidate.capacity_bytes - taken_bytes
        self.pools: dict[Span, int] = {}
        self.kept = self._take(kept)
        there = set(self.kept)
        if keep is not None and keep.model == table.facts.model and keep.layers == table.facts.layers:
            there.update(shard.span for shard in shards_of(keep, candidate.peer))
            self._take_loaded(keep)
        # A speed is for the average layer: a layer's time is the speed × its work × layers ÷ all work. The
        # division comes last, so that comparisons lose nothing.
        price = max(1, price_us) * table.facts.layers
        load = table.load(frozenset(there)) if keep is not None else ()
        self.lane = Lane(price, table.reach(candidate, self.free_bytes), frozenset(self.pools), load)

    def _take(self, shards: Iterable[ShardKey]) -> frozenset[Span]:
        """The spans of shards that could serve here, the one with the larger pool where two have the same."""
        for shard in shards:
            if self._serves(shard):
                self.pools[shard.span] = max(shard.pool_tokens, self.pools.get(shard.span, 0))
        return frozenset(self.pools)

    def _serves(self, shard: ShardKey) -> bool:
        facts = self.table.facts
        ours = shard.model == facts.model and shard.span.last <= facts.layers
        return ours and shard.device == self.candidate.device and shard.pool_tokens >= self.table.least_tokens

    def _take_loaded(self, keep: Plan) -> None:
        """Spans of a plan that are loaded, unless the peer was restarted or its memory is no longer enough."""
        one, then = self.candidate, facts_of(keep, self.candidate.peer)
        if then is None or (then.incarnation, then.precision) != (one.incarnation, one.precision):
            return
        for shard in shards_of(keep, one.peer):
            needed = self.table.bytes_of(one, shard.span, shard.pool_tokens)
            if shard.span not in self.pools and self._serves(shard) and needed <= self.free_bytes:
                self.pools[shard.span] = shard.pool_tokens

    @property
    def useful(self) -> bool:
        """Whether any layer can be here."""
        return bool(self.pools) or any(last > first for first, last in enumerate(self.lane.reach[:-1]))

    def needed_bytes(self, span: Span) -> int:
        """What a span claims here beyond what is promised: as it is loaded, else with the least KV."""
        if span in self.kept:
            return 0
        return self.table.bytes_of(self.candidate, span, self.pools.get(span, 0))

    def strain(self, span: Span) -> int:
        """How full the memory would be, in thousandths."""
        return self.needed_bytes(span) * 1000 // max(1, self.candidate.capacity_bytes)

    def pool_tokens(self, spans: Sequence[Span]) -> dict[Span, int]:
        """Room for keys and values of spans that are here together. Loaded ones stay as they are; half of what is left
        of the memory is shared so that the others have room for equally many tokens, within reason. The other half is
        for the plan that takes over one day: it is loaded while this one still serves."""
        table, one = self.table, self.candidate
        spare = (self.free_bytes - sum(map(self.needed_bytes, spans))) // 2
        each = sum(table.kv_of(one, span) for span in spans if span not in self.pools)
        pools: dict[Span, int] = {}
        for span in spans:
            if span in self.pools:
                pools[span] = self.pools[span]
                continue
            most = table.most_tokens(one, span)
            if each > 0:
                most = min(most, table.least_tokens + spare // each)
            pools[span] = max(table.least_tokens, most - most % POOL_STEP_TOKENS)
        return pools
