"""The agent's local HTTP interface: the command line talks to it, and whatever else a person runs on this PC.

It listens on 127.0.0.1 at a port that the system chooses. Port and token stand in `api.json` in the home,
which only its owner may read. A web page that the person happens to visit must get nowhere: a foreign Host
(DNS rebinding), a foreign Origin and any content type but JSON (what a form can send) are refused, and no
CORS header is ever sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from meshinfer import __version__
from meshinfer.agent.files import read_bounded, write_atomic
from meshinfer.answer.question import Done, Question, Text
from meshinfer.errors import BusyError, CapacityError, MeshinferError, RouteError, UserError
from meshinfer.front import defects
from meshinfer.front.client import API_FILE
from meshinfer.front.questions import UnknownModel, jsonable, parse_object, parse_question
from meshinfer.limits import QUESTION_BYTES

HEARTBEAT_S: Final = 5.0
"""An empty line goes out this often while an answer is silent, so that a client can tell slow from dead."""

FIRST_EVENT_S: Final = 5.0
"""An answer that fails within this time fails with a status of its own; later, in the stream."""

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LocalAgent(Protocol):
    """What this interface needs of an agent."""

    def status(self) -> dict[str, Any]: ...
    def peers(self) -> list[dict[str, Any]]: ...
    def plan(self) -> dict[str, Any]: ...
    def models(self) -> list[dict[str, Any]]: ...
    def ask(self, question: Question) -> AsyncIterator[Text | Done]: ...


class LocalApi:
    """Serves one agent in the running loop; `stop_agent` is called when a client asks for the agent's end."""

    def __init__(self, agent: LocalAgent, home: Path, stop_agent: Callable[[], None]) -> None:
        self._agent = agent
        self._file = home / API_FILE
        self._stop_agent = stop_agent
        self._token = secrets.token_urlsafe(32)
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Binds, then says where in `api.json`: whoever reads it can connect at once."""
        application = web.Application(
            middlewares=[_errors_as_json, self._guard], client_max_size=QUESTION_BYTES
        )
        application.add_routes(
            [
                web.get("/api/health", self._health),
                web.get("/api/status", self._status),
                web.get("/api/peers", self._peers),
                web.get("/api/plan", self._plan),
                web.get("/api/models", self._models),
                web.post("/api/ask", self._ask),
                web.post("/api/stop", self._stop),
            ]
        )
        # A handler is cancelled when its client goes away: that is what ends an answer nobody reads.
        runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=2.0,
        )
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        note = {"port": self.port, "token": self._token, "pid": os.getpid(), "version": __version__}
        write_atomic(self._file, json.dumps(note).encode(), secret=True)

    async def stop(self) -> None:
        """Takes the note away, unless another agent has put its own there, and ends what still streams."""
        note = read_bounded(self._file)
        if note is not None and self._token.encode() in note:
            self._file.unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ── who may speak ───────────────────────────────────────────────────────────────────────────

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _is_loopback(request.headers.get("Host", "")):
            return _failure(403, "this interface answers to 127.0.0.1 and localhost only")
        origin = request.headers.get("Origin")
        if origin is not None and not self._own_origin(origin):
            return _failure(403, "web pages of other origins may not use this interface")
        if not self._authorized(request.headers.get("Authorization", "")):
            refusal = _failure(
                401, "the token is missing or wrong; it stands in api.json in the agent's home"
            )
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        if request.method == "POST" and request.content_type != "application/json":
            # A form or a script of a foreign page can send text/plain without asking first.
            status = 403 if request.content_type == "text/plain" else 415
            return _failure(status, "send Content-Type: application/json")
        if (request.content_length or 0) > QUESTION_BYTES:
            # Before any of it is read: what was announced need never come.
            return _failure(413, _TOO_LARGE)
        return await handler(request)

    def _own_origin(self, origin: str) -> bool:
        scheme, _, authority = origin.partition("://")
        return scheme == "http" and authority.endswith(f":{self.port}") and _is_loopback(authority)

    def _authorized(self, header: str) -> bool:
        scheme, _, token = header.partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self._token.encode())

    # ── what it serves ──────────────────────────────────────────────────────────────────────────

    async def _health(self, _request: web.Request) -> web.Response:
        status = self._agent.status()
        ready = status.get("ready") is True
        body = {"ready": ready, "reason": None if ready else status.get("reason")}
        return _json(body, 200 if ready else 503)

    async def _status(self, _request: web.Request) -> web.Response:
        return _json(self._agent.status())

    async def _peers(self, _request: web.Request) -> web.Response:
        return _json({"peers": self._agent.peers()})

    async def _plan(self, _request: web.Request) -> web.Response:
        return _json(self._agent.plan())

    async def _models(self, _request: web.Request) -> web.Response:
        return _json({"models": self._agent.models()})

    async def _stop(self, _request: web.Request) -> web.Response:
        self._stop_agent()
        return _json({"stopping": True, "pid": os.getpid()})

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        question = parse_question(parse_object(await request.read()), self._agent.models())
        async with contextlib.AsyncExitStack() as stack:
            events = _Events(self._agent.ask(question))
            stack.push_async_callback(events.close)
            first = await events.next(FIRST_EVENT_S)
            response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            await _stream(response, events, first)
            await response.write_eof()
        return response


class _Events:
    """An answer's events, with a wait that ends without disturbing the answer. `close` cancels it."""

    def __init__(self, events: AsyncIterator[Text | Done]) -> None:
        self._events = events
        self._pending: asyncio.Task[Text | Done | None] | None = None

    async def _advance(self) -> Text | Done | None:
        return await anext(self._events, None)

    async def next(self, timeout_s: float) -> Text | Done | _Silence | None:
        """The next event, None at the end, or `SILENCE` when nothing came in time."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._advance())
        done, _ = await asyncio.wait({self._pending}, timeout=timeout_s)
        if not done:
            return SILENCE
        event = self._pending.result()
        self._pending = None
        return event

    async def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, MeshinferError):
                await self._pending
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()


class _Silence:
    """Nothing came in time."""


SILENCE: Final = _Silence()


async def _stream(
    response: web.StreamResponse, events: _Events, first: Text | Done | _Silence | None
) -> None:
    """One JSON object a line: {"text": …} …, then {"done": …} or {"error": …}."""
    event = first
    try:
        while event is not None:
            await response.write(_line(event))
            event = await events.next(HEARTBEAT_S)
    except MeshinferError as error:
        await response.write(_json_line({"error": str(error), "exit_code": error.exit_code}))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        _log.error("an answer failed by a defect\n%s", defects.trace(error))
        await response.write(_json_line({"error": _DEFECT, "exit_code": 1}))


def _line(event: Text | Done | _Silence) -> bytes:
    match event:
        case Text(text=text):
            return _json_line({"text": text})
        case Done():
            return _json_line({"done": jsonable(event)})
        case _:
            return b"\n"


def _json_line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


# ── answers that are no stream ──────────────────────────────────────────────────────────────────

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_TOO_LARGE: Final = f"the body is larger than {QUESTION_BYTES} bytes"
_DEFECT: Final = "the agent made a mistake of its own; its log says where"


def _json(value: object, status: int = 200) -> web.Response:
    text = json.dumps(jsonable(value), ensure_ascii=False)
    return web.Response(text=text, status=status, content_type="application/json", headers=_HEADERS)


def _failure(status: int, sentence: str, exit_code: int = 2, **more: object) -> web.Response:
    return _json({"error": sentence, "exit_code": exit_code, **more}, status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MeshinferError as error:
        return _refusal(error)
    except web.HTTPRequestEntityTooLarge:
        return _failure(413, _TOO_LARGE)
    except web.HTTPException as error:
        return _failure(error.status, f"{request.method} {request.path}: {error.reason.lower()}")
    except ConnectionError:
        # Nobody is there to read an answer.
        raise
    except Exception as error:
        _log.error("a request failed by a defect\n%s", defects.trace(error))
        return _failure(500, _DEFECT, exit_code=1)


def _refusal(error: MeshinferError) -> web.Response:
    match error:
        case UnknownModel():
            return _failure(404, str(error), known=list(error.known))
        case BusyError():
            busy = _failure(503, str(error), exit_code=1)
            busy.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
            return busy
        case RouteError() | CapacityError():
            return _failure(503, str(error), exit_code=1)
        case UserError():
            return _failure(400, str(error))
        case _:
            return _failure(500, str(error), exit_code=1)


def _is_loopback(authority: str) -> bool:
    """Whether a Host header, or an Origin's authority, names this PC by a name that no DNS can move."""
    try:
        host = urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
