"""Requests that load and unload models, and completions that may wait for a load."""

from __future__ import annotations

import http.client
import json
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.measure import BenchmarkError
from benchmarks.servers import Server

# LOADED: the comment of a stream that waited for its model, with the milliseconds.
LOADED = re.compile(rb": \S+ was loaded in (\d+) ms")
EVENT, LAST_EVENT = b"data: ", b"[DONE]"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion; times are in seconds.

    Attributes:
        text: what was generated.
        begin_s: when it was requested, by the client's clock.
        first_s: from then to the first token.
        total_s: from then to the end.
        load_s: the time that it waited for loads of its model by the server's clock; None if the
            model was there.
        error: why there is no answer; None if there is one.
    """

    text: str
    begin_s: float
    first_s: float
    total_s: float
    load_s: float | None = None
    error: str | None = None


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Return what ``POST`` answers; raise BenchmarkError unless it succeeds."""
    return _json(server, "POST", path, body)


def get(server: Server, path: str) -> Any:
    """Return what ``GET`` answers; raise BenchmarkError unless it succeeds."""
    return _json(server, "GET", path, None)


def load(server: Server, model: str, **more: Any) -> float:
    """Load a model, which can serve then; return the seconds that it took."""
    begin_s = time.perf_counter()
    post(server, "/v1/models/load", {"model": model} | more)
    return time.perf_counter() - begin_s


def unload(server: Server, model: str) -> None:
    """Unload a model."""
    post(server, "/v1/models/unload", {"model": model})


def complete(server: Server, body: dict[str, Any]) -> Answer:
    """Return a streamed completion; an error is part of it."""
    begin_s = time.perf_counter()
    connection = _connection(server)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), JSON)
        response = connection.getresponse()
        if response.status != http.client.OK:
            return _failed(begin_s, f"{response.status}: {response.read()[:300]!r}")
        return _read(response, begin_s)
    except (OSError, ValueError, http.client.HTTPException) as problem:
        return _failed(begin_s, repr(problem))
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, begin_s: float) -> Answer:
    """Return what a stream answers; raise ValueError if it is cut or fails."""
    parts: list[str] = []
    first_s = 0.0
    loads_s: list[float] = []
    for line in response:
        if (loaded := LOADED.match(line)) is not None:
            loads_s.append(int(loaded[1]) / 1e3)
        if not line.startswith(EVENT):
            continue
        data = line.removeprefix(EVENT).strip()
        if data == LAST_EVENT:
            total_s = time.perf_counter() - begin_s
            load_s = sum(loads_s) if loads_s else None
            return Answer("".join(parts), begin_s, first_s, total_s, load_s)
        event = json.loads(data)
        if "error" in event:
            raise ValueError(str(event["error"]))
        text = "".join(choice["text"] for choice in event["choices"])
        if text and not parts:
            first_s = time.perf_counter() - begin_s
        parts.append(text)
    raise ValueError("the stream ended early")


def _failed(begin_s: float, error: str) -> Answer:
    total_s = time.perf_counter() - begin_s
    return Answer("", begin_s, total_s, total_s, error=error)


def _json(server: Server, method: str, path: str, body: dict[str, Any] | None) -> Any:
    connection = _connection(server)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), JSON)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise BenchmarkError(
            f"{method} {path} answered {response.status}: {content[:500]!r}\n{server.log_tail()}"
        )
    is_json = (response.getheader("content-type") or "").startswith(JSON["content-type"])
    return json.loads(content) if is_json else content.decode()


def _connection(server: Server) -> http.client.HTTPConnection:
    address = urlsplit(server.base_url)
    return http.client.HTTPConnection(address.hostname or "", address.port)
