"""Bodies and connections that are meant to cost much."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx2
import pytest

from mlx_parallm.api.http.connection import (
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    MAX_LATE_BYTES,
    BoundedProtocol,
)
from mlx_parallm.api.http.declared import SMALL_BODY_BYTES
from mlx_parallm.server_config import ServerConfig
from tests.fake_engine import FakeEngine, hang, serve_fake, write

HI = {"model": "alias", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
KEYS = ("one", "two")
TIMEOUT_S = 1.0
MAX_DEPTH = 200
NEVER_S = 1e6


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    config = ServerConfig(
        api_keys=KEYS, client_timeout_s=TIMEOUT_S, max_client_body_bytes=3000, sse_keep_alive_s=0
    )
    with serve_fake(engine, config) as url:
        yield engine, url


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0))


def head(length: int, key: str = "one") -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def post_with_room(url: str, content: str, headers: dict[str, str]) -> httpx2.Response:
    """Return the answer once the bodies of earlier requests no longer count."""
    while (answer := httpx2.post(url, content=content, headers=headers)).status_code == 429:
        pass
    return answer


def test_half_a_body_is_a_408_and_the_end_of_the_connection(served: tuple[FakeEngine, str]) -> None:
    with connect(served[1]) as connection:
        connection.sendall(head(100) + b"{")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nx: "])
def test_half_a_head_ends_the_connection(served: tuple[FakeEngine, str], sent: bytes) -> None:
    with connect(served[1]) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_an_endless_head_ends_the_connection(served: tuple[FakeEngine, str]) -> None:
    with connect(served[1]) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        # Much more than the buffers between them hold.
        endless = b"x: " + b"y" * 1000 * MAX_HEAD_BYTES
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(endless)


def chunked_head(*fields: str) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "host: a", "content-type: application/json", *fields]
    return "\r\n".join([*lines, "transfer-encoding: chunked", "\r\n"]).encode()


@pytest.mark.parametrize("begin", [b"0\r\nx: ", b"0\r\n", b"1;"])
def test_endless_trailers_and_chunk_extensions_end_the_connection(begin: bytes) -> None:
    # Without time limits: only what has come can end it.
    with serve_fake(FakeEngine(), ServerConfig(client_timeout_s=0)) as url, connect(url) as client:
        client.sendall(chunked_head() + begin)
        piece = b"x: y\r\n" if begin == b"0\r\n" else b"y" * 6
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(piece * 200 * MAX_FRAMING_BYTES)


def test_trailers_do_not_change_a_request(served: tuple[FakeEngine, str]) -> None:
    body = json.dumps(HI).encode()
    content = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n"
    for key, trailer, status in [("one", "wrong", 200), ("wrong", "one", 401)]:
        with connect(served[1]) as connection:
            trailers = f"authorization: Bearer {trailer}\r\nhost: b\r\n\r\n".encode()
            connection.sendall(chunked_head(f"x-api-key: {key}") + content + trailers)
            assert status_of(connection) == status


def test_small_chunks_are_a_body(served: tuple[FakeEngine, str]) -> None:
    body = json.dumps(HI | {"padding": "x" * 1000}).encode()
    content = b"".join(b"1;ext=a\r\n%c\r\n" % byte for byte in body) + b"0\r\nx: y\r\n\r\n"
    with connect(served[1]) as connection:
        for _ in range(2):
            connection.sendall(chunked_head("x-api-key: one") + content)
            assert status_of(connection) == 200


def test_a_stream_that_nobody_reads_is_aborted(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    while not engine.aborted.empty():
        engine.aborted.get()
    engine.script = write("x" * 60_000)
    body = json.dumps(HI | {"stream": True, "max_tokens": 60_000}).encode()
    with connect(url) as connection:
        connection.sendall(head(len(body)) + body)
        assert engine.aborted.get()
    engine.script = write("hello")


def status_of(connection: socket.socket) -> int:
    """Read the next answer, and return its status."""
    with HTTPResponse(connection) as answer:
        answer.begin()
        answer.read()
        return answer.status


def send_often(connection: socket.socket, piece: bytes) -> None:
    """Send much more than the buffers between client and server hold."""
    for _ in range(512):
        connection.sendall(piece)


LIMITED = "/abort_requests"
MEGABYTE = b"x" * 2**20
CHUNK = b"%x\r\n%b\r\n" % (len(MEGABYTE), MEGABYTE)


@pytest.mark.parametrize(
    ("target", "fields", "piece", "status"),
    [
        (f"POST {CHAT}", f"content-length: {2**40}", MEGABYTE, 401),
        (f"POST {CHAT}", "transfer-encoding: chunked", CHUNK, 401),
        (f"POST {LIMITED}", f"x-api-key: one\r\ncontent-length: {2**40}", MEGABYTE, 413),
        (f"POST {LIMITED}", "x-api-key: one\r\ntransfer-encoding: chunked", CHUNK, 413),
        (f"POST {CHAT}", f"origin: http://b\r\ncontent-length: {2**40}", MEGABYTE, 403),
        ("GET /health", f"content-length: {2**40}", MEGABYTE, 200),
        ("POST /nothing", f"x-api-key: one\r\ncontent-length: {2**40}", MEGABYTE, 404),
    ],
)
def test_an_endless_body_after_its_answer_ends_the_connection(
    served: tuple[FakeEngine, str], target: str, fields: str, piece: bytes, status: int
) -> None:
    with connect(served[1]) as connection:
        head = f"{target} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{fields}\r\n\r\n"
        # A chunked body is refused once it is over the limit.
        connection.sendall(head.encode() + (CHUNK if status == 413 and piece is CHUNK else b""))
        assert status_of(connection) == status
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_often(connection, piece)


def test_a_body_that_stops_after_its_answer_ends_the_connection(
    served: tuple[FakeEngine, str],
) -> None:
    with connect(served[1]) as connection:
        connection.sendall(head(1000, key="wrong") + b"x" * 999)
        assert read_all(connection).startswith(b"HTTP/1.1 401")


def test_a_small_body_after_its_answer_keeps_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_parallm.api.http.connection.MAX_LATE_S", NEVER_S)
    rest = b"x" * (MAX_LATE_BYTES // 2)
    config = ServerConfig(api_keys=KEYS, client_timeout_s=0)
    with serve_fake(FakeEngine(), config) as url, connect(url) as connection:
        for _ in range(4):
            connection.sendall(head(len(rest), key="wrong"))
            assert status_of(connection) == 401
            connection.sendall(rest)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert status_of(connection) == 200


@pytest.mark.parametrize("size", [SMALL_BODY_BYTES + 1, 20 * MAX_LATE_BYTES])
def test_a_client_that_sends_all_first_gets_its_answer(
    served: tuple[FakeEngine, str], size: int
) -> None:
    headers = {"content-type": "application/json", "x-api-key": "one"}
    answer = httpx2.post(served[1] + LIMITED, content=b" " * size, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


class Clock:
    """A loop and a transport: what is to be called later is called when the test says so."""

    def __init__(self, *unsent: int) -> None:
        self.unsent = list(unsent)
        self.later: list[tuple[Any, ...]] = []
        self.is_aborted = False

    def call_later(self, _seconds: float, *call: Any) -> Mock:
        self.later.append(call)
        return Mock()

    def get_write_buffer_size(self) -> int:
        return self.unsent.pop(0)

    def abort(self) -> None:
        self.is_aborted = True


def test_only_a_reader_that_takes_nothing_is_cut_off() -> None:
    clock = Clock(100, 99, 50, 50)
    protocol = BoundedProtocol.__new__(BoundedProtocol)
    protocol.loop = protocol.transport = clock  # type: ignore[assignment]
    protocol._timeout_s, protocol._write = 1.0, None
    protocol._watch_write(None)
    for is_cut in (False, False, True):
        function, *arguments = clock.later.pop()
        function(*arguments)
        assert clock.is_aborted is is_cut
    assert clock.later == []


def test_bodies_of_one_client_are_bounded_together(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    body = json.dumps(HI | {"padding": "x" * 2000})
    while not engine.submitted.empty():
        engine.submitted.get()
    engine.script = hang(after="a")
    headers = {"content-type": "application/json", "authorization": "Bearer one"}
    with connect(url) as first:
        first.sendall(head(len(body)) + body.encode())
        engine.submitted.get()
        engine.script = write("hello")
        second = httpx2.post(url + CHAT, content=body, headers=headers)
        assert second.status_code == 429
        assert second.headers["retry-after"]
        other = httpx2.post(
            url + CHAT, content=body, headers=headers | {"authorization": "Bearer two"}
        )
        assert other.status_code == 200
    engine.aborted.get()
    large = json.dumps(HI | {"padding": "x" * 5000})
    assert post_with_room(url + CHAT, large, headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "depth"),
    [
        (CHAT, MAX_DEPTH + 1),
        (CHAT, 1_000_000),
        *((path, 10_000) for path in ("/v1/completions", "/v1/responses", "/abort_requests")),
    ],
)
def test_a_deep_body_is_a_400(served: tuple[FakeEngine, str], path: str, depth: int) -> None:
    _, url = served
    raw = json.dumps(HI | {"x": "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
    headers = {"content-type": "application/json", "authorization": "Bearer one"}
    response = post_with_room(url + path, raw, headers)
    assert response.status_code == 400
    assert "nested too deeply" in response.json()["error"]["message"]
