"""litellm with its ``openai/`` provider: tools, streams, typed output, its names for errors."""

from __future__ import annotations

import json

import litellm
import pytest
from exercises import (
    ANNA,
    EXTRACT,
    SUM,
    WEATHER,
    WEATHER_RESULT,
    WEATHER_TOOL,
    Person,
    tells_the_result,
    user,
)


def complete(server, messages, **options):
    return litellm.completion(
        model=f"openai/{server.model}",
        api_base=server.base_url,
        api_key=server.api_key,
        temperature=0,
        messages=messages,
        **options,
    )


def message_of(server, streams, messages, **options):
    """Return the whole message, streamed or not."""
    answer = complete(server, messages, stream=streams, **options)
    if streams:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_tool_round_trip(server, streams):
    messages = [user(WEATHER)]
    message = message_of(server, streams, messages, tools=[WEATHER_TOOL])
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
    messages += [message.model_dump(), result]
    answer = message_of(server, streams, messages, tools=[WEATHER_TOOL])
    assert tells_the_result(answer.content)


async def test_async(server):
    answer = await litellm.acompletion(
        model=f"openai/{server.model}",
        api_base=server.base_url,
        api_key=server.api_key,
        messages=[user(SUM)],
        temperature=0,
    )
    assert "42" in answer.choices[0].message.content


def test_structured_output(server):
    answer = complete(server, [user(EXTRACT)], response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content) == ANNA


def test_errors(server):
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(server, [user("word " * 60_000)])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/no-such-model",
            api_base=server.base_url,
            api_key=server.api_key,
            messages=[user(SUM)],
        )
