"""Anthropic's routes over a scripted engine, by the real client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import pytest

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.events import FinishReason, GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, prompt_event, serve_fake, token_event, write
from tests.message_events import fold_message, input_tokens_of
from tests.message_requests import BODY, HI, TOOLS, ask, stream

PROMPT_TOKENS = len("user: hi\n")
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
    served[0].reset()
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


def test_the_client_lists_models(client: anthropic.Anthropic) -> None:
    models = list(client.models.list(limit=1))
    assert len(models) > 1
    assert client.models.retrieve(models[1].id) == models[1]


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
