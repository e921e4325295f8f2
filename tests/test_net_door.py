"""The port that strangers may speak to: what they get, and what they cannot do with it."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import sys
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from net_support import Side, eventually, free_ports, within

from meshinfer import limits
from meshinfer.errors import ConfigError, DoorError
from meshinfer.net.door import Door, knock
from meshinfer.net.ports import open_ports
from meshinfer.net.rate import Rate
from meshinfer.net.transport import Transport

NOBODY = "invalid.invalid"  # RFC 6761: never resolves


class House:
    """A door that answers with what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[bytes, str]] = []
        self.door = Door(self.answer)
        self.port = 0

    def answer(self, payload: bytes, host: str) -> bytes | None:
        self.heard.append((payload, host))
        if payload == b"defect":
            raise ZeroDivisionError
        return None if payload == b"ignore me" else b"heard " + payload


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    house.port = await house.door.open(["127.0.0.1", "::1"], 0)
    yield house
    await within(house.door.close())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_knock_is_answered_and_both_learn_the_address(house: House, host: str) -> None:
    reply = await knock(host, house.port, b"who is there?")
    assert (reply.payload, reply.host) == (b"heard who is there?", host)
    assert house.heard == [(b"who is there?", host)]


@pytest.mark.parametrize("only", ["127.0.0.1", "::1"])
async def test_localhost_is_reached_whichever_half_of_it_listens(only: str) -> None:
    house = House()
    port = await house.door.open([only], 0)
    assert (await knock("localhost", port, b"x")).host == only
    await house.door.close()


async def test_everywhere_means_both_kinds_of_address() -> None:
    house = House()
    port = await house.door.open(["*"], 0)
    for host in ("127.0.0.1", "::1"):
        assert (await knock(host, port, b"x")).host == host
    await house.door.close()


async def test_the_longest_message_fits_both_ways(house: House) -> None:
    payload = bytes(limits.DOOR_BYTES - len(b"heard "))
    assert len((await knock("127.0.0.1", house.port, payload)).payload) == limits.DOOR_BYTES


# ── knocking in vain ──────────────────────────────────────────────────────────────────────────────────────
async def test_where_nobody_listens_the_address_is_named() -> None:
    port = free_ports().door
    with pytest.raises(DoorError, match=f"127.0.0.1, port {port}"):
        await knock("127.0.0.1", port, b"x")


async def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(DoorError, match=NOBODY):
        await knock(NOBODY, 1, b"x")


async def test_who_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DoorError, match=r"within 0\.2 s"):
        await knock("127.0.0.1", silent.getsockname()[1], b"x", timeout_s=0.2)


async def test_who_is_turned_away_learns_it_at_once(house: House) -> None:
    with pytest.raises(DoorError, match="hung up"):
        await knock("127.0.0.1", house.port, b"ignore me")


async def test_another_service_is_told_from_an_agent() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with pytest.raises(DoorError, match="no agent"):
        await knock("127.0.0.1", server.sockets[0].getsockname()[1], b"x")
    server.close()


# ── hostile knocks ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100_000,
        struct.pack(">I", limits.DOOR_BYTES + 1),
        struct.pack(">I", 2**31),
    ],
    ids=["http", "ones", "one-too-many", "two-gigabytes"],
)
async def test_garbage_is_turned_away_unread(house: House, garbage: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(garbage)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await within(reader.readexactly(1))
    writer.close()
    assert house.heard == []
    assert house.door.counters["garbled"] == 1
    assert (await knock("127.0.0.1", house.port, b"x")).payload == b"heard x"


async def test_who_never_finishes_is_let_go(house: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(struct.pack(">I", 100) + b"only ten b")
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await within(reader.readexactly(1))
    assert limits.KNOCK_TIMEOUT_S - 0.5 < loop.time() - begun < limits.KNOCK_TIMEOUT_S + 2
    writer.close()


async def test_a_crowd_from_one_host_leaves_room_for_others(house: House) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", house.port) for _ in range(200)]
    await eventually(lambda: house.door.counters["crowded"] == 200 - limits.DOOR_CONNECTIONS_PER_HOST)
    assert (await knock("::1", house.port, b"x")).host == "::1"
    for _, writer in opened:
        writer.close()


async def test_hasty_knocking_is_turned_away_until_it_slows_down(house: House) -> None:
    async def turned_away() -> bool:
        try:
            await knock("127.0.0.1", house.port, b"x")
        except DoorError:
            return True
        return False

    async def knock_until_turned_away() -> None:
        while not await turned_away():
            pass

    await within(knock_until_turned_away())
    assert house.door.counters["hasty"] == 1
    assert house.door.counters["knocks"] >= limits.DOOR_KNOCKS_BURST
    await asyncio.sleep(2 / limits.DOOR_KNOCKS_PER_S)
    assert not await turned_away()


async def test_a_defect_in_the_handler_is_reported_and_the_door_stays_open(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DoorError, match="hung up"):
        await knock("127.0.0.1", house.port, b"defect")
    assert (await knock("127.0.0.1", house.port, b"x")).payload == b"heard x"
    assert "ZeroDivisionError" in caplog.text


async def test_closing_hangs_up_on_everyone(house: House) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    await eventually(lambda: len(house.door._tasks) == 1)
    await within(house.door.close())
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await within(reader.readexactly(1))
    writer.close()
    with pytest.raises(DoorError):
        await knock("127.0.0.1", house.port, b"x")
    gc.collect()


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2)), max_size=200))
def test_no_host_is_heard_more_often_than_its_rate(knocks: list[tuple[int, float]]) -> None:
    rate, now, heard = Rate(per_s=5, burst=3), 0.0, dict.fromkeys(map(str, range(4)), 0)
    for number, pause in knocks:
        now += pause
        heard[str(number)] += rate.allow(str(number), now)
    assert all(count <= 3 + 5 * now + 1e-6 for count in heard.values())


def test_a_hundred_thousand_hosts_are_not_remembered() -> None:
    rate = Rate()
    for number in range(100_000):
        rate.allow(str(number), 0.0)
    assert len(rate._buckets) == limits.DOOR_HOSTS


# ── ports ─────────────────────────────────────────────────────────────────────────────────────────────────
def agent() -> tuple[Door, Transport]:
    return House().door, Side("left", []).transport


async def test_agents_on_one_pc_take_the_next_four_ports() -> None:
    base = free_ports().door
    agents = [agent() for _ in range(3)]
    ports = [await open_ports(*each, ["127.0.0.1"], base) for each in agents]
    for each in ports:
        assert (each.control, each.data, each.bulk) == (each.door + 1, each.door + 2, each.door + 3)
    assert len({each.door for each in ports}) == 3
    assert all((each.door - base) % 4 == 0 for each in ports)
    for door, transport in agents:
        await door.close()
        await transport.close()


@pytest.mark.parametrize("offset", range(4))
async def test_one_taken_port_of_four_moves_all_four(offset: int) -> None:
    base = free_ports().door
    door, transport = agent()
    with socket.create_server(("127.0.0.1", base + offset)):
        ports = await open_ports(door, transport, ["127.0.0.1"], base)
        assert ports.door > base
        assert (await knock("127.0.0.1", ports.door, b"x")).payload == b"heard x"
    await door.close()
    await transport.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets a wildcard and an address share a port")
async def test_a_port_taken_on_one_address_is_taken_for_the_wildcard() -> None:
    base = free_ports().door
    door, transport = agent()
    with socket.create_server(("127.0.0.1", base)):
        assert (await open_ports(door, transport, ["*"], base)).door > base
    await door.close()
    await transport.close()


async def test_the_system_may_choose() -> None:
    door, transport = agent()
    ports = await open_ports(door, transport, ["127.0.0.1", "::1"], 0)
    assert len({ports.door, ports.control, ports.data, ports.bulk, 0}) == 5
    await door.close()
    await transport.close()


async def test_an_address_that_is_not_this_pcs_is_a_mistake_of_the_person() -> None:
    door, transport = agent()
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        await open_ports(door, transport, ["203.0.113.7"], 0)
    await transport.close()


async def test_when_all_ports_are_taken_the_person_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PORT_TRIES", 1)
    base = free_ports().door
    door, transport = agent()
    with socket.create_server(("127.0.0.1", base)), pytest.raises(ConfigError, match=f"from {base} on"):
        await open_ports(door, transport, ["127.0.0.1"], base)
    await transport.close()
