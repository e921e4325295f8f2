"""If these fail, a plan is served that was not agreed, an answer loses its KV when plans change, memory is used twice,
or plans are computed from speeds that no longer hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from engine_models import rows, run, shard
from model_zoo import adopted

from meshinfer import limits
from meshinfer.agent import measuring
from meshinfer.agent import owner as owning
from meshinfer.agent import pace as pacing
from meshinfer.agent.metrics import Metrics
from meshinfer.agent.owner import Owner
from meshinfer.agent.speeds import Speeds
from meshinfer.engine.runner import Runner
from meshinfer.engine.shard import PagedShard
from meshinfer.engine.speed import Speed
from meshinfer.errors import CapacityError
from meshinfer.mesh.plan import plan_id
from meshinfer.model.weights import ModelFiles
from meshinfer.values import Assignment, PeerId, Plan, Precision, ShardKey, Span
from meshinfer.wire.messages import Entry, Free, Message, Refusal, RefusalReason, Result, Rows, Step

ME, OTHER, ASKER = PeerId("aa" * 16), PeerId("bb" * 16), PeerId("cc" * 16)
LAYERS = 6
POOL = 1024
WHOLE = Span(0, LAYERS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return adopted("llama", tmp_path_factory.mktemp("store"))


class Bench:
    """An owner with a real device thread; what it sends is kept, and waited for."""

    def __init__(self, home: Path, files: ModelFiles) -> None:
        self.files = files
        self.speeds = Speeds(home)
        self.told: list[tuple[ShardKey, Speed]] = []
        self.metrics = Metrics()
        self.runner = Runner("CPU")
        self.sent: asyncio.Queue[tuple[PeerId, Message]] = asyncio.Queue()
        self.owner = Owner(
            ME,
            self.runner,
            self._send,
            Precision.EXACT,
            None,
            self.metrics,
            self.speeds,
            lambda key, speed: self.told.append((key, speed)),
        )
        self._steps = 0

    def _send(self, peer: PeerId, message: Message) -> bool:
        self.sent.put_nowait((peer, message))
        return True

    def key(self, span: Span) -> ShardKey:
        return ShardKey(self.files.model, span, "CPU", POOL)

    def plan(
        self, *owners: tuple[PeerId, Span], number: int = 1, standbys: tuple[PeerId, Span] | None = None
    ) -> Plan:
        assignments = tuple(Assignment(peer, span, "CPU", POOL) for peer, span in owners)
        standing_by = () if standbys is None else (Assignment(*standbys, "CPU", POOL),)
        return Plan(self.files.model, LAYERS, number, None, assignments, standing_by, (), 1000, 1000)

    async def serve(self, plan: Plan, *spans: Span) -> Plan:
        for span in spans:
            await self.owner.load(self.key(span), self.files)
        self.owner.serve(plan, tuple(map(self.key, spans)))
        return plan

    async def step(
        self,
        plan: Plan,
        data: Rows,
        position: int = 0,
        sequence: int = 1,
        *,
        hop: int = 0,
        route: tuple[PeerId, ...] | None = None,
        sender: PeerId = ASKER,
    ) -> Message:
        """What one step is answered with, wherever that goes."""
        self._steps += 1
        entry = Entry(sequence, position, len(data), len(data))
        given = route or plan.owners
        self.owner.step(sender, Step(plan_id(plan), given, hop, ASKER, self._steps, (entry,), (), data))
        async with asyncio.timeout(20):
            return (await self.sent.get())[1]

    def blocks(self, span: Span) -> int:
        """In use."""
        found = next(loaded.shard for loaded in self.owner.loaded if loaded.key.span == span)
        return found.blocks_total - found.blocks_free

    async def settled(self) -> None:
        """All that the device's thread was asked so far is done."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.runner.call(lambda: None, lambda _: loop.call_soon_threadsafe(done.set))
        await done.wait()


@pytest.fixture
async def bench(tmp_path: Path, files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(measuring, "MEASURE_AGAIN_S", 1000.0)
    made = Bench(tmp_path, files)
    yield made
    await asyncio.to_thread(made.runner.close)


def refused(message: Message) -> RefusalReason:
    assert isinstance(message, Refusal), message
    return message.reason


def result(message: Message) -> Rows:
    assert isinstance(message, Result), message
    return message.rows


# ── what is served ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_step_runs_on_the_shard_of_its_hop(bench: Bench) -> None:
    """This PC owns the middle of one plan and stands by for its end: only the middle is run for its owners."""
    first, middle, end = Span(0, 2), Span(2, 4), Span(4, 6)
    plan = bench.plan((OTHER, first), (ME, middle), (ASKER, end), standbys=(ME, end))
    await bench.serve(plan, middle)
    await bench.serve(plan, middle, end)
    data = rows(5)
    message = await bench.step(plan, data, hop=1, sender=OTHER)
    assert isinstance(message, Step)
    assert message.hop == 2
    assert len(message.trace) == 1
    assert np.allclose(message.rows, run(shard("llama", 2, 4), 1, data), atol=1e-4)
    assert refused(await bench.step(plan, data, hop=2, sender=ME)) is RefusalReason.NOT_ACCEPTED


async def test_only_plans_that_are_served_are_run(bench: Bench) -> None:
    plan, other = bench.plan((ME, WHOLE)), bench.plan((ME, WHOLE), number=2)
    await bench.serve(plan, WHOLE)
    assert refused(await bench.step(other, rows(2))) is RefusalReason.NOT_ACCEPTED
    assert refused(await bench.step(plan, rows(2), route=(ME, OTHER))) is RefusalReason.NOT_ACCEPTED
    assert refused(await bench.step(plan, rows(2), route=(OTHER,))) is RefusalReason.NOT_ACCEPTED
    assert len(result(await bench.step(plan, rows(2)))) == 2


async def test_a_step_in_another_s_name_is_not_answered(bench: Bench) -> None:
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    entry = Entry(1, 0, 1, 1)
    bench.owner.step(OTHER, Step(plan_id(plan), plan.owners, 0, ASKER, 1, (entry,), (), rows(1)))
    await bench.settled()
    assert bench.sent.empty()
    assert bench.metrics.counts["refused.step.sender"] == 1


async def test_a_plan_is_served_before_its_own_span_is_there_only_as_a_standby(bench: Bench) -> None:
    """Steps for a span that is not loaded yet are refused, and run once it is."""
    plan = bench.plan((ME, Span(0, 3)), (OTHER, Span(3, 6)), standbys=(ME, Span(3, 6)))
    await bench.serve(plan, Span(3, 6))
    assert refused(await bench.step(plan, rows(1))) is RefusalReason.NOT_ACCEPTED
    await bench.serve(plan, Span(0, 3), Span(3, 6))
    assert isinstance(await bench.step(plan, rows(1)), Step)


async def test_what_was_never_loaded_is_not_served(bench: Bench) -> None:
    plan = bench.plan((ME, WHOLE))
    bench.owner.serve(plan, (bench.key(WHOLE),))
    assert refused(await bench.step(plan, rows(1))) is RefusalReason.NOT_ACCEPTED


# ── plans that share a shard ────────────────────────────────────────────────────────────────────────────────


async def test_an_answer_goes_on_under_the_next_plan_with_its_kv(bench: Bench) -> None:
    """A successor names the same shard: nothing is loaded anew, and nothing has to be computed again."""
    old, new = bench.plan((ME, WHOLE)), bench.plan((ME, WHOLE), number=2)
    await bench.serve(old, WHOLE)
    data = rows(40)
    await bench.step(old, data[:39])
    await bench.serve(new, WHOLE)
    assert len(bench.owner.loaded) == 1
    bench.owner.retire(plan_id(old))
    assert refused(await bench.step(old, data[39:], 39)) is RefusalReason.NOT_ACCEPTED
    got = result(await bench.step(new, data[39:], 39))
    assert np.allclose(got, run(shard("llama"), 1, data)[-1:], atol=1e-4)


async def test_the_last_plan_of_a_shard_takes_its_kv_along(bench: Bench) -> None:
    """Nobody can step those sequences any more; for the length of a lease they would keep room from others."""
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    await bench.step(plan, rows(40))
    assert bench.blocks(WHOLE) == 2
    bench.owner.retire(plan_id(plan))
    await bench.settled()
    assert bench.blocks(WHOLE) == 0


async def test_a_plan_takes_only_its_own_answers_along(bench: Bench) -> None:
    """The answer that has gone over to the next plan keeps its KV when both go from the shard one by one."""
    old, new = bench.plan((ME, WHOLE)), bench.plan((ME, WHOLE), number=2)
    await bench.serve(old, WHOLE)
    await bench.serve(new, WHOLE)
    await bench.step(old, rows(3), sequence=1)
    await bench.step(old, rows(3), sequence=2)
    await bench.step(new, rows(1), 3, sequence=2)
    bench.owner.retire(plan_id(new))
    await bench.settled()
    assert bench.blocks(WHOLE) == 2, "the earlier plan still serves this shard"
    bench.owner.retire(plan_id(old))
    await bench.settled()
    assert bench.blocks(WHOLE) == 1, (
        "it was stepped under the other plan last: its asker frees it, or its lease"
    )


async def test_steps_taken_before_a_plan_is_retired_are_answered(bench: Bench) -> None:
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    answers = [asyncio.create_task(bench.step(plan, rows(60), sequence=n)) for n in range(3)]
    await asyncio.sleep(0)
    bench.owner.retire(plan_id(plan))
    assert [len(result(await answer)) for answer in answers] == [60, 60, 60]
    await bench.settled()
    assert bench.blocks(WHOLE) == 0


async def test_free_gives_back_an_asker_s_own_kv_only(bench: Bench) -> None:
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    await bench.step(plan, rows(3))
    bench.owner.free(OTHER, Free((1,)))
    await bench.settled()
    assert bench.blocks(WHOLE) == 1
    bench.owner.free(ASKER, Free((1,)))
    await bench.settled()
    assert bench.blocks(WHOLE) == 0


# ── when a plan is idle ─────────────────────────────────────────────────────────────────────────────────────


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def until_idle(bench: Bench, plan: Plan) -> None:
    await until(lambda: bench.owner.idle(plan_id(plan)))


async def test_a_plan_is_idle_once_its_answers_have_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    assert not bench.owner.idle(plan_id(plan)), "whoever has just been told of it may be about to step"
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    assert bench.owner.idle(plan_id(plan))
    await bench.step(plan, rows(3))
    assert not bench.owner.idle(plan_id(plan)), "its answer may go on at any moment"
    bench.owner.free(ASKER, Free((1,)))
    await until_idle(bench, plan)
    assert bench.owner.idle(plan_id(bench.plan((OTHER, WHOLE)))), "a plan that is not served keeps nobody"


async def test_a_plan_is_idle_once_its_answers_are_stepped_under_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    old, new = bench.plan((ME, WHOLE)), bench.plan((ME, WHOLE), number=2)
    await bench.serve(old, WHOLE)
    await bench.serve(new, WHOLE)
    await bench.step(old, rows(3))
    assert not bench.owner.idle(plan_id(old))
    await bench.step(new, rows(1), 3)
    assert bench.owner.idle(plan_id(old))
    assert not bench.owner.idle(plan_id(new))


async def test_a_step_under_way_keeps_its_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    answer = asyncio.create_task(bench.step(plan, rows(200)))
    await asyncio.sleep(0)
    assert not bench.owner.idle(plan_id(plan))
    await answer


async def test_an_asker_that_died_keeps_no_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease runs out in the device's thread, where nobody tells the owner."""
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    await bench.step(plan, rows(3))
    (loaded,) = bench.owner.loaded
    bench.runner.call(lambda: loaded.shard.expire(1e12), lambda _: None)
    await until_idle(bench, plan)


async def test_askers_that_never_free_cost_no_memory(bench: Bench) -> None:
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    (loaded,) = bench.owner.loaded
    for sequence in range(5 * loaded.shard.blocks_total):
        await bench.step(plan, rows(1), sequence=sequence)
        if bench.blocks(WHOLE) == loaded.shard.blocks_total:
            bench.runner.call(lambda: loaded.shard.expire(1e12), lambda _: None)
    assert len(loaded.stepped) <= 2 * loaded.shard.blocks_total + 1


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_shard_is_loaded_once_however_often_it_is_asked_for(bench: Bench) -> None:
    key = bench.key(WHOLE)
    speeds = await asyncio.gather(*[bench.owner.load(key, bench.files) for _ in range(3)])
    assert len(set(speeds)) == 1
    assert len(bench.owner.loaded) == 1


async def test_an_unloaded_shard_serves_no_plan(bench: Bench) -> None:
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    waiting = asyncio.create_task(bench.step(plan, rows(1)))
    await waiting
    bench.owner.unload(bench.key(WHOLE))
    bench.owner.unload(bench.key(WHOLE))
    assert refused(await bench.step(plan, rows(1), 1)) is RefusalReason.NOT_ACCEPTED
    assert bench.owner.loaded == []
    bench.owner.retire(plan_id(plan))
    await bench.owner.load(bench.key(WHOLE), bench.files)


async def test_memory_is_given_back_before_it_is_taken_again(bench: Bench) -> None:
    """A span that is in the middle of a batch goes only when that has ended."""
    await bench.owner.load(bench.key(WHOLE), bench.files)
    (old,) = bench.owner.loaded
    batch = threading.Event()
    bench.runner.call(batch.wait, lambda _: None)
    bench.owner.unload(bench.key(WHOLE))
    opened: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            owning,
            "PagedShard",
            lambda *given: opened.append(hasattr(old.shard, "_kv")) or PagedShard(*given),
        )
        loading = asyncio.create_task(bench.owner.load(bench.key(Span(0, 2)), bench.files))
        await asyncio.sleep(0.2)
        assert not opened
        batch.set()
        await loading
    assert opened == [False]


async def test_a_load_that_is_called_off_leaves_nothing(bench: Bench) -> None:
    loading = asyncio.create_task(bench.owner.load(bench.key(WHOLE), bench.files))
    await asyncio.sleep(0.01)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert bench.owner.loaded == []
    assert bench.owner.observed(bench.key(WHOLE)) is None


async def test_a_device_that_is_not_there_loads_nothing(bench: Bench) -> None:
    with pytest.raises(CapacityError):
        await bench.owner.load(ShardKey(bench.files.model, WHOLE, "GPU.9", POOL), bench.files)
    assert bench.owner.loaded == []


# ── how fast it is ──────────────────────────────────────────────────────────────────────────────────────────


def kept(bench: Bench) -> Speed:
    return bench.speeds.get(bench.files.model, "CPU", Precision.EXACT, None)


async def test_both_speeds_are_measured_at_loading_and_kept(bench: Bench, tmp_path: Path) -> None:
    speed = await bench.owner.load(bench.key(WHOLE), bench.files)
    assert speed.prefill_us > 0
    assert speed.decode_us > 0
    assert kept(bench) == Speeds(tmp_path).get(bench.files.model, "CPU", Precision.EXACT, None)


async def test_real_steps_are_watched(bench: Bench) -> None:
    key = bench.key(WHOLE)
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    assert bench.owner.observed(key) is None
    await bench.step(plan, rows(128))
    found = bench.owner.observed(key)
    assert found is not None
    assert found.prefill_us > 0 == found.decode_us
    for position in range(128, 132):
        await bench.step(plan, rows(1), position)
    found = bench.owner.observed(key)
    assert found is not None
    assert found.decode_us > 0
    (loaded,) = bench.owner.loaded
    assert loaded.pace.step_us is not None


async def test_a_speed_that_has_drifted_is_kept_and_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "DRIFT_WINDOW_S", 0.0)
    monkeypatch.setattr(pacing, "DRIFT_DECODE_STEPS", 1)
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    prefill_us = kept(bench).prefill_us
    bench.speeds.put(bench.files.model, "CPU", Precision.EXACT, None, Speed(10**6, 0))
    bench.told.clear()
    for position in range(limits.DRIFT_WINDOWS + 1):
        assert not bench.told
        await bench.step(plan, rows(1), position)
    assert bench.told == [(bench.key(WHOLE), kept(bench))]
    assert 0 < kept(bench).decode_us < 10**5
    assert kept(bench).prefill_us == prefill_us, "nothing is known of what was not run"


async def test_refused_steps_are_no_measure(bench: Bench) -> None:
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    assert refused(await bench.step(plan, rows(1), 7)) is RefusalReason.MISSING_KV
    assert bench.owner.observed(bench.key(WHOLE)) is None


async def test_what_was_measured_while_all_loaded_is_measured_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All PCs of an office load at the same second, and several shards of one PC do."""
    monkeypatch.setattr(measuring, "MEASURE_AGAIN_S", 0.2)
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    slow = Speed(10**6, 500)
    monkeypatch.setattr(owning, "measure", lambda *_: slow)
    assert await bench.owner.load(bench.key(WHOLE), bench.files) == slow
    assert bench.told == [(bench.key(WHOLE), slow)]
    await until(lambda: len(bench.told) > 1)
    assert 0 < kept(bench).decode_us < 10**5
    assert bench.told[-1] == (bench.key(WHOLE), kept(bench))
    await until(lambda: bench.blocks(WHOLE) == 0)


async def test_a_large_span_s_prompts_are_not_measured_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked just then would wait for seconds."""
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    monkeypatch.setattr(owning, "measure", lambda *_: Speed(10**6, 10**5))
    await bench.owner.load(bench.key(WHOLE), bench.files)
    bench.owner._measuring._measure_again(bench.owner.loaded[0], 0)
    await until(lambda: len(bench.told) > 1)
    assert kept(bench).prefill_us == 10**5


@pytest.mark.parametrize(("again_us", "then_us"), [(790, 800), (2900, 2900), (300, 300)])
async def test_a_known_speed_is_given_up_only_for_one_that_lasts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, again_us: int, then_us: int
) -> None:
    """At eight all PCs of an office start at once, and each finds itself slow: no reason to place layers elsewhere."""
    monkeypatch.setattr(measuring, "MEASURE_AGAIN_S", 0.1)
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    monkeypatch.setattr(owning, "measure", lambda *_: Speed(3000, 50))
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: Speed(again_us, 50))
    bench.speeds.put(bench.files.model, "CPU", Precision.EXACT, None, Speed(800, 50))
    await bench.owner.load(bench.key(WHOLE), bench.files)
    assert kept(bench) == Speed(800, 50)
    assert bench.told == []
    await until(lambda: kept(bench).decode_us == then_us)
    assert len(bench.told) == (then_us != 800)


async def test_shards_of_one_model_speak_with_one_voice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owner's and standby's shards differ a little, short ones much; the advert must not go up and down."""
    spans = {Span(0, 5): 500, Span(1, 6): 900, Span(0, 1): 2000, WHOLE: 300, Span(5, 6): 100}
    monkeypatch.setattr(measuring, "MEASURE_AGAIN_S", 0.1)
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    for span, us in spans.items():
        monkeypatch.setattr(owning, "measure", lambda *_, us=us: Speed(us, 50))
        monkeypatch.setattr(measuring, "measure", lambda *_, us=us, **__: Speed(us + 1, 50))
        await bench.owner.load(bench.key(span), bench.files)
        await asyncio.sleep(0.3)
        await bench.settled()
    assert [speed.decode_us for _, speed in bench.told] == [500, 300]


async def test_a_short_span_tells_nothing_where_more_is_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step costs however few its layers would make this PC seem slow."""
    monkeypatch.setattr(measuring, "MEASURE_AGAIN_S", 0.1)
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    monkeypatch.setattr(pacing, "DRIFT_WINDOW_S", 0.0)
    monkeypatch.setattr(pacing, "DRIFT_DECODE_STEPS", 1)
    bench.speeds.put(bench.files.model, "CPU", Precision.EXACT, None, Speed(1, 1))
    span = Span(0, 1)
    plan = await bench.serve(bench.plan((ME, span), (OTHER, Span(1, 6))), span)
    for position in range(limits.DRIFT_WINDOWS + 2):
        await bench.step(plan, rows(1), position)
    await asyncio.sleep(0.3)
    await bench.settled()
    assert bench.told == []


async def test_nothing_is_measured_again_while_somebody_is_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of a prompt in between would make each token late; and what is disturbed is no measure."""
    again: list[object] = []
    monkeypatch.setattr(measuring, "MEASURE_AGAIN_S", 0.05)
    monkeypatch.setattr(measuring, "measure", lambda *given, **_: again.append(given) or Speed(1, 1))
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    await bench.step(plan, rows(1))
    await asyncio.sleep(0.5)
    assert again == []


async def test_a_full_pool_is_not_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owning, "PLAN_IDLE_S", 0.0)
    plan = await bench.serve(bench.plan((ME, WHOLE)), WHOLE)
    before = kept(bench)
    for sequence in range(2):
        await bench.step(plan, rows(POOL // 2), sequence=sequence)
    bench.owner._measuring._measure_again(bench.owner.loaded[0], 0)
    await bench.settled()
    assert kept(bench) == before
    last = await bench.step(plan, rows(1), POOL // 2 - 1)
    assert len(result(last)) == 1, "and the answers that fill it go on"


async def test_a_shard_that_has_gone_is_not_measured(bench: Bench) -> None:
    await bench.owner.load(bench.key(WHOLE), bench.files)
    (loaded,) = bench.owner.loaded
    bench.owner.unload(bench.key(WHOLE))
    bench.told.clear()
    bench.owner._measuring._measure_again(loaded, 0)
    await bench.settled()
    assert bench.told == []
