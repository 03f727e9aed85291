"""Readiness by Open Inference Protocol while a net is loaded, and afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from mlx_parallm.api.app import create_app
from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from tests.engine_action import Do

LOADED, LATER = "demo:cartpole", "demo:memory"
BODY: dict[str, Any] = {
    "inputs": [{"name": "obs", "datatype": "FP32", "shape": [1, 2], "data": [0.0, 0.1]}]
}


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(EngineConfig(models=(ModelConfig(path=LOADED),)))
    engine.start()
    yield engine
    engine.stop()


async def known(engine: AsyncEngine, name: str) -> bool:
    await asyncio.sleep(0)
    return engine.find(name) is not None


async def readiness(client: httpx2.AsyncClient, name: str) -> set[tuple[int, bool]]:
    """Return status and field of a net's readiness, by all paths that have it."""
    answers = [
        await client.get(f"/v2/models/{name}{version}/ready") for version in ("", "/versions/1")
    ]
    assert all(answer.json()["name"] == name for answer in answers)
    return {(answer.status_code, answer.json()["ready"]) for answer in answers}


async def test_a_net_is_ready_once_it_is_loaded(engine: AsyncEngine) -> None:
    may_load = threading.Event()
    transport = httpx2.ASGITransport(create_app(engine, ServerConfig()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get(f"/v2/models/{LATER}/ready")).status_code == 404
        blocked = asyncio.ensure_future(engine.call(Do(lambda _: may_load.wait())))
        loading = asyncio.ensure_future(engine.load_model(ModelLoad(model=LATER)))
        while not await known(engine, LATER):
            pass
        assert await readiness(client, LATER) == {(503, False)}
        assert await readiness(client, LOADED) == {(200, True)}
        # The server serves the nets that it has.
        assert (await client.get("/v2/health/ready")).json() == {"ready": True}
        # What needs the net waits for it.
        waiting = asyncio.ensure_future(client.post(f"/v2/models/{LATER}/infer", json=BODY))
        described = asyncio.ensure_future(client.get(f"/v2/models/{LATER}"))
        may_load.set()
        await asyncio.gather(blocked, loading)
        assert await readiness(client, LATER) == {(200, True)}
        assert (await client.get("/v2/health/ready")).json() == {"ready": True}
        assert (await waiting).status_code == 200
        assert [each["name"] for each in (await described).json()["inputs"]] == ["obs"]
