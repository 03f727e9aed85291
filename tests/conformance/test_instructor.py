"""instructor: typed extraction in each of its modes for OpenAI's API, streamed and not."""

from __future__ import annotations

import instructor
import pytest
from exercises import (
    ANNA,
    EXTRACT,
    WEATHER,
    WEATHER_RESULT,
    WEATHER_TOOL,
    Person,
    tells_the_result,
    user,
)
from openai import OpenAI
from pydantic import BaseModel, Field

TOO_SMALL = pytest.mark.skip(
    "the model is too small: it writes no code block when the prompt asks for one"
)
MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", pytest.param("MD_JSON", marks=TOO_SMALL))


class GetWeather(BaseModel):
    """Get the current weather in a city"""

    city: str = Field(description="The city.")


def connect(server, mode):
    raw = OpenAI(base_url=server.base_url, api_key=server.api_key)
    return instructor.from_openai(raw, mode=getattr(instructor.Mode, mode))


@pytest.mark.parametrize("mode", MODES)
def test_extraction(server, mode):
    person = connect(server, mode).chat.completions.create(
        model=server.model,
        messages=[user(EXTRACT)],
        response_model=Person,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    # It makes a class of its own of the one it is given.
    assert person.model_dump() == ANNA.model_dump()


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_partial_stream(server, mode):
    parts = list(
        connect(server, mode).chat.completions.create_partial(
            model=server.model,
            messages=[user(EXTRACT)],
            response_model=Person,
            temperature=0,
            max_tokens=200,
        )
    )
    assert parts[-1].model_dump() == ANNA.model_dump()
    assert len(parts) > 2


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_tool_round_trip(server, streams):
    client = connect(server, "TOOLS")
    options = {"model": server.model, "temperature": 0, "max_tokens": 200}
    wanted, completion = client.chat.completions.create_with_completion(
        messages=[user(WEATHER)], response_model=GetWeather, max_retries=0, **options
    )
    assert wanted.city == "Paris"
    message = completion.choices[0].message
    call = {
        **message.tool_calls[0].model_dump(),
        "function": {"name": "get_weather", "arguments": wanted.model_dump_json()},
    }
    answer = client.chat.completions.create(
        messages=[
            user(WEATHER),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": WEATHER_RESULT},
        ],
        tools=[WEATHER_TOOL],
        response_model=None,
        stream=streams,
        **options,
    )
    if streams:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    assert tells_the_result(text)
