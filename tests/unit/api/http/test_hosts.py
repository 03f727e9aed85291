"""Without a key, a server on the loopback interface answers only hosts of this machine."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from mlx_parallm.api.http.auth import checked_hosts, host_of, is_loopback_host
from mlx_parallm.cli.serve import warn_if_exposed
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, serve_fake

OPEN = ServerConfig(access_log=False)
KEYS = ServerConfig(api_keys=("key",), access_log=False)
LOOPBACK = "127.0.0.1"
EVIL = {"host": "evil.example", "origin": "http://evil.example"}


async def call(
    config: ServerConfig, bound_to: str | None, path: str, headers: dict[str, str]
) -> httpx2.Response:
    app = make_app(FakeEngine(), config, bound_to=bound_to)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.post(path, headers=headers)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.:8000",
        "localhost:",
        "127.0.0.1",
        "127.0.0.1.:80",
        "127.255.255.254:1",
        "[::1]",
        "[::1]:8000",
        "[0:0::0:1]:8000",
        "[::ffff:127.0.0.1]:8000",
        "[::FFFF:7f00:1]",
    ],
)
def test_hosts_of_this_machine_are_known(host: str) -> None:
    assert is_loopback_host(host_of(host) or "")


@pytest.mark.parametrize(
    "host",
    [
        "",
        ":8000",
        ".",
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "evil.localhost.",
        "localhost..",
        "localhost:80:80",
        "localhost:eighty",
        "localhost@evil.example",
        "evil.example@localhost",
        "localhost, evil.example",
        "localhost/evil",
        "localhost%2eevil",
        "0.0.0.0",
        "128.0.0.1",
        "192.168.1.2",
        # No addresses as RFC 3986 writes them.
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "127.000.000.001",
        "\u0661\u0662\u0667.0.0.1",
        "[::]",
        "[::2]",
        "[::1%lo]",
        "[::1%25lo]",
        "[fe80::1%eth0]",
        "[::ffff:10.0.0.1]",
        "[127.0.0.1]",
        "[localhost]",
        "[::1",
        "[::1].",
        "::1",
    ],
)
def test_other_hosts_are_none_of_this_machine(host: str) -> None:
    assert not is_loopback_host(host_of(host) or "")


@pytest.mark.parametrize("path", ["/pause", "/v1/files", "/v1/chat/completions", "/nothing"])
async def test_a_page_that_points_its_name_here_is_refused(path: str) -> None:
    response = await call(OPEN, LOOPBACK, path, EVIL)
    assert response.status_code == 421
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "host_not_allowed")
    assert "evil.example" in error["message"]
    assert "--allowed-hosts" in error["message"]
    assert response.headers["x-request-id"]


async def test_each_dialect_has_its_form() -> None:
    anthropic = await call(OPEN, LOOPBACK, "/v1/messages", EVIL)
    assert anthropic.status_code == 421
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "invalid_request_error"
    assert anthropic.headers["request-id"] == anthropic.json()["request_id"]
    sglang = await call(OPEN, LOOPBACK, "/pause_generation", EVIL)
    assert sglang.status_code == 421
    assert sglang.json()["success"] is False
    assert "evil.example" in sglang.json()["error_message"]


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/docs", "/openapi.json"])
async def test_what_needs_no_key_needs_a_known_host(path: str) -> None:
    app = make_app(FakeEngine(), OPEN, bound_to="::1")
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport) as client:
        for host, status in (("evil.example", 421), ("localhost:8000", 200)):
            assert (await client.get(f"http://{host}{path}")).status_code == status


@pytest.mark.parametrize(
    ("config", "bound_to", "is_checked"),
    [
        (OPEN, "127.0.0.1", True),
        (OPEN, "127.9.9.9", True),
        (OPEN, "::1", True),
        (OPEN, "::ffff:127.0.0.1", True),
        (ServerConfig(admin_api_keys=("admin",)), "127.0.0.1", True),
        (ServerConfig(fd=3), "127.0.0.1", True),
        (KEYS, "127.0.0.1", False),
        (OPEN, "0.0.0.0", False),
        (OPEN, "::", False),
        (OPEN, "192.168.1.2", False),
        (ServerConfig(allowed_hosts=("llm.lan",)), "0.0.0.0", True),
        (ServerConfig(allowed_hosts=("*",)), "127.0.0.1", False),
        # A Unix socket, or no socket at all.
        (OPEN, None, False),
    ],
)
def test_hosts_are_checked_where_no_key_is(
    config: ServerConfig, bound_to: str | None, is_checked: bool
) -> None:
    assert (checked_hosts(config, bound_to) is not None) is is_checked


async def test_more_hosts_can_be_allowed() -> None:
    config = ServerConfig(host="my-mac", allowed_hosts=("llm.example", "[fe80::1]"))
    for host, status in (
        ("llm.example", 404),
        ("LLM.example.:443", 404),
        ("[fe80:0::1]:80", 404),
        ("my-mac:8000", 404),
        ("127.0.0.1", 404),
        ("evil.llm.example", 421),
        ("fe80::1", 421),
    ):
        response = await call(config, LOOPBACK, "/nothing", {"host": host})
        assert response.status_code == status, host


def test_beyond_loopback_a_server_without_keys_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_exposed(OPEN, "::ffff:127.0.0.1")
        assert not caplog.records
        warn_if_exposed(OPEN, "0.0.0.0")
    assert "WITHOUT AN API KEY" in caplog.text


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_fake(FakeEngine(), OPEN, bound_to=LOOPBACK) as address:
        yield address


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHOST:\t127.0.0.1:1 \r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\n\r\n", 421),
        (b"GET /health HTTP/1.1\r\nhost:\r\n\r\n", 421),
        (b"GET /health HTTP/1.0\r\n\r\n", 421),
        (b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n", 200),
        (b"GET /health HTTP/1.0\r\nhost: evil.example\r\n\r\n", 421),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 421),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 421),
        (b"GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 421),
        (b"GET http://localhost:8000/health HTTP/1.1\r\nhost: evil.example\r\n\r\n", 200),
        (b"GET http://localhost@evil.example/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 421),
        (b"GET //evil.example/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"GET http://[::1/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: evil.example\r\nx-forwarded-host: localhost\r\n\r\n", 421),
        (b"OPTIONS /v1/files HTTP/1.1\r\nhost: evil.example\r\norigin: http://e\r\n\r\n", 421),
    ],
)
def test_a_host_is_where_http_says_it_is(url: str, head: bytes, status: int) -> None:
    address = urlsplit(url)
    target = (address.hostname or "", address.port or 0)
    with socket.create_connection(target) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 %d" % status)
