"""A hub on the loopback interface that breaks off, lies or refuses where a test asks for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")


def digest_of(name: str, data: bytes) -> str:
    """Return what the hub calls the content of a file."""
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class FakeHub:
    """Repositories by name, and how they misbehave.

    Attributes:
        repos: the files of each repository.
        refused: status and code of an error by repository.
        refused_files: a status by the name of a file.
        listed: sizes that the listing claims, by the name of a file.
        sent: contents that are sent instead of those listed, by the name of a file.
        num_breaks: how many times a file is cut off in its midst, by name.
        ignores_ranges: True for a server that sends files from the start, whatever is asked.
        ranges: the ``Range`` of each request for a file, by name.
        url: its address.
    """

    repos: Mapping[str, Mapping[str, bytes]]
    refused: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    refused_files: dict[str, int] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    num_breaks: dict[str, int] = field(default_factory=dict)
    ignores_ranges: bool = False
    ranges: dict[str, list[str | None]] = field(default_factory=dict)
    url: str = ""

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables that send huggingface_hub here, with a cache of its own."""
        where = {"HF_ENDPOINT": self.url, "HF_HOME": str(home)}
        return where | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def listing(self, path: str) -> tuple[int, dict[str, str], bytes] | None:
        """Return the answer to a question about a repository; None for another path."""
        for repo, (status, code) in self.refused.items():
            if path.startswith(f"/api/models/{repo}"):
                return status, {"X-Error-Code": code}, b""
        for repo, files in self.repos.items():
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return _json({"id": repo, "sha": COMMIT, "siblings": []})
            if path == f"/api/models/{repo}/tree/{COMMIT}":
                return _json([self._entry(name, data) for name, data in files.items()])
            if path.startswith(f"/api/models/{repo}/revision/"):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        return (404, {"X-Error-Code": "RepoNotFound"}, b"") if path.startswith("/api/") else None

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        digest, size = digest_of(name, data), self.listed.get(name, len(data))
        entry = {"type": "file", "path": name, "size": size, "oid": digest}
        if name.endswith(LARGE):
            entry["oid"] = "f" * 40
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 1}
        return entry

    def content(self, path: str) -> tuple[str, bytes] | None:
        """Return the name of a file and what is sent for it."""
        for repo, files in self.repos.items():
            name = path.removeprefix(f"/{repo}/resolve/{COMMIT}/")
            if name in files:
                return name, self.sent.get(name, files[name])
        return None


def _json(content: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        answer = self.hub.listing(path)
        entry = self.hub.content(path)
        if answer is not None:
            self._send(*answer)
        elif entry is not None:
            self._send_file(*entry)
        else:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")

    do_HEAD = do_GET

    def _send_file(self, name: str, data: bytes) -> None:
        if status := self.hub.refused_files.get(name):
            self._send(status, {"X-Error-Code": "GatedRepo"}, b"")
            return
        headers = {"ETag": f'"{digest_of(name, data)}"', "X-Repo-Commit": COMMIT}
        wanted, begin = self.headers.get("Range"), 0
        if self.command == "GET":
            self.hub.ranges.setdefault(name, []).append(wanted)
        if wanted is not None and not self.hub.ignores_ranges:
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        status, rest = 206 if begin else 200, data[begin:]
        if self.hub.num_breaks.get(name, 0) and self.command == "GET":
            self.hub.num_breaks[name] -= 1
            self._send(status, headers, rest[: len(rest) // 2], length=len(rest))
            self.close_connection = True
        else:
            self._send(status, headers, rest)

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub and set its address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
