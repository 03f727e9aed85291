"""Which routes serve encoder-decoders; all other routes that generate refuse them by name."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import httpx2
import pytest

from mlx_parallm.api.app import SLICES, STORING_SLICES, routes_of
from mlx_parallm.api.http.routing import DeclaredRoute
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine
from tests.fake_seq2seq import (
    NAME,
    START,
    FakeSeq2Seq,
    decoder_model,
    seq2seq_model,
    source_ids,
    taken,
)
from tests.fakes import EOS

MESSAGES = [{"role": "user", "content": "hi"}]
QUESTION = {"name": "q", "type": "predicate", "instructions": "It is so."}
SCORES = {"query": "hi", "items": ["you"], "label_token_ids": [1, 2]}
SESSION = {"seed": 1, "data": [{"text": "a", "label": "b"}], "batch_size": 1}
#: Bodies of the routes that refuse these models; the model is named beside them.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "/v1/decisions": [{"input": "hi", "questions": [QUESTION]}],
    "/v1/score": [SCORES],
    "/v1/generative_scoring": [SCORES],
    "/v1/rl/logprobs": [{"items": [{"prompt_token_ids": [1], "completion_token_ids": [2]}]}],
    "/v1/rl/rollout": [{"prompts": ["hi"]}],
    "/generate": [{"text": "hi"}, {"prompt": {"prompt_token_ids": [1]}}, {"input_ids": [1]}],
    "/inference/v1/generate": [{"token_ids": [1], "sampling_params": {}}],
    "/v1/chat/completions/render": [{"messages": MESSAGES}],
    "/v1/completions/render": [{"prompt": "hi"}],
    "/apply-template": [{"messages": MESSAGES}],
    "/v1/mezo/sessions": [
        SESSION | {"objective": {"kind": "completion"}, "data": [{"text": "a", "completion": "b"}]},
        SESSION
        | {
            "objective": {"kind": "reward", "reward_model": {"model": "x"}},
            "data": [{"text": "a"}],
        },
        {"seed": 1, "objective": {"kind": "caller"}},
    ],
}
#: Routes that take a ``Prelude`` and serve these models, or generate nothing.
SERVED = {
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}",
    "/v1/responses/compact",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}/items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/tokenize",
    "/",
    "/models/{name:path}",
    "/pipeline/{task}",
    "/pipeline/{task}/{name:path}",
}


async def post(engine: FakeEngine, path: str, body: dict[str, Any], **more: Any) -> httpx2.Response:
    app = make_app(engine, ServerConfig(**more))
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app, raise_app_exceptions=False), base_url="http://here"
    ) as client:
        return await client.post(path, json=body)


def takes_prelude(route: DeclaredRoute) -> bool:
    hints = get_type_hints(inspect.unwrap(route.endpoint))
    return Prelude in hints.values()


def test_every_route_that_generates_is_listed() -> None:
    generating = {
        route.path for route in routes_of(SLICES + STORING_SLICES) if takes_prelude(route)
    }
    assert generating <= SERVED | REFUSED.keys()
    assert generating >= SERVED
    assert not SERVED & REFUSED.keys()


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in REFUSED.items() for body in bodies]
)
@pytest.mark.parametrize("is_named", [True, False])
async def test_they_refuse_an_encoder_decoder_by_name(
    path: str, body: dict[str, Any], is_named: bool, tmp_path: Any
) -> None:
    if path == "/v1/mezo/sessions" and not is_named:
        pytest.skip("a session names its model")
    engine = FakeSeq2Seq()
    answer = await post(
        engine, path, body | ({"model": NAME} if is_named else {}), data_dir=str(tmp_path)
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert f"{NAME} is an encoder-decoder" in error["message"]
    assert (error["param"], error["code"]) == ("model", "unsupported_model")
    assert engine.submitted.empty()


@pytest.mark.parametrize("path", ["/generate", "/v1/rl/rollout", "/v1/completions/render"])
async def test_without_a_name_they_take_the_first_model_that_they_serve(path: str) -> None:
    engine = FakeSeq2Seq(seq2seq_model(), decoder_model())
    (body, *_) = REFUSED[path]
    answer = await post(engine, path, body)
    assert answer.status_code == 200, answer.text


async def test_capabilities_of_trainers_leave_them_out() -> None:
    app = make_app(FakeSeq2Seq(seq2seq_model(), decoder_model()), ServerConfig())
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://here"
    ) as client:
        models = (await client.get("/v1/rl/capabilities")).json()["models"]
    assert [model["model"] for model in models] == ["org/decoder"]


#: Bodies of conversations, the key of the answer with the tokens of the prompt, and of its text.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_without_a_template_conversations_are_refused(path: str) -> None:
    engine = FakeSeq2Seq()
    answer = await post(engine, path, {"model": NAME} | CONVERSATIONS[path])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "use /v1/completions" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert (answer.json().get("type") == "error") == (path == "/v1/messages")
    assert engine.submitted.empty()


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_with_a_template_its_text_is_the_source(path: str) -> None:
    engine = FakeSeq2Seq(seq2seq_model(templated=True))
    answer = await post(engine, path, {"model": NAME} | CONVERSATIONS[path])
    assert answer.status_code == 200, answer.text
    request = taken(engine)
    assert source_ids(request.inputs[0]) == [*b"user: hi\n"]
    assert request.prompt_ids == (START,)
    assert (request.params.forced_eos_id, request.params.beams) == (EOS, None)
    assert request.params.max_tokens == (9 if path == "/v1/messages" else 39)
    usage = answer.json()["usage"]
    assert (
        usage.get("prompt_tokens", usage.get("input_tokens"))
        + usage.get("cache_read_input_tokens", 0)
        + usage.get("cache_creation_input_tokens", 0)
        == len("user: hi\n") + 1
    )


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_a_conversation_over_the_longest_source_is_refused(path: str) -> None:
    engine = FakeSeq2Seq(seq2seq_model(templated=True))
    body = {"model": NAME} | CONVERSATIONS[path]
    field = "input" if "input" in body else "messages"
    body[field] = "x" * 70 if field == "input" else [{"role": "user", "content": "x" * 70}]
    answer = await post(engine, path, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "64" in message
    assert "77" in message


@pytest.mark.parametrize(
    ("path", "key"),
    [("/v1/responses/input_tokens", "input_tokens"), ("/v1/messages/count_tokens", "input_tokens")],
)
async def test_both_sides_are_counted(path: str, key: str) -> None:
    engine = FakeSeq2Seq(seq2seq_model(templated=True))
    body = {"input": "hi"} if "responses" in path else {"messages": MESSAGES}
    answer = await post(engine, path, {"model": NAME} | body)
    assert answer.json()[key] == len("user: hi\n") + 1


async def test_a_long_conversation_is_cut_where_the_body_says_so() -> None:
    engine = FakeSeq2Seq(seq2seq_model(templated=True))
    talk = [{"role": "user", "content": "x" * 40}, {"role": "user", "content": "y" * 40}]
    await post(engine, "/v1/responses", {"model": NAME, "input": talk, "truncation": "auto"})
    assert bytes(source_ids(taken(engine).inputs[0])).decode() == f"user: {'y' * 40}\n"
    body = {"model": NAME, "messages": MESSAGES, "truncate_prompt_tokens": 3}
    await post(engine, "/v1/chat/completions", body)
    assert source_ids(taken(engine).inputs[0]) == [*b"hi\n"]


async def test_images_are_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": NAME, "messages": [{"role": "user", "content": [image]}]}
    answer = await post(FakeSeq2Seq(seq2seq_model(templated=True)), "/v1/chat/completions", body)
    assert (answer.status_code, "images" in answer.text) == (400, True)


OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", OLLAMA)
async def test_ollamas_routes_take_the_text_of_a_template_as_the_source(path: str) -> None:
    engine = FakeSeq2Seq(seq2seq_model(templated=True))
    answer = await post(engine, path, {"model": NAME, "stream": False} | OLLAMA[path])
    assert answer.status_code == 200, answer.text
    request = taken(engine)
    assert source_ids(request.inputs[0]) == [*b"user: hi\n"]
    assert request.prompt_ids == (START,)
    assert answer.json()["prompt_eval_count"] == len("user: hi\n") + 1


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        ("/api/chat", {}, "use /v1/completions"),
        ("/api/generate", {}, "use /v1/completions"),
        ("/api/generate", {"raw": True}, f"{NAME} is an encoder-decoder"),
    ],
)
async def test_ollamas_routes_refuse_it_without_a_template(
    path: str, more: dict[str, Any], why: str
) -> None:
    engine = FakeSeq2Seq()
    answer = await post(engine, path, {"model": NAME, "stream": False} | OLLAMA[path] | more)
    assert (answer.status_code, why in answer.json()["error"]) == (400, True), answer.text
    assert engine.submitted.empty()
