"""A model hub on the loopback interface: the part of the Hugging Face API that its client asks for a download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """`files` of one repository. `cut_after` breaks each transfer after so many bytes; `requests` is what was asked."""

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.repository = repository
        self.files = files
        self.commit = hashlib.sha1(repository.encode()).hexdigest()
        self.cut_after: int | None = None
        self.status = 200
        self.requests: list[tuple[str, str, str | None]] = []
        self.sent: dict[str, int] = {}
        self.url = ""

    def info(self) -> dict[str, Any]:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        return {"id": self.repository, "modelId": self.repository, "sha": self.commit, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.status != 200:
                self._send(hub.status, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            elif path.startswith(f"/api/models/{hub.repository}"):
                tree = hub.tree() if "/tree/" in path else hub.info()
                self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
            else:
                self._file(path, body)

        def _file(self, path: str, body: bool) -> None:
            prefix = f"/{hub.repository}/resolve/{hub.commit}/"
            data = hub.files.get(path.removeprefix(prefix)) if path.startswith(prefix) else None
            if data is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": hub.commit}
            begin = self.headers.get("Range")
            if begin is None:
                self._send(200, data, headers | {"Accept-Ranges": "bytes"}, body)
                return
            start = int(begin.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], headers, body)

        def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not body:
                return
            cut = hub.cut_after
            sent = data if cut is None or "X-Repo-Commit" not in headers else data[:cut]
            self.wfile.write(sent)
            hub.sent[self.path] = hub.sent.get(self.path, 0) + len(sent)
            if len(sent) < len(data):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
