"""What happens around every route: limits of bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from fastapi import FastAPI, Request

from mlx_parallm.api.app import create_app
from mlx_parallm.api.middleware import SMALL_BODY_BYTES
from mlx_parallm.config import ServerConfig
from tests.fake_engine import FakeEngine

LARGE = 100_000


def make_app(config: ServerConfig) -> FastAPI:
    """The application with two routes more, which state no limit."""
    app = create_app(FakeEngine(), config)

    @app.post("/other")
    @app.post("/tokenizer")
    async def size(request: Request) -> int:
        return len(await request.body())

    return app


def client_of(app: FastAPI, root_path: str = "") -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app, root_path=root_path)
    return httpx2.AsyncClient(transport=transport, base_url="http://here")


async def in_pieces(size: int) -> AsyncIterator[bytes]:
    yield b" " * (size - 1)
    yield b" "


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("path", "limit", "status"),
    [
        ("/v1/chat/completions", LARGE, 400),
        ("/chat/completions", LARGE, 400),
        ("/v1/completions", LARGE, 400),
        ("/completions", LARGE, 400),
        ("/tokenize", LARGE, 400),
        ("/detokenize", LARGE, 400),
        ("/other", SMALL_BODY_BYTES, 200),
        ("/tokenizer", SMALL_BODY_BYTES, 200),
    ],
)
async def test_each_route_has_its_limit(path: str, limit: int, status: int, declared: bool) -> None:
    headers = {"content-type": "application/json"}
    async with client_of(make_app(ServerConfig(max_body_bytes=LARGE))) as client:
        for size, expected in ((limit, status), (limit + 1, 413)):
            content = b" " * size if declared else in_pieces(size)
            response = await client.post(path, content=content, headers=headers)
            assert response.status_code == expected
    assert response.json()["error"]["code"] == "request_too_large"
    assert f"{limit} bytes" in response.json()["error"]["message"]


async def test_a_limit_holds_below_a_root_path() -> None:
    async with client_of(make_app(ServerConfig()), root_path="/llm") as client:
        response = await client.post("/llm/tokenize", json={"prompt": " " * LARGE})
    assert response.status_code == 200


async def test_a_large_body_for_no_route_is_not_found() -> None:
    async with client_of(make_app(ServerConfig())) as client:
        response = await client.post("/v1/nothing", content=b" " * LARGE)
    assert response.status_code == 404
