"""Errors of Anthropic's routes over a scripted engine, clients that leave, silence, and keys."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anthropic
import httpx2
import pytest

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types import errors
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, fail, hang, serve_fake
from tests.message_requests import BODY, HI, TOOLS, ask, stream


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine, ServerConfig(max_body_bytes=4096)) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    served[0].reset()
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "source"),
        ({"system": 7}, "system"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": 7}, "metadata"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "f", "type": 1, "input_schema": {}}]}, "tools.0.type"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools.1.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": TOOLS}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        # The fake's vocabulary has no single token for the end of thinking.
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 7}}, "output_format.schema"),
        (
            {"output_format": {"type": "json_schema", "schema": {}}, "regex": "a"},
            "exclude each other",
        ),
        ({"messages": [*HI, {"role": "user", "content": "\ud800"}]}, "surrogate"),
    ],
)
def test_a_bad_field_is_named(
    engine: FakeEngine, url: str, more: dict[str, Any], word: str
) -> None:
    response = httpx2.post(
        f"{url}/v1/messages",
        content=json.dumps(BODY | more),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert word in error["error"]["message"]


@pytest.mark.parametrize(
    ("error", "cls", "kind"),
    [
        (errors.OverloadedError("full"), anthropic.RateLimitError, "rate_limit_error"),
        (errors.ShuttingDownError("bye"), anthropic.OverloadedError, "overloaded_error"),
        (errors.EngineDeadError("dead"), anthropic.OverloadedError, "overloaded_error"),
        (errors.StepError("no"), anthropic.InternalServerError, "api_error"),
        (
            errors.InvalidRequestError("no", param="stop"),
            anthropic.BadRequestError,
            "stop_sequences",
        ),
        (errors.PermissionDeniedError("no"), anthropic.PermissionDeniedError, "permission_error"),
    ],
)
def test_the_engines_refusals(
    engine: FakeEngine,
    client: anthropic.Anthropic,
    error: errors.ParallmError,
    cls: type[anthropic.APIStatusError],
    kind: str,
) -> None:
    engine.refusal = error
    with pytest.raises(cls) as caught:
        ask(client)
    assert kind in str(caught.value.body)
    assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]
    engine.refusal = None
    assert ask(client).stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("call", "cls", "kind"),
    [
        (lambda c: ask(c, model="no"), anthropic.NotFoundError, "not_found_error"),
        (lambda c: c.messages.batches.list(), anthropic.NotFoundError, "not_found_error"),
        (lambda c: c.get("/v1/messages", cast_to=object), anthropic.APIStatusError, None),
        (lambda c: ask(c, system="a" * 5000), anthropic.ContentTooLargeError, "request_too_large"),
    ],
)
def test_errors_that_no_route_makes(
    engine: FakeEngine,
    client: anthropic.Anthropic,
    call: Callable[[anthropic.Anthropic], Any],
    cls: type[anthropic.APIStatusError],
    kind: str | None,
) -> None:
    with pytest.raises(cls) as caught:
        call(client)
    assert caught.value.type == (kind or "invalid_request_error")
    assert caught.value.error_code == caught.value.body["error"].get("details", {}).get(  # type: ignore[index]
        "error_code"
    )
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"{", "not JSON"), (b"[]", "JSON object"), (b"[" * 300 + b"]" * 300, "nested too deeply")],
)
def test_a_body_that_is_none(engine: FakeEngine, url: str, content: bytes, word: str) -> None:
    for path in ("/v1/messages", "/messages/count_tokens"):
        response = httpx2.post(
            url + path, content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        assert response.json()["type"] == "error"
        assert word in response.json()["error"]["message"]


def test_a_bug_is_told_in_the_same_shape(engine: FakeEngine, url: str) -> None:
    async def broken(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        raise ZeroDivisionError
        yield

    engine.script = broken
    response = httpx2.post(f"{url}/v1/messages", json=BODY)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    assert response.json()["request_id"] == response.headers["request-id"]


def test_an_error_within_a_stream_is_its_last_event(
    engine: FakeEngine, client: anthropic.Anthropic, url: str
) -> None:
    engine.script = fail(errors.StepError("the step failed"), after="hel")
    *_, last = stream(url)
    assert last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "the step failed"}
    with (
        pytest.raises(anthropic.APIStatusError, match="the step failed"),
        client.messages.stream(**BODY) as events,
    ):
        events.get_final_message()


def test_an_error_before_the_stream_is_plain(
    engine: FakeEngine, client: anthropic.Anthropic
) -> None:
    engine.script = fail(errors.StepError("no"))
    with pytest.raises(anthropic.InternalServerError), client.messages.stream(**BODY):
        pass


def test_a_client_that_leaves_is_noticed(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="hel")
    with httpx2.stream("POST", f"{url}/v1/messages", json=BODY | {"stream": True}) as response:
        next(response.iter_bytes())
    assert engine.aborted.get().startswith("msg_")


def test_silence_is_broken_by_pings() -> None:
    engine = FakeEngine()
    engine.script = hang()
    body = BODY | {"stream": True}
    with (
        serve_fake(engine, ServerConfig(sse_keep_alive_s=0.01)) as url,
        httpx2.stream("POST", f"{url}/v1/messages", json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("event"))
        assert [next(lines) for _ in range(3)] == [
            "event: message_start",
            "event: ping",
            "event: ping",
        ]


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with serve_fake(FakeEngine(), ServerConfig(api_keys=("one",))) as url:
        yield url


@pytest.mark.parametrize("headers", [{"x-api-key": "one"}, {"authorization": "Bearer one"}])
@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/v1/messages/count_tokens"])
def test_a_key_by_either_header(locked: str, headers: dict[str, str], path: str) -> None:
    assert httpx2.post(locked + path, json=BODY, headers=headers).status_code == 200


def test_a_wrong_key(locked: str) -> None:
    wrong: list[dict[str, Any]] = [{"api_key": "two"}, {"auth_token": "two"}]
    for options in wrong:
        with (
            anthropic.Anthropic(base_url=locked, max_retries=0, **options) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            ask(client)
        assert caught.value.type == "authentication_error"
        assert caught.value.request_id
    with anthropic.Anthropic(base_url=locked, api_key="one", max_retries=0) as client:
        assert ask(client).stop_reason == "end_turn"
    # Elsewhere the shape is OpenAI's.
    assert httpx2.get(f"{locked}/v1/models").json()["error"]["code"] == "invalid_api_key"
