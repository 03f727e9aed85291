"""Every route that generates asks for room in the queue before it works on a body."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "hi"}]
QUESTION = {"name": "q", "type": "predicate", "instructions": "It is so."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/decisions": {"input": "hi", "questions": [QUESTION]},
    "/v1/score": {"query": "hi", "items": ["you"], "label_token_ids": [1, 2]},
    "/v1/generative_scoring": {"query": "hi", "items": ["you"], "label_token_ids": [1, 2]},
    "/v1/rl/logprobs": {"items": [{"prompt_token_ids": [1], "completion_token_ids": [2]}]},
    "/v1/rl/rollout": {"prompts": ["hi"]},
    "/generate": {"text": "hi"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
}


async def post(engine: FakeEngine, path: str, max_waiting: int | None = None) -> httpx2.Response:
    app = make_app(engine, ServerConfig(), max_waiting=max_waiting)
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app, raise_app_exceptions=False), base_url="http://here"
    ) as client:
        return await client.post(path, json={"model": "alias"} | BODIES[path])


@pytest.mark.parametrize("path", BODIES)
async def test_a_full_queue_refuses_before_anything_is_encoded(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    engine = FakeEngine()
    await post(engine, path)
    assert not engine.submitted.empty()
    engine.is_full = True

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a prompt was encoded")

    tokenizer: type[Tokenizer] = type(GENERATION.client(engine).first_model().tokenizer)
    monkeypatch.setattr(tokenizer, "encode", fail)
    monkeypatch.setattr(tokenizer, "render_chat", fail)
    answer = await post(engine, path)
    assert answer.status_code == 429


async def test_more_questions_than_an_empty_queue_holds_are_refused() -> None:
    app = make_app(FakeEngine(), ServerConfig(), max_waiting=1)
    body = {"model": "alias", "input": "hi", "questions": [QUESTION, QUESTION | {"name": "r"}]}
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://here"
    ) as client:
        answer = await client.post("/v1/decisions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
