"""/v1/responses of the embedded model through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from pydantic import BaseModel

from tests.response_events import check_events, check_response
from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture
def client(live_server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{live_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, input_: Any, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=input_, temperature=0, **fields)


def test_an_answer_with_reasoning(client: openai.OpenAI) -> None:
    answer = ask(client, "What is 47 + 38?", reasoning={"effort": "medium", "summary": "auto"})
    check_response(answer.to_dict())
    reasoning, message = answer.output
    assert (answer.status, message.content[0].text) == ("completed", answer.output_text)
    assert "85" in answer.output_text
    assert reasoning.summary[0].text == reasoning.content[0].text
    usage = answer.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    short = ask(client, "What is 47 + 38?", reasoning={"effort": "none"})
    assert [item.type for item in short.output] == ["message"]


def test_a_stream_is_the_answer(client: openai.OpenAI) -> None:
    whole = ask(client, "What is 347 + 238?")
    events = list(ask(client, "What is 347 + 238?", stream=True))
    last = check_events(event.to_dict(mode="json") for event in events)
    assert last["output"][1]["content"] == [part.to_dict() for part in whole.output[1].content]
    with client.responses.stream(model=MODEL, input="What is 347 + 238?", temperature=0) as stream:
        assert stream.get_final_response().output_text == whole.output_text


class Person(BaseModel):
    name: str
    age: int


def test_an_answer_in_a_models_form(client: openai.OpenAI) -> None:
    text = "Extract the name and age as JSON: Anna is 31 years old."
    answer = client.responses.parse(
        model=MODEL, input=text, text_format=Person, temperature=1, extra_body={"seed": 1}
    )
    assert isinstance(answer.output_parsed, Person)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    with client.responses.stream(model=MODEL, input=text, text_format=Person) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)
    bad: Any = {"type": "json_schema", "name": "x", "strict": True, "schema": {"not": {}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, text, text={"format": bad})
    assert refusal.value.param == "text.format"


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_a_tool_is_called_and_its_result_told(
    client: openai.OpenAI, stored: bool, streams: bool
) -> None:
    def turn(items: Any, **fields: Any) -> Any:
        if not streams:
            return ask(client, items, tools=[WEATHER], store=stored, **fields)
        with client.responses.stream(
            model=MODEL, input=items, tools=[WEATHER], store=stored, temperature=0, **fields
        ) as stream:
            return stream.get_final_response()

    answer = turn([QUESTION])
    call = answer.output[-1]
    assert (call.type, call.name, call.arguments) == (
        "function_call", "get_weather", '{"city": "Paris"}',
    )  # fmt: skip
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 21, "sky": "sunny"}',
    }
    if stored:
        answer_after = turn([result], previous_response_id=answer.id)
    else:
        answer_after = turn([QUESTION, *[item.to_dict() for item in answer.output], result])
    assert "21" in answer_after.output_text
    assert "sunny" in answer_after.output_text


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "custom", "name": "note"},
        {"type": "function", "name": "get_weather", "namespace": "far"},
    ],
)
def test_a_forced_call_is_made(client: openai.OpenAI, choice: Any) -> None:
    tools = [
        WEATHER,
        {"type": "custom", "name": "note"},
        {"type": "namespace", "name": "far", "description": "", "tools": [WEATHER]},
        {"type": "web_search"},
    ]
    fields = {"tools": tools, "tool_choice": choice, "max_output_tokens": 300}
    events = ask(client, "Hello", stream=True, parallel_tool_calls=False, **fields)
    last = check_events(event.to_dict(mode="json") for event in events)
    called = last["output"][-1]
    assert called["type"] in ("function_call", "custom_tool_call")
    if choice != "required":
        assert called["type"].startswith(choice["type"])
        assert (called["name"], called.get("namespace")) == (
            choice["name"], choice.get("namespace"),
        )  # fmt: skip


def test_a_conversation_is_remembered(client: openai.OpenAI) -> None:
    first = ask(client, "My name is Bob.")
    second = ask(client, "What is my name?", previous_response_id=first.id)
    assert "Bob" in second.output_text
    with pytest.raises(openai.NotFoundError) as refusal:
        ask(client, "What is my name?", previous_response_id="resp_0")
    assert refusal.value.code == "previous_response_not_found"


def test_log_probabilities_spell_the_text(client: openai.OpenAI) -> None:
    answer = ask(
        client, "What is 7 + 35?", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    (part,) = answer.output[-1].content
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == part.text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    queued = ask(client, "Count from 1 to 20.", background=True, stream=True)
    events = [event.to_dict(mode="json") for event in queued]
    last = check_events(events)
    name = last["id"]
    assert client.responses.retrieve(name).output_text.endswith("20")
    rest = client.responses.retrieve(name, stream=True, starting_after=5)
    assert [event.sequence_number for event in rest] == list(range(6, len(events)))
    assert client.responses.input_items.list(name).data[0].type == "message"
    client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)


def test_a_response_in_the_background_is_cancelled(
    client: openai.OpenAI, live_server: ServerProcess
) -> None:
    extra = {"ignore_eos": True}
    running = ask(client, "Count from 1 to 20.", background=True, extra_body=extra)
    assert running.status == "queued"
    cancelled = client.responses.cancel(running.id)
    check_response(cancelled.to_dict())
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(running.id).status == "cancelled"


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    body: Any = {"input": "hello", "instructions": "Be brief.", "tools": [WEATHER]}
    count = client.responses.input_tokens.count(model=MODEL, **body)
    answer = ask(client, body.pop("input"), max_output_tokens=1, **body)
    assert count.input_tokens == answer.usage.input_tokens
    assert count.input_tokens > client.responses.input_tokens.count(input="hello").input_tokens


def test_what_is_too_long_is_refused_or_truncated(client: openai.OpenAI) -> None:
    talk: Any = [{"role": "user", "content": "word " * 700} for _ in range(4)]
    talk.append({"role": "user", "content": "What is 2 + 3?"})
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, talk)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "input")
    answer = ask(client, talk, truncation="auto", max_output_tokens=20)
    assert answer.usage.input_tokens < 2048
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, "hi", max_output_tokens=10_000)
    assert refusal.value.param == "max_output_tokens"


def test_a_batch_may_hold_responses(client: openai.OpenAI, live_server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.batches.create(
            input_file_id="file-0",
            endpoint="/v1/audio/speech",  # type: ignore[arg-type]
            completion_window="24h",
        )
    assert "/v1/responses" in str(refusal.value)
    described = httpx2.get(f"{live_server.url}/openapi.json").json()
    assert "/v1/responses" in described["paths"]
