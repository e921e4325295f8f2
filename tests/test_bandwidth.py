"""What a link carries is measured in quiet moments, rightly, and disturbs nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from meshinfer import limits
from meshinfer.agent import bandwidth as module
from meshinfer.agent.bandwidth import Bandwidth
from meshinfer.values import PeerId
from meshinfer.wire.messages import Message, Probe, Probed

ONE, TWO = PeerId("ab" * 16), PeerId("cd" * 16)


class Wire:
    """Two agents' bandwidth parts, and a link between them that takes its time."""

    def __init__(self, kbit_s: float, delay_s: float = 0.0) -> None:
        self.kbit_s = kbit_s
        self.delay_s = delay_s
        self.busy = {ONE: False, TWO: False}
        self.up = True
        self.probes = 0
        self.measured: list[tuple[PeerId, int]] = []
        self.ends = {
            ONE: Bandwidth(
                lambda peer, message: self.carry(ONE, peer, message),
                lambda: self.busy[ONE],
                lambda _peer: round(2e6 * self.delay_s),
                lambda peer, figure: self.measured.append((peer, figure)),
            ),
            TWO: Bandwidth(
                lambda peer, message: self.carry(TWO, peer, message),
                lambda: self.busy[TWO],
                lambda _peer: 0,
                lambda peer, figure: None,
            ),
        }

    def carry(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        if not self.up:
            return False
        assert isinstance(message, Probe | Probed)
        size = len(message.body) if isinstance(message, Probe) else 0
        self.probes += isinstance(message, Probe)
        after_s = self.delay_s + 8 * size / 1000 / self.kbit_s
        asyncio.get_running_loop().call_later(after_s, self.ends[to].received, sender, message)
        return True


async def _never() -> bool:
    return False


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(limits, "PROBE_FIRST_S", 0.0)
    monkeypatch.setattr(module, "_is_late", _never)  # whatever else runs on the PC that tests
    return


async def test_a_link_is_measured_once_and_its_delay_is_no_lack_of_bandwidth() -> None:
    wire = Wire(kbit_s=100_000, delay_s=0.02)
    one = wire.ends[ONE]
    one.follow([TWO])
    await one.measure()
    ((peer, kbit_s),) = wire.measured
    assert peer == TWO
    assert 30_000 < kbit_s < 110_000
    await one.measure()
    one.follow([TWO])
    await one.measure()
    assert len(wire.measured) == 1, "and not again at once"


async def test_the_best_of_some_rounds_counts_then_it_is_measured_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A PC with other work to do answers late: that is not the link's fault."""
    monkeypatch.setattr(limits, "PROBE_RETRY_S", 0.0)
    monkeypatch.setattr(limits, "PROBES_BURST", 100.0)
    wire = Wire(kbit_s=10_000)
    one = wire.ends[ONE]
    one.follow([TWO])
    for kbit_s in (10_000, 50_000, 20_000, 500_000):
        wire.kbit_s = kbit_s
        await one.measure()
    (_, first), (_, second), (_, third) = wire.measured
    assert first < 10_100
    assert first < second <= third < 50_100
    one.follow([])
    one.follow([TWO])
    await one.measure()
    assert wire.measured[-1][1] > 100_000, "after a break the link may be another one"


@pytest.mark.parametrize("busy", [ONE, TWO])
async def test_while_either_side_is_busy_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, busy: PeerId
) -> None:
    monkeypatch.setattr(limits, "PROBE_TIMEOUT_S", 0.2)
    wire = Wire(kbit_s=1_000_000)
    wire.busy[busy] = True
    one = wire.ends[ONE]
    one.follow([TWO])
    await one.measure()
    assert not wire.measured
    assert wire.probes == (busy == TWO)


async def test_who_is_not_followed_any_more_is_not_probed_and_a_dead_link_is_no_measure() -> None:
    wire = Wire(kbit_s=1_000_000)
    one = wire.ends[ONE]
    one.follow([TWO])
    one.follow([])
    await one.measure()
    assert not wire.probes
    wire.up = False
    one.follow([TWO])
    await one.measure()
    assert not wire.measured


async def test_who_floods_probes_is_not_answered_for_ever() -> None:
    wire = Wire(kbit_s=1_000_000)
    answered = 0

    def count(_peer: PeerId, message: Message) -> bool:
        nonlocal answered
        answered += isinstance(message, Probed)
        return True

    flooded = Bandwidth(count, lambda: False, lambda _peer: 0, lambda _peer, _figure: None)
    for token in range(100):
        flooded.received(TWO, Probe(token, b""))
    assert answered == limits.PROBES_BURST
    flooded.received(ONE, Probe(1, b""))
    assert answered == limits.PROBES_BURST + 1, "others are"
    assert not wire.measured


async def test_an_answer_that_nobody_waits_for_is_no_measure() -> None:
    wire = Wire(kbit_s=1_000_000)
    one = wire.ends[ONE]
    one.received(TWO, Probed(1))
    one.follow([TWO])
    measuring = asyncio.ensure_future(one.measure())
    while not wire.probes:
        await asyncio.sleep(0)
    one.received(ONE, Probed(1))
    one.received(TWO, Probed(99))
    await measuring
    assert len(wire.measured) == 1
