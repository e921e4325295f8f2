"""If these fail, one person's answer reads another's KV, memory leaks away, or a plan promises memory it has
not."""

from __future__ import annotations

import pytest
from engine_models import graph
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshinfer.engine.blocks import BlockPool, kv_block_bytes, kv_bytes_per_token
from meshinfer.engine.device import compile_properties, core
from meshinfer.engine.memory import span_cost_bytes
from meshinfer.engine.step import BadStep, MissingKv, PoolFull
from meshinfer.limits import LEASE_S
from meshinfer.values import KvShape, Precision, Span

BLOCKS, BLOCK_TOKENS = 12, 4


class Write:
    def __init__(self, sequence: int, position: int, count: int) -> None:
        self.sequence, self.position, self.count = sequence, position, count


class Pool(RuleBasedStateMachine):
    """The pool beside a dictionary of how many tokens each sequence should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        self.held: dict[int, int] = {}
        self.touched: dict[int, float] = {}
        self.now = 0.0
        self.under_way: list[Write] = []

    def blocks_wanted(self, writes: list[Write]) -> int:
        ends = self.held | {write.sequence: write.position + write.count for write in writes}
        return sum(-(-end // BLOCK_TOKENS) for end in ends.values())

    @precondition(lambda self: not self.under_way)
    @rule(
        asked=st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=3
        )
    )
    def reserve(self, asked: list[tuple[int, int, int]]) -> None:
        writes = [Write(*one) for one in asked]
        before = self.picture()
        names = [write.sequence for write in writes]
        held = [self.held.get(name, 0) for name in names]
        if any(write.position > has for write, has in zip(writes, held, strict=True)):
            with pytest.raises(MissingKv) as missing:
                self.pool.reserve(writes, self.now)
            assert missing.value.held == tuple(held)
        elif len(set(names)) < len(names):
            with pytest.raises(BadStep):
                self.pool.reserve(writes, self.now)
        elif self.blocks_wanted(writes) > BLOCKS:
            with pytest.raises(PoolFull):
                self.pool.reserve(writes, self.now)
        else:
            self.pool.reserve(writes, self.now)
            self.under_way = writes
            for write in writes:
                self.held[write.sequence] = write.position
                self.touched[write.sequence] = self.now
            return
        assert self.picture() == before, "a refused step changed something"

    @precondition(lambda self: self.under_way)
    @rule()
    def commit(self) -> None:
        self.pool.commit(self.under_way)
        for write in self.under_way:
            self.held[write.sequence] = write.position + write.count
        self.under_way = []

    @precondition(lambda self: self.under_way)
    @rule()
    def abandon(self) -> None:
        self.pool.abandon(self.under_way)
        for write in self.under_way:
            if not write.position:
                del self.held[write.sequence]
        self.under_way = []

    @precondition(lambda self: not self.under_way)
    @rule(sequence=st.integers(0, 4))
    def free(self, sequence: int) -> None:
        assert self.pool.free(sequence) == (self.held.pop(sequence, None) is not None)

    @precondition(lambda self: not self.under_way)
    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {name for name in self.held if self.now - self.touched[name] >= LEASE_S}
        assert set(self.pool.expire(self.now)) == late
        self.held = {name: tokens for name, tokens in self.held.items() if name not in late}

    def picture(self) -> object:
        return {name: (self.pool.held(name), self.pool.blocks(name).tolist()) for name in self.pool.sequences}

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for name in self.pool.sequences for block in self.pool.blocks(name).tolist()]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(BLOCKS))
        assert len(owned) + self.pool.blocks_free == BLOCKS

    @invariant()
    def each_sequence_has_just_its_blocks(self) -> None:
        ends = {write.sequence: write.position + write.count for write in self.under_way}
        assert set(self.pool.sequences) == set(self.held)
        for name, tokens in self.held.items():
            assert self.pool.held(name) == tokens
            assert len(self.pool.blocks(name)) == -(-ends.get(name, tokens) // BLOCK_TOKENS)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_kept_blocks_are_the_same_after_a_rollback() -> None:
    """Else the tokens before the rollback would be read from another's memory."""
    pool = BlockPool(8, 4)
    pool.reserve([Write(1, 0, 14)], 0.0)
    pool.commit([Write(1, 0, 14)])
    before = pool.blocks(1).tolist()
    pool.reserve([Write(1, 5, 1)], 0.0)
    assert pool.blocks(1).tolist() == before[:2]


def test_blocks_used_before_are_used_first() -> None:
    """Else a pool's memory becomes resident bit by bit, though little of it is ever needed at once."""
    pool = BlockPool(100, 4)
    for sequence in range(50):
        pool.reserve([Write(sequence, 0, 8)], 0.0)
        assert set(pool.blocks(sequence).tolist()) == {0, 1}
        pool.free(sequence)


@given(
    kv=st.builds(KvShape, st.integers(1, 64), st.integers(1, 512), st.integers(1, 512)),
    precision=st.sampled_from(Precision),
    device=st.sampled_from(["CPU", "GPU", "GPU.1"]),
)
def test_a_token_never_costs_more_than_is_promised(kv: KvShape, precision: Precision, device: str) -> None:
    tokens = 16 if device.startswith("GPU") else 32
    each = kv_bytes_per_token(kv, precision, device)
    assert (each - 1) * tokens < kv_block_bytes(kv, precision, device) <= each * tokens


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_kv_bytes_are_those_of_the_compiled_model(name: str, precision: Precision) -> None:
    model = graph(name)
    compiled = core().compile_model(model.span(Span(2, 3)), "CPU", compile_properties("CPU", precision))
    size = 0
    for port in compiled.inputs:
        if port.any_name.startswith(("key_cache.", "value_cache.")):
            each = port.element_type.size
            for dimension in list(port.partial_shape)[1:]:
                each *= dimension.get_length()
            size += each
    assert kv_block_bytes(model.kv[2], precision, "CPU") == size


def test_kv_of_a_known_model() -> None:
    """SmolLM2: key [?,3,40,64] and value [?,3,32,72] of u8 per block of 32 tokens."""
    kv = KvShape(heads=3, key=64, value=64)
    assert kv_block_bytes(kv, Precision.AUTO, "CPU") == 3 * (40 * 64 + 32 * 72)
    assert kv_bytes_per_token(kv, Precision.EXACT, "CPU") == 3 * 128 * 4


def test_the_cost_of_measured_spans_is_covered_but_not_wildly() -> None:
    """Measured: see `layer_cost_bytes`. A third more is room; twice as much would be waste."""
    for layers, weights, taken in ((30, 57, 187), (15, 29, 106)):
        cost = span_cost_bytes([weights * 2**20 // layers] * layers, 576, 0) / 2**20
        assert taken <= cost <= 1.5 * taken
    assert 716e6 <= span_cost_bytes([634_000_000 // 22] * 22, 2048, 0) <= 1.35 * 716e6
