"""Old versions of HTTP, handshakes for other protocols, and browsers that ask first."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from mlx_parallm.config import ServerConfig
from tests.fake_engine import FakeEngine, serve_fake, write

PAGE = "https://page.example"
BODY = {"model": "alias", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = FakeEngine()
    engine.script = write("hello")
    with serve_fake(engine, ServerConfig(allowed_origins=(PAGE,))) as url:
        yield url


def exchange(url: str, request: bytes) -> tuple[bytes, bytes]:
    """Return head and body of an answer, after which the server closes the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("stream", [False, True])
def test_answers_to_http_1_0_are_not_chunked(url: str, stream: bool) -> None:
    content = json.dumps(BODY | {"stream": stream}).encode()
    head, body = exchange(
        url,
        b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
        b"host: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content),
    )
    assert b" 200 " in head
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("path", ["/v1/models", "/docs", "/metrics", "/missing"])
def test_any_route_answers_http_1_0(url: str, path: str) -> None:
    head, body = exchange(url, f"GET {path} HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n".encode())
    assert b"transfer-encoding" not in head
    assert body


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/responses", 426), ("/v1/realtime", 404), ("/", 404)]
)
def test_a_websocket_handshake_is_refused_as_a_request(url: str, path: str, status: int) -> None:
    handshake = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==",
    }
    if path == "/":
        path = "/v1/nothing"
    response = httpx2.get(url + path, headers=handshake)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]
    if status == 426:
        assert "POST" in response.json()["error"]["message"]
        assert response.headers["upgrade"] == "HTTP/1.1"


def test_a_wrong_method_is_named_with_those_that_are_taken(url: str) -> None:
    response = httpx2.get(f"{url}/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == (
        "/v1/chat/completions does not take the method GET, but POST."
    )


@pytest.mark.parametrize(
    ("allowed", "origin", "status"),
    [((PAGE,), PAGE, 200), ((PAGE,), "https://other.example", 400), (("*",), PAGE, 400)],
)
def test_named_pages_may_reach_a_private_network(
    allowed: tuple[str, ...], origin: str, status: int
) -> None:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    with serve_fake(FakeEngine(), ServerConfig(allowed_origins=allowed)) as url:
        response = httpx2.options(f"{url}/v1/chat/completions", headers=headers)
    assert response.status_code == status
    if status == 200:
        assert response.headers["access-control-allow-private-network"] == "true"
        assert response.headers["access-control-allow-origin"] == PAGE
