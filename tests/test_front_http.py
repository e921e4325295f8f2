"""The local interface lets its owner in, nobody else, and ends an answer that nobody reads."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from small_agent import STATS, SmallAgent

from meshinfer.answer.question import Done, Finish, Question, Text
from meshinfer.errors import BusyError
from meshinfer.front.http import LocalApi
from meshinfer.limits import QUESTION_BYTES

Served = tuple[SmallAgent, LocalApi, aiohttp.ClientSession, asyncio.Event]


@asynccontextmanager
async def serving(home: Path) -> AsyncIterator[Served]:
    agent, stopped = SmallAgent(), asyncio.Event()
    api = LocalApi(agent, home, stopped.set)
    await api.start()
    try:
        note = json.loads((home / "api.json").read_bytes())
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{note['port']}", headers={"Authorization": f"Bearer {note['token']}"}
        ) as session:
            yield agent, api, session, stopped
    finally:
        await api.stop()


def question(text: str = "Guten Tag 🐈", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def test_an_answer_streams_and_ends_with_its_figures(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (_, _, session, _),
        session.post("/api/ask", json=question()) as response,
    ):
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        events = [json.loads(line) async for line in response.content]
    assert "".join(event["text"] for event in events[:-1]) == "Guten Tag 🐈 "
    done = events[-1]["done"]
    assert done["finish"] == "stop"
    assert done["stats"]["route"][0]["span"] == {"first": 0, "last": 15}


async def test_the_note_is_private_and_goes_with_the_agent(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, api, _, _):
        note = json.loads((tmp_path / "api.json").read_bytes())
        assert note["port"] == api.port
        assert note["pid"] == os.getpid()
        assert len(note["token"]) >= 43
        if os.name == "posix":
            assert stat.S_IMODE((tmp_path / "api.json").stat().st_mode) == 0o600
    assert not (tmp_path / "api.json").exists()


async def test_an_agent_leaves_the_note_of_its_successor(tmp_path: Path) -> None:
    async with serving(tmp_path):
        (tmp_path / "api.json").write_text('{"port": 1, "token": "another", "pid": 1}')
    assert (tmp_path / "api.json").exists()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer \u00fc"}, 401),
        ({"Authorization": "Basic eDp5"}, 401),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.evil.example:80"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "192.168.1.5"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "https://localhost"}, 403),
        ({"Host": "localhost"}, 200),
        ({"Host": "localhost:9"}, 200),
        ({"Host": "[::1]:9"}, 200),
    ],
)
async def test_only_the_owner_from_this_pc_is_served(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with serving(tmp_path) as (_, _, session, _):
        for path in ("/api/status", "/api/nothing") if status != 200 else ("/api/status",):
            async with session.get(path, headers=headers) as response:
                assert response.status == status
                assert "error" in await response.json() or status == 200
                assert not [name for name in response.headers if name.lower().startswith("access-control-")]


async def test_its_own_page_may_use_it(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (_, api, session, _),
        session.get("/api/status", headers={"Origin": f"http://localhost:{api.port}"}) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 403),
        ("text/plain; charset=application/json", 403),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415),
        ("application/jsonx", 415),
        ("application/json; charset=utf-8", 200),
    ],
)
async def test_what_a_form_can_send_is_refused(tmp_path: Path, content_type: str, status: int) -> None:
    async with (
        serving(tmp_path) as (agent, _, session, _),
        session.post(
            "/api/ask", data=json.dumps(question()), headers={"Content-Type": content_type}
        ) as response,
    ):
        assert response.status == status
    assert bool(agent.asked) == (status == 200)


async def test_a_preflight_gets_no_permission(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, session, _):
        asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        async with session.options("/api/ask", headers=asks) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": []}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**40}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": 5}, "stop"),
        ({"model": 5}, "model"),
        ({"tempreature": 1}, "temperature"),
        ({"messages": []}, "prompt"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "prompt"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "content"),
    ],
)
async def test_a_bad_parameter_is_named(tmp_path: Path, more: dict[str, object], named: str) -> None:
    async with (
        serving(tmp_path) as (agent, _, session, _),
        session.post("/api/ask", json=question() | more) as response,
    ):
        assert response.status == 400
        assert named in (await response.json())["error"]
    assert not agent.asked


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b"null"]
)
async def test_a_body_that_is_no_object_is_refused(tmp_path: Path, body: bytes) -> None:
    async with (
        serving(tmp_path) as (_, _, session, _),
        session.post("/api/ask", data=body, headers={"Content-Type": "application/json"}) as response,
    ):
        assert response.status == 400
        assert "error" in await response.json()


async def test_a_huge_body_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, session, _):
        body = b'{"messages": "' + b"x" * QUESTION_BYTES + b'"}'
        async with session.post(
            "/api/ask", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 413


@pytest.mark.parametrize("length", [QUESTION_BYTES + 1, 2**40])
async def test_a_huge_announced_length_is_refused_though_nothing_comes(tmp_path: Path, length: int) -> None:
    async with serving(tmp_path) as (_, server, session, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = {
            "Host": f"127.0.0.1:{server.port}",
            "Authorization": session.headers["Authorization"],
            "Content-Type": "application/json",
            "Content-Length": str(length),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writer.write(f"POST /api/ask HTTP/1.1\r\n{lines}\r\n".encode())
        try:
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
        finally:
            writer.close()


async def test_an_unknown_model_is_told_the_known_ones(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, session, _):
        async with session.post("/api/ask", json=question(model="gpt-9")) as response:
            assert response.status == 404
            body = await response.json()
            assert body["known"] == ["smollm2"]
            assert "smollm2" in body["error"]
        for known in ("smollm2", "c" * 64):
            async with session.post("/api/ask", json=question(model=known)) as response:
                assert response.status == 200


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (agent, _, session, _):
        agent.error = BusyError("256 questions wait already", retry_after_s=7.0)
        async with session.post("/api/ask", json=question()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "7"


async def test_no_route_is_a_status_before_the_answer_and_an_event_within(tmp_path: Path) -> None:
    async with serving(tmp_path) as (agent, _, session, _):
        agent.fail_after = 0
        async with session.post("/api/ask", json=question()) as response:
            assert response.status == 503
            assert "3-5" in (await response.json())["error"]
        agent.fail_after = 1
        async with session.post("/api/ask", json=question()) as response:
            assert response.status == 200
            lines = (await response.text()).splitlines()
    assert json.loads(lines[0]) == {"text": "Guten "}
    assert json.loads(lines[-1]) == {"error": "layers 3-5 are missing", "exit_code": 1}


async def test_a_defect_tells_no_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as (agent, _, session, _):
        agent.error = KeyError("secret prompt")
        async with session.post("/api/ask", json=question("secret prompt")) as response:
            assert response.status == 500
            assert "secret" not in await response.text()
    assert "KeyError" in caplog.text
    assert "secret" not in caplog.text


async def test_a_client_that_leaves_ends_its_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (agent, _, session, _):
        agent.endless = True
        response = await session.post("/api/ask", json=question())
        await response.content.readline()
        response.close()
        await asyncio.wait_for(agent.closed.wait(), 1.0)
        assert agent.running == 0


async def test_a_client_that_leaves_before_the_first_word_ends_its_answer(tmp_path: Path) -> None:
    class Thinking(SmallAgent):
        async def ask(self, question: Question) -> AsyncIterator[Text | Done]:
            self.asked.append(question)
            try:
                await asyncio.Event().wait()
                yield Text("never")
            finally:
                self.closed.set()

    agent = Thinking()
    api = LocalApi(agent, tmp_path, lambda: None)
    await api.start()
    try:
        note = json.loads((tmp_path / "api.json").read_bytes())
        body = json.dumps(question()).encode()
        with socket.create_connection(("127.0.0.1", api.port)) as raw:
            raw.sendall(
                b"POST /api/ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                + f"Authorization: Bearer {note['token']}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            while not agent.asked:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(agent.closed.wait(), 1.0)
    finally:
        await api.stop()


async def test_a_slow_answer_shows_that_the_agent_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a client could not tell a long prompt from a frozen agent."""
    monkeypatch.setattr("meshinfer.front.http.FIRST_EVENT_S", 0.02)
    monkeypatch.setattr("meshinfer.front.http.HEARTBEAT_S", 0.02)

    class Slow(SmallAgent):
        async def ask(self, question: Question) -> AsyncIterator[Text | Done]:
            await asyncio.sleep(0.1)
            yield Text("late")
            yield Done(Finish.STOP, STATS)

    api = LocalApi(Slow(), tmp_path, lambda: None)
    await api.start()
    try:
        note = json.loads((tmp_path / "api.json").read_bytes())
        headers = {"Authorization": f"Bearer {note['token']}"}
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{api.port}", headers=headers) as session,
            session.post("/api/ask", json=question()) as response,
        ):
            lines = (await response.text()).split("\n")
    finally:
        await api.stop()
    assert lines[0] == ""
    assert {"text": "late"} in [json.loads(line) for line in lines if line]


async def test_health_tells_the_truth(tmp_path: Path) -> None:
    async with serving(tmp_path) as (agent, _, session, _):
        async with session.get("/api/health") as response:
            assert (response.status, (await response.json())["ready"]) == (200, True)
        agent.ready = False
        async with session.get("/api/health") as response:
            assert response.status == 503
            assert await response.json() == {"ready": False, "reason": "layers 3-5 are missing"}


async def test_unknown_paths_and_methods_are_json_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, session, _):
        async with session.get("/api/nothing") as response:
            assert response.status == 404
            assert "error" in await response.json()
        async with session.get("/api/ask") as response:
            assert response.status == 405
            assert "error" in await response.json()


async def test_stop_reaches_the_agent(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, session, stopped):
        async with session.post("/api/stop", json={}) as response:
            assert response.status == 200
        assert stopped.is_set()
        async with session.get("/api/stop") as response:
            assert response.status == 405


async def test_it_listens_on_the_loopback_only(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, api, _, _):
        assert api._runner is not None
        assert [address[0] for address in api._runner.addresses] == ["127.0.0.1"]
