"""Anthropic's routes over a scripted engine, by the real client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import pytest

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types import errors
from mlx_parallm.types.events import FinishReason, GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, fail, hang, prompt_event, serve_fake, token_event, write
from tests.message_events import fold_message, input_tokens_of, read_events

HI: Any = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "alias", "max_tokens": 200, "messages": HI}
PROMPT_TOKENS = len("user: hi\n")
TOOLS: Any = [{"name": "f", "description": "F.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "e\\n"}}\n</tool_call>'
# CONTEXT: the fake model's, in bytes.
CONTEXT = 256


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine, ServerConfig(max_body_bytes=4096)) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    served[0].script, served[0].refusal = write("hello"), None
    while not served[0].submitted.empty():
        served[0].submitted.get()
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    return client.messages.create(**(BODY | more))


def test_the_client_lists_models(client: anthropic.Anthropic) -> None:
    models = list(client.models.list(limit=1))
    assert len(models) > 1
    assert client.models.retrieve(models[1].id) == models[1]


def stream(url: str, **more: Any) -> list[dict[str, Any]]:
    response = httpx2.post(f"{url}/v1/messages", json=BODY | {"stream": True} | more)
    assert response.headers["content-type"] == "text/event-stream", response.text
    return read_events(response.text)


def refused(url: str, path: str = "/v1/messages", **more: Any) -> str:
    """Return the message of a 400 in Anthropic's shape."""
    response = httpx2.post(url + path, json=BODY | more)
    assert response.status_code == 400, response.text
    error = response.json()
    assert set(error) == {"type", "error", "request_id"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["request_id"] == response.headers["request-id"]
    return error["error"]["message"]


def test_a_whole_answer(engine: FakeEngine, url: str) -> None:
    response = httpx2.post(f"{url}/v1/messages", json=BODY)
    answer = response.json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "alias",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": PROMPT_TOKENS - 3 - 4,
            "cache_creation_input_tokens": 4,
            "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 0},
            "cache_read_input_tokens": 3,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_the_prefix_may_be_left_out(engine: FakeEngine, url: str) -> None:
    assert httpx2.post(f"{url}/messages", json=BODY).status_code == 200
    assert httpx2.post(f"{url}/messages/count_tokens", json=BODY).status_code == 200


def test_the_clients_request_id_comes_back(engine: FakeEngine, url: str) -> None:
    response = httpx2.post(f"{url}/v1/messages", json=BODY, headers={"x-request-id": "mine"})
    assert response.headers["request-id"] == "mine"
    assert response.json()["id"].startswith("msg_mine-")
    assert "request-id" not in httpx2.get(f"{url}/v1/models").headers


def test_thinking_text_and_a_call(engine: FakeEngine, client: anthropic.Anthropic) -> None:
    engine.script = write(f"<think>hm</think>\n\nLet me see. {CALL}")
    message = ask(client, tools=TOOLS)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hm")  # type: ignore[union-attr]
    assert thinking.signature  # type: ignore[union-attr]
    assert text.text.strip() == "Let me see."  # type: ignore[union-attr]
    assert (call.name, call.input) == ("f", {"a": "e\n"})  # type: ignore[union-attr]
    assert call.id.startswith("toolu_")  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens > 0
    assert message._request_id


@pytest.mark.parametrize("max_tokens", [0, 5, 20, 60, 200])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_a_stream_says_what_the_whole_answer_says(
    engine: FakeEngine, client: anthropic.Anthropic, url: str, max_tokens: int, display: str
) -> None:
    engine.script = write(f"<think>ha hm</think>\n\nLet me see. {CALL}\n{CALL}")
    fields: Any = {
        "tools": TOOLS,
        "max_tokens": max_tokens,
        "thinking": {"type": "adaptive", "display": display},
    }
    whole: Any = ask(client, **fields).to_dict()
    raw: Any = fold_message(stream(url, **fields))
    with client.messages.stream(**(BODY | fields)) as events:
        folded: Any = events.get_final_message().to_dict()
    for message in (whole, raw, folded):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
    assert folded == whole
    for block in raw["content"]:
        if block["type"] == "tool_use":
            block["input"] = {"a": "e\n"} if max_tokens == 200 else block["input"]
    if max_tokens == 200:
        assert raw == whole
    assert whole["stop_reason"] == ("tool_use" if max_tokens == 200 else "max_tokens")


def test_the_order_of_events(engine: FakeEngine, url: str) -> None:
    engine.script = write(f"<think>hm</think>{CALL}")
    events = stream(url, tools=TOOLS)
    first = events[0]["message"]
    assert first["usage"]["cache_read_input_tokens"] == 3
    assert first["usage"]["output_tokens"] == 0
    message = fold_message(events)
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]
    assert json.loads(message["content"][1]["input"]) == {"a": "e\n"}
    pieces = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(pieces) > 3


async def test_the_asynchronous_client(engine: FakeEngine, url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
        message = await client.messages.create(**BODY)
        async with client.messages.stream(**BODY) as events:
            texts = [text async for text in events.text_stream]
            final = await events.get_final_message()
        counted = await client.messages.count_tokens(model="alias", messages=HI)
    assert "".join(texts) == final.content[0].text == message.content[0].text == "hello"  # type: ignore[union-attr]
    assert counted.input_tokens == PROMPT_TOKENS


def test_parameters_reach_the_engine(engine: FakeEngine, client: anthropic.Anthropic) -> None:
    more = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 11, "priority": 3}
    ask(
        client,
        stop_sequences=["x", "y"],
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        extra_body=more | {"unknown": 1, "betas": ["a"]},
        extra_headers={"anthropic-beta": "b"},
    )
    request = engine.submitted.get_nowait()
    params = request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert (params.seed, params.stop, params.max_tokens) == (11, ("x", "y"), 200)
    assert (request.priority, params.n) == (3, 1)


def test_max_tokens_are_cut_to_the_context(engine: FakeEngine, client: anthropic.Anthropic) -> None:
    engine.script = write("a" * CONTEXT)
    message = ask(client, max_tokens=8_000)
    assert engine.submitted.get_nowait().params.max_tokens == CONTEXT - PROMPT_TOKENS
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == CONTEXT - PROMPT_TOKENS


@pytest.mark.parametrize("length", [CONTEXT, 3 * CONTEXT])
def test_a_prompt_without_room_is_refused(engine: FakeEngine, url: str, length: int) -> None:
    said = refused(url, messages=[{"role": "user", "content": "a" * length}])
    over = length + len("user: \n")
    assert said == f"prompt is too long: {over} tokens > {CONTEXT - 1} maximum"


def stopping(reason: FinishReason, stop: str | None = None) -> Any:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield prompt_event(request)
        event = token_event(request, 0, [ord("a")], is_last=True)
        yield replace(event, finish_reason=reason, stop_reason=stop)

    return script


@pytest.mark.parametrize(
    ("reason", "stop", "ending"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, "END", ("stop_sequence", "END")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.ABORT, None, ("pause_turn", None)),
    ],
)
def test_why_an_answer_ended(
    engine: FakeEngine,
    client: anthropic.Anthropic,
    reason: FinishReason,
    stop: str | None,
    ending: tuple[str, str | None],
) -> None:
    engine.script = stopping(reason, stop)
    message = ask(client)
    assert (message.stop_reason, message.stop_sequence) == ending
    with client.messages.stream(**BODY) as events:
        final = events.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ending


def test_count_tokens_counts_the_prompt(engine: FakeEngine, client: anthropic.Anthropic) -> None:
    messages: Any = [*HI, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "go"}]
    counted = client.messages.count_tokens(
        model="alias", messages=messages, system="be brief", tools=TOOLS
    )
    usage = ask(client, messages=messages, system="be brief", tools=TOOLS).usage
    assert counted.input_tokens == input_tokens_of(usage)
    engine.submitted.get_nowait()
    assert engine.submitted.empty()


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


def test_server_tools_are_left_out(engine: FakeEngine, client: anthropic.Anthropic) -> None:
    web: Any = {"type": "web_search_20250305", "name": "web_search"}
    ask(client, tools=[web])
    custom: Any = TOOLS[0] | {"type": "custom", "cache_control": {"type": "ephemeral"}}
    engine.script = write(CALL)
    assert ask(client, tools=[web, custom]).stop_reason == "tool_use"


@pytest.mark.parametrize(("kept", "calls"), [(False, 2), (True, 1)])
def test_parallel_calls_can_be_left_out(
    engine: FakeEngine, client: anthropic.Anthropic, kept: bool, calls: int
) -> None:
    engine.script = write(f"{CALL}\n{CALL}")
    choice: Any = {"type": "auto", "disable_parallel_tool_use": kept}
    assert len(ask(client, tools=TOOLS, tool_choice=choice).content) == calls


def test_without_the_choice_of_tools_their_markers_are_text(
    engine: FakeEngine, client: anthropic.Anthropic
) -> None:
    engine.script = write(CALL)
    message = ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert message.content[0].text == CALL  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"


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
