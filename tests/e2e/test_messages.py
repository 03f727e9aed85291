"""Anthropic's routes of the embedded model, by the real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx2
import jsonschema
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock
from pydantic import BaseModel

from tests.message_events import fold_message, input_tokens_of, read_events
from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": CITY,
}
ROLL: Any = {
    "name": "roll_dice",
    "description": "Roll dice.",
    "input_schema": {
        "type": "object",
        "properties": {
            "sides": {"type": "integer", "minimum": 2, "maximum": 20},
            "kind": {"enum": ["fair", "loaded"]},
        },
        "required": ["sides", "kind"],
        "additionalProperties": False,
    },
    "strict": True,
}
PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM: Any = [{"role": "user", "content": "What is 17 + 25?"}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
RESULT = '{"temperature": 21, "sky": "clear"}'


@pytest.fixture
def client(live_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live_server.url, api_key="k", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, messages: Any, **more: Any) -> anthropic.types.Message:
    """Return a greedy answer, which is the same whole and streamed."""
    fields: Any = {"model": MODEL, "max_tokens": 200, "messages": messages} | more
    fields["extra_body"] = {"temperature": 0} | more.get("extra_body", {})
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**fields)
    assert without_ids(streamed) == without_ids(whole)
    return whole


def without_ids(message: Any) -> Any:
    """Return a message without its ids."""
    blocks = [block.to_dict() for block in message.content]
    for block in blocks:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens


def test_a_call_its_result_and_the_answer(client: anthropic.Anthropic) -> None:
    message = ask(client, PARIS, tools=[WEATHER, ROLL])
    (call,) = message.content
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input, message.stop_reason) == (
        "get_weather",
        {"city": "Paris"},
        "tool_use",
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    history = [*PARIS, message.to_param(), {"role": "user", "content": [result]}]
    answer = ask(client, history, tools=[WEATHER, ROLL])
    assert answer.stop_reason == "end_turn"
    (text,) = answer.content
    assert isinstance(text, TextBlock)
    assert "21" in text.text
    counted = client.messages.count_tokens(model=MODEL, messages=history, tools=[WEATHER, ROLL])
    usage = answer.usage
    assert counted.input_tokens == input_tokens_of(usage)
    # The answer before was complete, so its prompt is cached.
    assert usage.cache_read_input_tokens
    # Again, all blocks are there but the last, which the first new token is computed from.
    again = ask(client, history, tools=[WEATHER, ROLL]).usage
    assert input_tokens_of(again) == counted.input_tokens
    assert again.cache_creation_input_tokens == 0
    assert again.cache_read_input_tokens == (
        usage.cache_read_input_tokens + (usage.cache_creation_input_tokens or 0)
    )


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "roll_dice"}], ids=["any", "tool"]
)
def test_a_forced_call_is_valid(client: anthropic.Anthropic, choice: Any) -> None:
    for seed in range(2):
        fields: Any = {"tools": [ROLL], "tool_choice": choice}
        message = ask(client, SUM, **fields, extra_body={"temperature": 1, "seed": seed})
        calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
        assert calls
        assert message.stop_reason == "tool_use"
        for call in calls:
            jsonschema.validate(call.input, ROLL["input_schema"])


def test_a_tool_choice_of_none_answers_in_words(client: anthropic.Anthropic) -> None:
    message = ask(client, PARIS, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


def test_thinking_has_a_budget(client: anthropic.Anthropic) -> None:
    free = ask(client, SUM, thinking={"type": "adaptive"})
    assert [block.type for block in free.content] == ["thinking", "text"]
    assert isinstance(free.content[0], ThinkingBlock)
    assert free.content[0].signature
    short = ask(client, SUM, thinking={"type": "enabled", "budget_tokens": 3})
    details = (free.usage.output_tokens_details, short.usage.output_tokens_details)
    assert details[0] is not None
    assert details[1] is not None
    assert details[1].thinking_tokens < details[0].thinking_tokens
    none = ask(client, SUM, thinking={"type": "disabled"})
    assert [block.type for block in none.content] == ["text"]
    # The server accepts its own thinking blocks unchanged.
    history = [*SUM, free.to_param(), {"role": "user", "content": "What is 2 + 3?"}]
    assert ask(client, history).stop_reason == "end_turn"


class Dice(BaseModel):
    """The answer's form; the client sends no bounds of numbers and texts."""

    kind: Literal["fair", "loaded"]
    is_lucky: bool


def test_a_structured_answer_is_parsed(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model=MODEL,
        max_tokens=200,
        messages=SUM,
        output_format=Dice,
        extra_body={"temperature": 1, "seed": 1},
    )
    assert isinstance(parsed.parsed_output, Dice)


def test_a_text_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*SUM, {"role": "assistant", "content": "17 + 25 ="}]
    message = ask(client, begun, thinking={"type": "disabled"})
    assert message.content[0].text.lstrip().startswith("42")  # type: ignore[union-attr]


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    message = ask(client, SUM, stop_sequences=["zzz", "2"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "2")


def test_arguments_that_are_cut_are_what_was_complete(client: anthropic.Anthropic) -> None:
    whole = ask(client, PARIS, tools=[WEATHER])
    tokens = whole.usage.output_tokens
    for max_tokens in (1, tokens // 2, tokens - 4, tokens - 1):
        message = ask(client, PARIS, tools=[WEATHER], max_tokens=max_tokens)
        assert message.stop_reason == "max_tokens"
        for block in message.content:
            if isinstance(block, ToolUseBlock):
                assert block.input in ({}, {"city": "Paris"})


def test_more_tokens_than_the_context_has_may_be_asked_for(client: anthropic.Anthropic) -> None:
    assert ask(client, SUM, max_tokens=8_000).stop_reason == "end_turn"


@pytest.mark.parametrize(("messages", "kind"), [(SUM, "thinking"), (PARIS, "tool_use")])
def test_the_events_of_a_stream(live_server: ServerProcess, messages: Any, kind: str) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 200,
        "stream": True,
        "temperature": 0,
        "thinking": {"type": "adaptive"},
        "messages": messages,
        "tools": [WEATHER] if kind == "tool_use" else [],
    }
    response = httpx2.post(f"{live_server.url}/v1/messages", json=body)
    message = fold_message(read_events(response.text))
    assert message["content"][0]["type"] == kind
    if kind == "tool_use":
        assert json.loads(message["content"][0]["input"]) == {"city": "Paris"}


@pytest.mark.parametrize(
    ("more", "cls", "word"),
    [
        ({"model": "no"}, anthropic.NotFoundError, "does not exist"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            anthropic.BadRequestError,
            "does not take images",
        ),
        (
            {"messages": [{"role": "user", "content": "word " * 5000}]},
            anthropic.BadRequestError,
            "prompt is too long: ",
        ),
    ],
)
def test_errors_become_the_clients_exceptions(
    client: anthropic.Anthropic,
    more: dict[str, Any],
    cls: type[anthropic.APIStatusError],
    word: str,
) -> None:
    body: Any = {"model": MODEL, "max_tokens": 1, "messages": SUM} | more
    with pytest.raises(cls, match=word):
        client.messages.create(**body)
