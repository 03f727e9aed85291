"""Every route whose request waits for an engine ends the request if its client leaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from mlx_parallm.api.app import SLICES, create_app, examples_of, routes_of
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.openapi import Example
from mlx_parallm.api.http.routing import RouteIndex
from mlx_parallm.api.turns import generation
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from scripts.example_requests import MODELS

INDEX = RouteIndex.of(routes_of(SLICES))
pytestmark = pytest.mark.slow

#: Requests of users that need nothing but models.
EXAMPLES = {
    key: example
    for key, example in examples_of(SLICES).items()
    if example.request.json is not None
    and not example.needs
    and example.refused is None
    and not example.request.json.get("background")
    and INDEX.find(*key.partition("#")[0].split(" ", 1)).access is Access.KEY
}
#: Routes of each kind of models, some of which wait for an engine in their own way.
WAITING = {
    f"POST {path}"
    for path in (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/generate", "/v1/embeddings", "/v1/rerank", "/v1/mlm", "/v1/rl/logprobs"),
        *("/v1/decisions", "/v1/predict", "/v1/rl/act", "/v2/models/{name}/infer"),
    )
}


class Visit:
    """A client that sends a request, and leaves once it may."""

    def __init__(self, key: str, example: Example) -> None:
        method, path = key.partition("#")[0].split(" ", 1)
        values = example.request.path
        path = re.sub(r"\{(\w+)(:path)?\}", lambda match: values[match[1]], path)
        self.scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._body: bytes | None = json.dumps(example.request.json).encode()
        self.is_watched = False
        self.leaves = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        self.is_watched = True
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        pass


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    models = tuple(ModelConfig(path=path) for path in MODELS)
    engine = AsyncEngine(EngineConfig(models=models, cache=CacheConfig(kv_cache_bytes=64 << 20)))
    engine.start()
    yield engine
    engine.stop()


async def num_requests(engine: AsyncEngine) -> int:
    # Others get their turns, although the question may be answered at once.
    await asyncio.sleep(0)
    return (await engine.load()).num_requests


async def watches(app: ASGIApp, engine: AsyncEngine, visit: Visit) -> bool | None:
    """Return whether a route ends its request when the client leaves; None if none waits."""
    answering = asyncio.ensure_future(app(visit.scope, visit.receive, visit.send))
    while not answering.done() and not await num_requests(engine):
        pass
    waits = not answering.done()
    for _ in range(10):
        await asyncio.sleep(0)
    if waits and not visit.is_watched:
        await engine.control.resume()
    visit.leaves.set()
    await answering
    assert await num_requests(engine) == 0
    return visit.is_watched if waits else None


async def test_a_client_that_leaves_ends_its_request(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Routes watch a client only if the answer takes long; here it takes for ever.
    monkeypatch.setattr(generation, "WATCH_AFTER_S", 0.0)
    app = create_app(engine, ServerConfig())
    ended: dict[str, bool | None] = {}
    for key, example in EXAMPLES.items():
        await engine.control.pause(PauseMode.KEEP)
        ended[key] = await watches(app, engine, Visit(key, example))
    await engine.control.resume()
    assert ended.keys() >= WAITING
    assert not [key for key, is_ended in ended.items() if is_ended is False]
    assert not [key for key in WAITING if ended[key] is None]
