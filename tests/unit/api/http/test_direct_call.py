"""Routes that are called directly answer as FastAPI's application of them does."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from mlx_parallm.api.app import SLICES, routes_of
from mlx_parallm.api.http.json_body import DirectCall, JsonRequest
from mlx_parallm.api.http.routing import declared_routes
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, fail

PATH = "/v1/chat/completions"
JSON = "application/json"
GOOD = {"model": "alias", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "good": GOOD,
    "ignored fields": GOOD | {"unheard_of": 1, "stream_options": {"odd": 2}},
    "unknown model": GOOD | {"model": "none"},
    "wrong field": GOOD | {"temperature": "hot"},
    "two wrong fields": GOOD | {"temperature": "hot", "n": 0},
    "missing field": {"model": "alias"},
    "list": [GOOD],
    "null": None,
    "text": "hello",
}
RAW = {
    "empty": b"",
    "not JSON": b"{]",
    "half a pair": b'{"model": "\\ud800"}',
    "too deep": b"[" * 1000,
    **{name: json.dumps(body).encode() for name, body in BODIES.items()},
}
TYPES = (
    *(JSON, "application/json; charset=utf-8", "Application/JSON", "application/problem+json"),
    *("application/json x", "text/plain", "application/jsonx", "json", "", None),
)
#: What differs between two answers to one request.
VOLATILE = ("id", "created")


def routes_called_directly() -> set[str]:
    return {route.path for route in routes_of(SLICES) if DirectCall.of(route) is not None}


async def answer(
    raw: bytes, content_type: str | None, engine: FakeEngine, *, is_general: bool, path: str = PATH
) -> tuple[int, dict[str, str], object]:
    """Return status, headers and body of an answer, without what no two answers share."""
    app = make_app(engine, ServerConfig())
    changed = [route for route in declared_routes(app) if is_general and route.path == PATH]
    direct = [route.direct for route in changed]
    for route in changed:
        route.direct = None
    headers = {"x-request-id": "same"} | ({"content-type": content_type} if content_type else {})
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post(path, content=raw, headers=headers)
    finally:
        # Routes belong to the modules, which all applications share.
        for route, call in zip(changed, direct, strict=True):
            route.direct = call
    kept = {name: value for name, value in response.headers.items() if name != "date"}
    content = response.json()
    return response.status_code, kept, {k: v for k, v in content.items() if k not in VOLATILE}


def test_routes_of_short_requests_are_called_directly() -> None:
    paths = {PATH, "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/classify", "/generate"}
    assert paths <= routes_called_directly()
    # These answer with values, or take parts of the path.
    others = {"/v1/messages/count_tokens", "/pipeline/{task}", "/v1/models/load"}
    assert not others & routes_called_directly()


@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize("name", RAW)
async def test_every_body_is_answered_alike(name: str, content_type: str | None) -> None:
    general = await answer(RAW[name], content_type, FakeEngine(), is_general=True)
    assert await answer(RAW[name], content_type, FakeEngine(), is_general=False) == general


@pytest.mark.parametrize("body", ["good", "wrong field", "unknown model"])
async def test_a_refusal_by_the_engine_is_answered_alike(body: str) -> None:
    answers: list[object] = []
    for is_general in (True, False):
        engine = FakeEngine()
        engine.refusal = OverloadedError("Full.")
        answers.append(await answer(RAW[body], JSON, engine, is_general=is_general))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "error", [RuntimeError("bug"), InvalidRequestError("No.", param="messages")]
)
async def test_a_failure_is_answered_alike(error: Exception) -> None:
    answers: list[object] = []
    for is_general in (True, False):
        engine = FakeEngine()
        engine.script = fail(error)  # type: ignore[arg-type]
        answers.append(await answer(RAW["good"], JSON, engine, is_general=is_general))
    assert answers[0] == answers[1]


async def test_a_body_that_was_read_is_repeated_once() -> None:
    messages = iter(
        [
            {"type": "http.request", "body": b"{", "more_body": True},
            {"type": "http.request", "body": b"}", "more_body": False},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(messages)

    request = JsonRequest({"type": "http", "headers": []}, receive)
    assert await request.body() == b"{}"
    repeated = request.repeated()
    assert await repeated() == {"type": "http.request", "body": b"{}", "more_body": False}
    assert await repeated() == {"type": "http.disconnect"}
