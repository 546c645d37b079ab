"""A model hub on this machine: as much of the protocol as a snapshot download speaks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@attrs.define
class FakeHub:
    """What the hub holds and how it behaves.

    Args:
        folders: by model id.
        gated: ids that need `token`.
        breaks_off: names of files whose transfer ends in the middle.
        requests: method and path of each request that came.
    """

    folders: dict[str, Path] = attrs.field(factory=dict)
    gated: set[str] = attrs.field(factory=set)
    token: str = "let-me-in"
    breaks_off: set[str] = attrs.field(factory=set)
    down: bool = False
    requests: list[tuple[str, str]] = attrs.field(factory=list)
    endpoint: str = ""

    def fetched(self) -> set[str]:
        """Names of the files that were asked for."""
        return {
            path.rpartition("/")[2]
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing on the terminal."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path))
        if self.hub.down:
            return self._send(503, {}, b"")
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        model, action, revision, file = "/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:])
        if model not in self.hub.folders:
            return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"")
        if model in self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(403, {"X-Error-Code": "GatedRepo"}, b"")
        if revision not in ("main", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        folder = self.hub.folders[model]
        if is_api:
            return self._send(200, {"Content-Type": "application/json"}, self._listing(action, model, folder))
        content = (folder / file).read_bytes()
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        return self._send(200, headers, content, stop_early=file in self.hub.breaks_off)

    def _listing(self, action: str, model: str, folder: Path) -> bytes:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = [
            {
                "type": "file",
                "path": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest(),
            }
            for path in files
        ]
        facts = {
            "_id": "1",
            "id": model,
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        return json.dumps(entries if action == "tree" else {**facts, "siblings": []}).encode()

    def _send(self, status: int, headers: dict[str, str], body: bytes, *, stop_early: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if stop_early else body)
        self.close_connection = self.close_connection or stop_early


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub on a free port of this machine."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
