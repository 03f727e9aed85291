"""OpenAI's client on ``/v1/responses``: sync, streaming, ``.parse``, history by id, background."""

from __future__ import annotations

import json

import openai
import pytest
from exercises import (
    ANNA,
    EXTRACT,
    SUM,
    WEATHER,
    WEATHER_FUNCTION,
    WEATHER_RESULT,
    Person,
    tells_the_result,
)
from openai import OpenAI


@pytest.fixture
def client(server):
    with OpenAI(base_url=server.base_url, api_key=server.api_key) as connected:
        yield connected


TOOL = {"type": "function", "strict": True, **WEATHER_FUNCTION}


def test_create(client, server):
    answer = client.responses.create(model=server.model, input=SUM, temperature=0)
    assert answer.status == "completed"
    assert "42" in answer.output_text


def test_stream(client, server):
    with client.responses.stream(model=server.model, input=SUM, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == sorted(
        event.sequence_number for event in events
    )
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == final.output_text


def test_parse(client, server):
    answer = client.responses.parse(
        model=server.model,
        input=EXTRACT,
        text_format=Person,
        temperature=0,
        max_output_tokens=100,
    )
    assert answer.output_parsed == ANNA


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_tool_round_trip(client, server, streams):
    response = _ask(client, server, streams, input=WEATHER, tools=[TOOL])
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
    items = [{"role": "user", "content": WEATHER}, *response.output, output]
    answer = _ask(client, server, streams, input=items, tools=[TOOL])
    assert tells_the_result(answer.output_text)
    followed = _ask(
        client, server, streams, input=[output], tools=[TOOL], previous_response_id=response.id
    )
    assert followed.output_text == answer.output_text


def _ask(client, server, streams, **options):
    if not streams:
        return client.responses.create(model=server.model, temperature=0, **options)
    with client.responses.stream(model=server.model, temperature=0, **options) as stream:
        return stream.get_final_response()


def test_background_and_deletion(client, server):
    answer = client.responses.create(model=server.model, input=SUM, background=True)
    while answer.status in ("queued", "in_progress"):
        answer = client.responses.retrieve(answer.id)
    assert answer.status == "completed"
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_input_tokens(client, server):
    counted = client.responses.input_tokens.count(model=server.model, input=SUM)
    answer = client.responses.create(model=server.model, input=SUM, max_output_tokens=16)
    assert counted.input_tokens == answer.usage.input_tokens
