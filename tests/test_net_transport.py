"""Messages between agents: who is heard, what is refused, and what a person's other PCs notice of it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import zmq
from net_support import PATIENCE_S, Side, eventually, public_key, secret_key, within

from meshinfer import limits
from meshinfer.values import Channel, PeerId

Dealer = zmq.Socket[bytes]
Strangers = zmq.Context[Dealer]


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    """Two agents that trust each other and are linked both ways."""
    left, right = Side("left", ["right"]), Side("right", ["left"])
    left.bind()
    right.bind()
    left.connect(right)
    right.connect(left)
    await asyncio.gather(left.linked(right.peer), right.linked(left.peer))
    yield left, right
    await left.transport.close()
    await right.transport.close()


@pytest.fixture
def context() -> Iterator[Strangers]:
    """For sockets of programs that are not ours."""
    context: Strangers = zmq.Context()
    context.linger = 0
    yield context
    context.destroy(linger=0)


def raw_dealer(
    context: Strangers, seed: str, server: str, port: int, identity: str = "x"
) -> zmq.Socket[bytes]:
    """What a program that is not ours would open."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, public_key(server))
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public_key(seed))
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret_key(seed))
    dealer.setsockopt(zmq.ROUTING_ID, identity.encode())
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return dealer


# ── what is heard ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("channel", list(Channel))
async def test_a_message_arrives_whole_with_its_senders_name(
    sides: tuple[Side, Side], channel: Channel
) -> None:
    left, right = sides
    assert left.transport.send(channel, right.peer, [b"header", b"", b"body"])
    assert await right.next() == (channel, left.peer, [b"header", b"", b"body"])
    assert right.transport.send(channel, left.peer, [b"back"])
    assert await left.next() == (channel, right.peer, [b"back"])


@pytest.mark.parametrize("rows", [1, 4, 256, 4096])
async def test_rows_arrive_bit_by_bit_and_can_be_used_without_a_copy(rows: int) -> None:
    arrived: asyncio.Queue[np.ndarray] = asyncio.Queue()

    def receive(channel: Channel, peer: PeerId, frames: list[memoryview]) -> None:
        arrived.put_nowait(np.frombuffer(frames[1], dtype=np.float32).reshape(rows, 576))

    left, right = Side("left", ["right"]), Side("right", ["left"], receive)
    right.bind()
    left.connect(right)
    await left.linked(right.peer)
    sent = np.random.default_rng(rows).standard_normal((rows, 576), dtype=np.float32)
    assert left.transport.send(Channel.DATA, right.peer, [b"step", memoryview(sent)])
    received = await within(arrived.get())
    assert np.array_equal(received, sent)
    assert received.flags.writeable
    assert received.flags.aligned
    await left.transport.close()
    await right.transport.close()
    assert np.array_equal(received, sent)  # its memory outlives the sockets


async def test_messages_keep_their_order_and_the_loop_stays_responsive(sides: tuple[Side, Side]) -> None:
    left, right = sides
    loop = asyncio.get_running_loop()
    gaps: list[float] = []
    count = 20_000

    async def tick() -> None:
        before = loop.time()
        while True:
            await asyncio.sleep(0)
            gaps.append(loop.time() - before)
            before = loop.time()

    async def send_all() -> None:
        for number in range(count):
            while not left.transport.send(Channel.CONTROL, right.peer, [number.to_bytes(4, "big")]):
                await asyncio.sleep(0)

    ticking, sending = asyncio.create_task(tick()), asyncio.create_task(send_all())
    numbers = [int.from_bytes((await right.next())[2][0], "big") for _ in range(count)]
    await sending
    ticking.cancel()
    assert numbers == list(range(count))
    assert len(gaps) > count / limits.TURN_MESSAGES
    assert sorted(gaps)[int(len(gaps) * 0.99)] < 0.05


async def test_a_receiver_that_raises_loses_only_that_message(caplog: pytest.LogCaptureFixture) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    def receive(channel: Channel, peer: PeerId, frames: list[memoryview]) -> None:
        if frames[0] == b"bad":
            raise ZeroDivisionError
        heard.put_nowait(bytes(frames[0]))

    left, right = Side("left", ["right"]), Side("right", ["left"], receive)
    right.bind()
    left.connect(right)
    await left.linked(right.peer)
    for text in (b"bad", b"one", b"bad", b"bad", b"two"):
        assert left.transport.send(Channel.DATA, right.peer, [text])
    assert [await within(heard.get()), await within(heard.get())] == [b"one", b"two"]
    assert "ZeroDivisionError" in caplog.text
    await left.transport.close()
    await right.transport.close()


async def test_ipv6() -> None:
    left, right = Side("left", ["right"]), Side("right", ["left"])
    right.bind(host="::1")
    left.connect(right, host="::1")
    await left.linked(right.peer)
    assert left.transport.send(Channel.DATA, right.peer, [b"six"])
    assert (await right.next())[2] == [b"six"]
    await left.transport.close()
    await right.transport.close()


# ── who is not heard ──────────────────────────────────────────────────────────────────────────────────────
async def test_a_stranger_is_refused_and_counted(sides: tuple[Side, Side]) -> None:
    left, right = sides
    stranger = Side("stranger", ["left"])
    stranger.connect(left)
    await eventually(lambda: left.transport.counters["refused_keys"] >= 3)
    assert not stranger.transport.linked(left.peer)
    assert not stranger.transport.send(Channel.DATA, left.peer, [b"let me in"])
    assert right.transport.send(Channel.DATA, left.peer, [b"known"])
    assert await left.next() == (Channel.DATA, right.peer, [b"known"])
    await stranger.transport.close()


async def test_without_encryption_nobody_is_heard(sides: tuple[Side, Side], context: Strangers) -> None:
    left, right = sides
    plain = context.socket(zmq.DEALER)
    monitor = plain.get_monitor_socket(zmq.Event.DISCONNECTED)
    plain.connect(f"tcp://127.0.0.1:{left.ports.data}")
    plain.send_multipart([b"plain", b"text"])
    assert await asyncio.to_thread(monitor.poll, PATIENCE_S * 1000)
    assert right.transport.send(Channel.DATA, left.peer, [b"known"])
    assert (await left.next())[2] == [b"known"]


async def test_a_peer_taken_off_the_roster_is_silenced_though_its_session_lives(
    sides: tuple[Side, Side],
) -> None:
    left, right = sides
    del left.roster[public_key("right")]
    assert right.transport.send(Channel.DATA, left.peer, [b"still here"])
    await eventually(lambda: left.transport.counters["dropped"] == 1)
    left.roster[public_key("right")] = right.peer
    assert right.transport.send(Channel.DATA, left.peer, [b"readmitted"])
    assert (await left.next())[2] == [b"readmitted"]


async def test_a_peer_cannot_speak_in_anothers_name(context: Strangers) -> None:
    left, mallory = Side("left", ["right", "mallory"]), Side("mallory", ["left"])
    left.bind()
    dealer = raw_dealer(context, "mallory", "left", left.ports.data, identity=Side.name("right"))
    dealer.send_multipart([Side.name("right").encode(), b"body"])
    assert (await left.next())[1] == mallory.peer
    await left.transport.close()


async def test_a_servers_key_is_checked_too(sides: tuple[Side, Side]) -> None:
    """Else whoever takes over a peer's address would read what is sent to it."""
    left, right = sides
    third = Side("third", ["left", "right"])
    third.transport.connect(right.peer, public_key("right"), "127.0.0.1", left.ports)
    third.connect(left)
    left.roster[public_key("third")] = third.peer
    await third.linked(left.peer)
    assert not third.transport.linked(right.peer)
    await third.transport.close()


# ── what is too much ──────────────────────────────────────────────────────────────────────────────────────
async def test_what_the_receiver_would_refuse_is_not_sent(sides: tuple[Side, Side]) -> None:
    left, right = sides
    assert left.transport.send(Channel.CONTROL, right.peer, [bytes(limits.CONTROL_BYTES)])
    assert len((await right.next())[2][0]) == limits.CONTROL_BYTES
    for frames in (
        [bytes(limits.CONTROL_BYTES + 1)],
        [b"header", memoryview(np.zeros((2, limits.CONTROL_BYTES)))],
    ):
        with pytest.raises(ValueError, match="too long"):
            left.transport.send(Channel.CONTROL, right.peer, frames)


@pytest.mark.parametrize("excess", ["bytes", "frames"])
async def test_an_oversize_message_is_refused_and_others_are_not_disturbed(
    sides: tuple[Side, Side], context: Strangers, excess: str
) -> None:
    left, right = sides
    left.roster[public_key("third")] = Side.name("third")
    dealer = raw_dealer(context, "third", "left", left.ports.control)
    if excess == "bytes":
        dealer.send(bytes(2 * limits.CONTROL_BYTES))
    else:
        dealer.send_multipart([b"x"] * 10_000)
        await eventually(lambda: left.transport.counters["dropped"] == 1)
    dealer.send(b"small")
    if excess == "frames":
        assert (await left.next())[2] == [b"small"]
    assert right.transport.send(Channel.CONTROL, left.peer, [b"known"])
    assert await left.next() == (Channel.CONTROL, right.peer, [b"known"])


async def throw(garbage: bytes, port: int) -> None:
    """At a port, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(garbage)
    with contextlib.suppress(ConnectionError):
        await within(writer.drain())
        await within(reader.read())
    writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" * 9,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\xff" * 8,
        secrets.token_bytes(100_000),
    ],
    ids=["http", "ones", "plain", "huge-length", "random"],
)
@pytest.mark.parametrize("channel", list(Channel))
async def test_garbage_disturbs_nobody(sides: tuple[Side, Side], channel: Channel, garbage: bytes) -> None:
    left, right = sides
    await asyncio.gather(*(throw(garbage, left.ports.of(channel)) for _ in range(5)))
    assert right.transport.send(channel, left.peer, [b"known"])
    assert await left.next() == (channel, right.peer, [b"known"])
    assert left.transport.linked(right.peer, channel)


async def test_a_thousand_half_open_connections_shut_nobody_out(sides: tuple[Side, Side]) -> None:
    left, right = sides
    address = ("127.0.0.1", left.ports.data)
    half_open = [await asyncio.to_thread(socket.create_connection, address, PATIENCE_S) for _ in range(1000)]
    assert right.transport.send(Channel.DATA, left.peer, [b"known"])
    assert (await left.next())[2] == [b"known"]
    newcomer = Side("newcomer", ["left"])
    left.roster[public_key("newcomer")] = newcomer.peer
    newcomer.connect(left)
    await newcomer.linked(left.peer)
    assert newcomer.transport.send(Channel.DATA, left.peer, [b"new"])
    assert await left.next() == (Channel.DATA, newcomer.peer, [b"new"])
    for connection in half_open:  # each is closed from the other side once its time is up
        connection.settimeout(limits.HANDSHAKE_MS / 1000 + PATIENCE_S)
        while await asyncio.to_thread(connection.recv, 4096):
            pass
        connection.close()
    await newcomer.transport.close()
