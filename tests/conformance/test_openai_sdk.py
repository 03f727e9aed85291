"""OpenAI's client on chat, completions, models, files and batches; raw answers and errors."""

from __future__ import annotations

import asyncio
import json

import openai
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
from openai import AsyncOpenAI, OpenAI

ASK = [user(SUM)]


@pytest.fixture
def client(server):
    with OpenAI(base_url=server.base_url, api_key=server.api_key) as connected:
        yield connected


def test_chat(client, server):
    answer = client.chat.completions.create(model=server.model, messages=ASK, temperature=0)
    assert "42" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(client, server):
    whole = client.chat.completions.create(model=server.model, messages=ASK, temperature=0)
    stream = client.chat.completions.create(
        model=server.model,
        messages=ASK,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stream_helper(client, server):
    with client.chat.completions.stream(model=server.model, messages=ASK, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "42" in final.choices[0].message.content


async def test_async(server):
    async with AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=server.model, messages=ASK, temperature=0, seed=i
                )
                for i in range(8)
            )
        )
        stream = await client.chat.completions.create(
            model=server.model, messages=ASK, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert {answer.choices[0].message.content for answer in answers} == {text}


def test_parse(client, server):
    answer = client.chat.completions.parse(
        model=server.model,
        messages=[user(EXTRACT)],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    )
    assert answer.choices[0].message.parsed == ANNA


def test_parse_stream(client, server):
    with client.chat.completions.stream(
        model=server.model,
        messages=[user(EXTRACT)],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == ANNA


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_tool_round_trip(client, server, streams):
    message = message_of(client, server, streams, messages=[user(WEATHER)], tools=[WEATHER_TOOL])
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
    messages = [user(WEATHER), message, result]
    answer = message_of(client, server, streams, messages=messages, tools=[WEATHER_TOOL])
    assert tells_the_result(answer.content)


def message_of(client, server, streams, **options):
    options |= {"model": server.model, "temperature": 0}
    if not streams:
        return client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        return stream.get_final_completion().choices[0].message


def test_a_call_streams_its_arguments(client, server):
    with client.chat.completions.stream(
        model=server.model, messages=[user(WEATHER)], tools=[WEATHER_TOOL], temperature=0
    ) as stream:
        events = list(stream)
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert len(deltas) > 1
    assert "".join(delta.arguments_delta for delta in deltas) == done.arguments


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_forced_tool_call(client, server, choice):
    answer = client.chat.completions.create(
        model=server.model,
        messages=[user("Say hello.")],
        tools=[WEATHER_TOOL],
        tool_choice=choice,
        temperature=0,
        max_tokens=200,
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_logprobs(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=ASK, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)


def test_several_choices(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=ASK, n=3, seed=1, temperature=1.0, max_tokens=20
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_completions(client, server):
    whole = client.completions.create(
        model=server.model, prompt=["one two", "three"], max_tokens=5, temperature=0, logprobs=2
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    stream = client.completions.create(
        model=server.model, prompt="one two", max_tokens=5, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_models(client, server):
    assert server.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.model).object == "model"


def test_raw_response(client, server):
    raw = client.chat.completions.with_raw_response.create(
        model=server.model, messages=ASK, max_tokens=4
    )
    assert raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with client.chat.completions.with_streaming_response.create(
        model=server.model, messages=ASK, max_tokens=4
    ) as streamed:
        assert json.loads("".join(streamed.iter_text()))["object"] == "chat.completion"


def test_errors(client, server):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=server.model, messages=ASK, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=server.model, prompt=[1] * 100_000)
    assert "maximum context length is" in long.value.message
    stranger = OpenAI(base_url=server.base_url, api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.list()


def test_a_timeout_ends_the_request(server):
    with OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.05).chat.completions.create(
                model=server.model,
                messages=ASK,
                max_tokens=4000,
                extra_body={"ignore_eos": True},
            )
        assert client.chat.completions.create(model=server.model, messages=ASK, max_tokens=2)


async def test_cancellation(server):
    async with AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        stream = await client.chat.completions.create(
            model=server.model,
            messages=ASK,
            stream=True,
            max_tokens=4000,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()
        answer = await client.chat.completions.create(
            model=server.model, messages=ASK, temperature=0
        )
    assert "42" in answer.choices[0].message.content


def test_files_and_batches(client, server):
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": server.model, "messages": ASK, "temperature": 0},
    }
    data = ("batch.jsonl", (json.dumps(line) + "\n").encode())
    file = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    answer = json.loads(client.files.content(batch.output_file_id).text)
    assert answer["custom_id"] == "one"
    assert "42" in answer["response"]["body"]["choices"][0]["message"]["content"]
