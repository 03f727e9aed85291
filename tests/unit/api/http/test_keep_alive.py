"""Times that models stay in memory: which are read, and from when on they hold."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import InvalidRequestError
from tests.fake_encoders import FakeEncoders
from tests.fake_engine import FakeEngine
from tests.unit.api.http.test_cache_scope import (
    GENERATING,
    READER,
    READING,
    SCORER,
    USER,
    chosen,
    post,
)

OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "alias", "messages": USER, "stream": False},
    "/api/generate": {"model": "alias", "prompt": "a", "stream": False},
    "/api/generate#empty": {"model": "alias"},
    "/api/embed": {"model": "encoder", "input": "w5"},
    "/api/embed#empty": {"model": "encoder", "input": ""},
    "/api/embeddings": {"model": "encoder", "prompt": "w5"},
}
ROUTES = GENERATING | READING | OLLAMA
# A request in the background is admitted after its answer.
del ROUTES["/v1/responses#background"]
LOAD = {"/v1/models/load": {"model": "demo:mlm"}}
# Nothing is computed for an empty body, which is to keep a model or to let it leave.
COMPUTING = [path for path in ROUTES if not path.endswith("#empty")]
REFUSAL = InvalidRequestError("The prompt is too long.", param="prompt")


def make_engine() -> tuple[FakeEngine, FakeEncoders]:
    engine = FakeEngine()
    engine.script = chosen
    engine.pooling = encoders = FakeEncoders(READER, SCORER)
    return engine, encoders


@pytest.mark.parametrize("path", ROUTES)
async def test_an_admitted_request_keeps_its_model(path: str) -> None:
    engine, _ = make_engine()
    response = await post(engine, ServerConfig(), path, ROUTES[path] | {"keep_alive": "5m"}, None)
    assert response.status_code == 200, response.text
    assert list(engine.ttls.values()) == [300]


@pytest.mark.parametrize("path", COMPUTING)
async def test_a_refused_request_does_not(path: str) -> None:
    engine, encoders = make_engine()
    engine.refusal = encoders.thread.refusal = REFUSAL
    response = await post(engine, ServerConfig(), path, ROUTES[path] | {"ttl": 5}, None)
    assert response.status_code == 400, response.text
    assert engine.ttls == {}


@pytest.mark.parametrize("path", ROUTES | LOAD)
async def test_no_time_is_too_large_for_an_answer(path: str) -> None:
    await check_refused(path, "ttl" if path in LOAD else "keep_alive", 10**400)


@pytest.mark.parametrize("value", [10**400, 10**17, 1e300, "9" * 60, "9" * 60 + "h"])
@pytest.mark.parametrize("field", ["ttl", "keep_alive"])
async def test_a_time_beyond_centuries_is_refused(field: str, value: object) -> None:
    await check_refused("/v1/chat/completions", field, value)


async def check_refused(path: str, field: str, value: object) -> None:
    engine, _ = make_engine()
    response = await post(
        engine, ServerConfig(), path, (ROUTES | LOAD)[path] | {field: value}, None
    )
    assert response.status_code in (400, 422), response.text
    assert field in response.text
    assert engine.ttls == {}
