"""Talks to the agent of a home over its local interface. Standard library only: it starts at once."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Final

from meshinfer.agent.files import agent_runs, read_bounded
from meshinfer.errors import BusyError, MeshinferError, UserError

API_FILE: Final = "api.json"
SILENCE_S: Final = 60.0
"""The interface sends an empty line every few seconds; without one for so long, the agent is dead."""

RESPONSE_BYTES: Final = 16 * 1024 * 1024
LINE_BYTES: Final = 16 * 1024 * 1024


class NotRunning(MeshinferError):
    """No agent runs on this home, or it does not answer yet."""


class Client:
    """One agent's local interface. Every method raises the error that the agent named, or NotRunning."""

    def __init__(self, port: int, token: str, pid: int) -> None:
        self._port = port
        self._token = token
        self.pid = pid

    def get(self, path: str) -> dict[str, Any]:
        """Raises MeshinferError; /api/health answers 503 while not ready, so ask /api/status."""
        with self._request("GET", path, None) as response:
            return _object(response)

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        with self._request("POST", path, body) as response:
            return _object(response)

    def events(self, question: Mapping[str, object]) -> Generator[dict[str, Any], None, None]:
        """{"text": …} …, then {"done": …}. To close the iterator is to end the answer."""
        with self._request("POST", "/api/ask", question) as response:
            while line := response.readline(LINE_BYTES):
                if line.strip():
                    event = _parse(line)
                    if "error" in event:
                        raise _error(event)
                    yield event
                    if "done" in event:
                        return
        raise MeshinferError("the agent ended in the middle of the answer; ask again")

    @contextmanager
    def _request(self, method: str, path: str, body: Mapping[str, object] | None) -> Iterator[HTTPResponse]:
        """The response, if it is a good one. The connection lives no longer than the block."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=SILENCE_S)
        headers = {"Authorization": f"Bearer {self._token}"}
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _error(_object(response), response.headers.get("Retry-After"))
            yield response
        except TimeoutError:
            raise NotRunning(f"the agent (process {self.pid}) does not answer") from None
        except (ConnectionError, HTTPException):
            raise NotRunning("the agent has gone away; see agent.log in its home") from None
        finally:
            connection.close()


def _object(response: HTTPResponse) -> dict[str, Any]:
    return _parse(response.read(RESPONSE_BYTES))


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise MeshinferError("something other than the agent answers at its port; restart the agent")
    return value


def _error(body: Mapping[str, Any], retry_after: str | None = None) -> MeshinferError:
    sentence = str(body.get("error", "the agent refused without a reason"))
    if retry_after is not None and retry_after.isdigit():
        return BusyError(sentence, float(retry_after))
    return UserError(sentence) if body.get("exit_code") == UserError.exit_code else MeshinferError(sentence)


def find(home: Path) -> Client | None:
    """The agent of this home, or None if none runs or it does not listen yet."""
    if not agent_runs(home):
        return None
    data = read_bounded(home / API_FILE)
    try:
        note = json.loads(data or b"null")
        return Client(int(note["port"]), str(note["token"]), int(note["pid"]))
    except (ValueError, TypeError, KeyError):
        return None


def need(home: Path) -> Client:
    """As `find`, but raises NotRunning with what to do."""
    client = find(home)
    if client is not None:
        return client
    if agent_runs(home):
        raise NotRunning(f"the agent of {home} is just starting or stopping; try again in a moment")
    raise NotRunning(f"no agent runs on {home}; start one with: meshinfer start")
