"""Anthropic's client on ``/v1/messages``: sync, async, streaming, tools, thinking, errors."""

from __future__ import annotations

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from exercises import SUM, WEATHER, WEATHER_FUNCTION, WEATHER_RESULT, tells_the_result, user

ASK = [user(SUM)]
# The client has no argument for it.
GREEDY = {"temperature": 0}
TOOL = {
    "name": WEATHER_FUNCTION["name"],
    "description": WEATHER_FUNCTION["description"],
    "input_schema": WEATHER_FUNCTION["parameters"],
}


@pytest.fixture
def client(server):
    with Anthropic(base_url=server.url, api_key=server.api_key) as connected:
        yield connected


def _text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def test_create(client, server):
    answer = client.messages.create(
        model=server.model, messages=ASK, max_tokens=300, extra_body=GREEDY
    )
    assert "42" in _text(answer)
    assert answer.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=server.model, messages=ASK)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (
        (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def test_stream(client, server):
    with client.messages.stream(
        model=server.model, messages=ASK, max_tokens=300, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == _text(final)
    assert "42" in text


async def test_async(server):
    async with AsyncAnthropic(base_url=server.url, api_key=server.api_key) as client:
        answer = await client.messages.create(
            model=server.model, messages=ASK, max_tokens=300, extra_body=GREEDY
        )
    assert "42" in _text(answer)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_tool_round_trip(client, server, streams):
    first = _ask(client, server, streams, messages=[user(WEATHER)], tools=[TOOL])
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.input == {"city": "Paris"}
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": WEATHER_RESULT,
    }
    messages = [
        user(WEATHER),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    answer = _ask(client, server, streams, messages=messages, tools=[TOOL])
    assert tells_the_result(_text(answer))


def _ask(client, server, streams, **options):
    options |= {"model": server.model, "max_tokens": 300, "extra_body": GREEDY}
    if not streams:
        return client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        return stream.get_final_message()


def test_thinking(client, server):
    with client.messages.stream(
        model=server.model,
        messages=ASK,
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body=GREEDY,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "thinking" in kinds
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert "42" in _text(final)


def test_errors(client, server):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such-model", messages=ASK, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(
            model=server.model, messages=ASK, max_tokens=5, extra_body={"temperature": 9}
        )
    stranger = Anthropic(base_url=server.url, api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=server.model, messages=ASK, max_tokens=5)
