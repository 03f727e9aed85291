"""Keys, and the guard of routes that change the server."""

from __future__ import annotations

import httpx2
import pytest
from fastapi import Depends
from starlette.datastructures import Headers

from mlx_parallm.api.http.auth import KeyRing, client_of, require_admin
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

KEYS = ServerConfig(api_keys=("user",))
ADMIN_KEYS = ServerConfig(api_keys=("user",), admin_api_keys=("admin",))
ONLY_ADMIN = ServerConfig(admin_api_keys=("admin",))


async def call(config: ServerConfig, headers: dict[str, str]) -> httpx2.Response:
    """POST to a route behind the guard, on an application that has one more route."""
    app = make_app(FakeEngine(), config)

    @app.post("/guarded", dependencies=[Depends(require_admin)])
    async def guarded() -> str:
        return "changed"

    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://here:8000") as client:
        return await client.post("/guarded", headers=headers)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("config", "headers", "status"),
    [
        (ServerConfig(), {}, 200),
        (KEYS, {}, 401),
        (KEYS, bearer("user"), 200),
        (ADMIN_KEYS, bearer("user"), 401),
        (ADMIN_KEYS, bearer("admin"), 200),
        (ADMIN_KEYS, {"x-api-key": "admin"}, 200),
        (ONLY_ADMIN, {}, 401),
        (ONLY_ADMIN, bearer("admin"), 200),
        (ServerConfig(), {"origin": "http://here:8000"}, 200),
        (ServerConfig(), {"origin": "http://elsewhere:8000"}, 403),
        (ServerConfig(), {"origin": "http://here:9000"}, 403),
        (ServerConfig(), {"origin": "null"}, 403),
        (ADMIN_KEYS, bearer("admin") | {"origin": "https://elsewhere"}, 403),
        (ServerConfig(allowed_origins=("*",)), {"origin": "https://elsewhere"}, 403),
    ],
)
async def test_only_the_admin_of_this_origin_changes_the_server(
    config: ServerConfig, headers: dict[str, str], status: int
) -> None:
    response = await call(config, headers)
    assert response.status_code == status, response.text
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_ring_accepts_each_of_its_keys_and_nothing_else() -> None:
    ring = KeyRing(["one", "two"])
    assert ring.accepts("one")
    assert ring.accepts("two")
    assert not any(ring.accepts(key) for key in ("", "onetwo", "ONE", None))
    assert not KeyRing([]).accepts(None)


def test_clients_are_told_apart_without_their_keys() -> None:
    first, two = (client_of(headers_of(key), KEYS) for key in ("a", "b"))
    assert first != two
    assert "a" not in (first, two)
    assert client_of(headers_of("a"), ServerConfig()) == ""


def headers_of(key: str) -> Headers:
    return Headers({"x-api-key": key})


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "is missing"),
        ({"authorization": "Basic eA=="}, "is missing"),
        (bearer("other"), "is wrong"),
        ({"x-api-key": "other"}, "is wrong"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/pause"])
async def test_a_401_says_whether_the_key_is_missing_or_wrong(
    path: str, headers: dict[str, str], says: str
) -> None:
    for config in (KEYS, ONLY_ADMIN) if path == "/pause" else (KEYS,):
        transport = httpx2.ASGITransport(make_app(FakeEngine(), config))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here:8000") as client:
            method = "POST" if path == "/pause" else "GET"
            response = await client.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert says in response.json()["error"]["message"]
