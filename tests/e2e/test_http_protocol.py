"""Old versions of HTTP, handshakes for other protocols, and browsers that ask first."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from mlx_parallm.server_config import ServerConfig
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
    ("path", "status"), [("/v1/completions", 426), ("/v1/realtime", 404), ("/", 404)]
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


def answers(url: str, *pieces: bytes) -> list[bytes]:
    """Return the statuses of what is answered to requests that are sent in these pieces."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return re.findall(rb"HTTP/1\.1 (\d+) ", answer)


LAST = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
# As Java's client sends it.
OFFER = (
    b"POST /v1/chat/completions HTTP/1.1\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\nHost: 127.0.0.1\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
    b"Content-Type: application/json\r\n"
)
CONTENT = json.dumps(BODY).encode()
SIZED = b"Content-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)


@pytest.mark.parametrize("rest", [SIZED, CHUNKED])
@pytest.mark.parametrize("cut", [0, 20, len(OFFER), len(OFFER) + 30, len(OFFER) + 60])
def test_an_offer_of_another_protocol_is_ignored(url: str, rest: bytes, cut: int) -> None:
    request = OFFER + rest
    # Another request comes on the same connection, whether with the first or after it.
    for pieces in ([request[:cut], request[cut:] + LAST], [request[:cut], request[cut:], LAST]):
        assert answers(url, *pieces) == [b"200", b"200"]


@pytest.mark.parametrize(
    ("path", "status"), [(b"/v1/completions", b"426"), (b"/v1/responses", b"400")]
)
def test_a_refused_handshake_leaves_the_connection_usable(
    url: str, path: bytes, status: bytes
) -> None:
    handshake = (
        b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: keep-alive, Upgrade\r\n"
        b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n"
    )
    assert answers(url, handshake, LAST) == [status, b"200"]


@pytest.mark.parametrize("header", [b"connection", b"proxy-connection"])
def test_many_offers_at_once_are_requests(url: str, header: bytes) -> None:
    offer = b"GET /ping HTTP/1.1\r\nhost: 127.0.0.1\r\n%s: UPGRADE\r\nupgrade: h2c\r\n\r\n" % header
    assert answers(url, offer * 400 + LAST) == [b"200"] * 401


def test_a_tunnel_is_refused(url: str) -> None:
    tunnel = b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    (status,) = answers(url, tunnel)
    assert status.startswith(b"4")
