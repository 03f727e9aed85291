"""Requests to the application over encoders without a model."""

from __future__ import annotations

from typing import Any

import httpx2

from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_encoders import FakeEncoders
from tests.fake_engine import FakeEngine


async def post(
    served: FakeEncoders | None, path: str, body: Any, config: ServerConfig | None = None
) -> httpx2.Response:
    """Return the answer to a body; ``served`` None is a server without encoders."""
    return await _ask(served, "POST", path, config, json=body)


async def fetch(served: FakeEncoders, path: str) -> httpx2.Response:
    """Return the answer to a GET of a path."""
    return await _ask(served, "GET", path)


async def _ask(
    served: FakeEncoders | None,
    method: str,
    path: str,
    config: ServerConfig | None = None,
    **more: Any,
) -> httpx2.Response:
    engine = FakeEngine()
    if served is not None:
        engine.pooling = served
    transport = httpx2.ASGITransport(make_app(engine, config or ServerConfig()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://here:8000") as client:
        return await client.request(method, path, **more)


def refused_field(answer: httpx2.Response) -> tuple[int, str | None]:
    """Return the status and the field that an error names."""
    return answer.status_code, answer.json()["error"]["param"]
