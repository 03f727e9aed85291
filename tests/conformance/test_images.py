"""Images through each client's own forms: streams, tools, JSON schemas, log-probabilities."""

from __future__ import annotations

import json
import math

import litellm
import pytest
from anthropic import Anthropic
from images import image, image_url
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI

COLOUR = "What colour is it?"
WHERE = "Where is the red circle?"
IMAGE_TOKENS = 64
COLOURS = ["red", "blue"]
REPORT = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}},
    "required": ["colour"],
    "additionalProperties": False,
}
# GUIDED: a small model would fill the answer with white space.
GUIDED = REPORT | {"x-guidance": {"whitespace_flexible": False}}
REPORT_TOOL = {"type": "function", "function": {"name": "report", "parameters": REPORT}}
# LOOK: a call of a tool whose result is an image.
LOOK = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])


@pytest.fixture
def client(seeing):
    with OpenAI(base_url=seeing.base_url, api_key=seeing.api_key) as connected:
        yield connected


@pytest.fixture
def anthropic(seeing):
    with Anthropic(base_url=seeing.url, api_key=seeing.api_key) as connected:
        yield connected


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chain(seeing, request):
    return ChatOpenAI(
        model=seeing.model,
        base_url=seeing.base_url,
        api_key=seeing.api_key,
        temperature=0,
        use_responses_api=request.param,
    )


def part(colour):
    return {"type": "image_url", "image_url": {"url": image_url(colour)}}


def asked(text, *colours):
    return [{"role": "user", "content": [*map(part, colours), {"type": "text", "text": text}]}]


def looked():
    """Return a conversation in which a tool's result is an image."""
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [LOOK]},
        {"role": "tool", "tool_call_id": "call_1", "content": asked(COLOUR, "red")[0]["content"]},
    ]


def chat(client, seeing, messages, **options):
    return client.chat.completions.create(
        model=seeing.model, messages=messages, temperature=0, **options
    )


@pytest.mark.parametrize("colour", COLOURS)
def test_chat(client, seeing, colour):
    answer = chat(client, seeing, asked(COLOUR, colour))
    assert answer.choices[0].message.content == colour
    assert answer.usage.prompt_tokens_details.image_tokens == IMAGE_TOKENS
    chunks = chat(client, seeing, asked(COLOUR, colour), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == colour


def test_two_images_and_a_later_turn(client, seeing):
    messages = asked("Do they have the same colour?", "red", "blue")
    answer = chat(client, seeing, messages)
    assert answer.choices[0].message.content == "no"
    assert answer.usage.prompt_tokens_details.image_tokens == 2 * IMAGE_TOKENS
    messages = asked(COLOUR, "red")
    messages += [{"role": "assistant", "content": "red"}, {"role": "user", "content": WHERE}]
    assert chat(client, seeing, messages).choices[0].message.content == "top left"


@pytest.mark.parametrize("colour", COLOURS)
def test_json_schema(client, seeing, colour):
    schema = {"name": "report", "schema": GUIDED, "strict": True}
    response_format = {"type": "json_schema", "json_schema": schema}
    answer = chat(client, seeing, asked(COLOUR, colour), response_format=response_format)
    # The model was not trained to write JSON: only the form is certain.
    assert json.loads(answer.choices[0].message.content)["colour"] in COLOURS
    choice = {"structured_outputs": {"choice": COLOURS}}
    answer = chat(client, seeing, asked(COLOUR, colour), extra_body=choice)
    assert answer.choices[0].message.content == colour


def test_log_probabilities(client, seeing):
    options = {"logprobs": True, "top_logprobs": 2, "extra_body": {"prompt_logprobs": 1}}
    answer = chat(client, seeing, asked(COLOUR, "red"), **options)
    first = answer.choices[0].logprobs.content[0]
    assert first.token == "red"
    assert math.exp(first.logprob) > 0.9
    assert len(first.top_logprobs) == 2
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


@STREAMS
def test_forced_call(client, seeing, streams):
    options = {"tools": [REPORT_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    if streams:
        with client.chat.completions.stream(
            model=seeing.model, messages=asked(COLOUR, "red"), temperature=0, **options
        ) as stream:
            answer = stream.get_final_completion()
    else:
        answer = chat(client, seeing, asked(COLOUR, "red"), **options)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["colour"] in COLOURS


def test_result_of_a_tool(client, seeing):
    assert chat(client, seeing, looked()).choices[0].message.content == "red"


@STREAMS
def test_responses(client, seeing, streams):
    content = [
        {"type": "input_image", "image_url": image_url("red")},
        {"type": "input_text", "text": COLOUR},
    ]
    options = {"model": seeing.model, "temperature": 0}
    ask = options | {"input": [{"role": "user", "content": content}]}
    if streams:
        with client.responses.stream(**ask) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(**ask)
    assert answer.output_text == "red"
    assert answer.usage.input_tokens_details.image_tokens == IMAGE_TOKENS
    followed = client.responses.create(input=WHERE, previous_response_id=answer.id, **options)
    assert followed.output_text == "top left"


def block(colour):
    source = {"type": "base64", "media_type": "image/png", "data": image(colour)}
    return {"type": "image", "source": source}


def blocks(text, *colours):
    return [*map(block, colours), {"type": "text", "text": text}]


def ask_anthropic(anthropic, seeing, streams, messages, **options):
    options |= {"model": seeing.model, "messages": messages, "max_tokens": 60}
    options["extra_body"] = {"temperature": 0}
    if not streams:
        return anthropic.messages.create(**options)
    with anthropic.messages.stream(**options) as stream:
        return stream.get_final_message()


@STREAMS
def test_messages(anthropic, seeing, streams):
    messages = [{"role": "user", "content": blocks(COLOUR, "blue")}]
    answer = ask_anthropic(anthropic, seeing, streams, messages)
    assert answer.content[0].text == "blue"
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": blocks(COLOUR, "red")}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert ask_anthropic(anthropic, seeing, streams, messages).content[0].text == "red"


@STREAMS
def test_forced_call_in_messages(anthropic, seeing, streams):
    messages = [{"role": "user", "content": blocks(COLOUR, "blue")}]
    options = {
        "tools": [{"name": "report", "input_schema": REPORT}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    answer = ask_anthropic(anthropic, seeing, streams, messages, **options)
    (call,) = [part for part in answer.content if part.type == "tool_use"]
    assert call.input["colour"] in COLOURS


@pytest.mark.parametrize(
    "shown",
    [
        part("red"),
        {"type": "image", "base64": image("red"), "mime_type": "image/png"},
        {"type": "image", "url": image_url("red")},
    ],
    ids=["image_url", "base64", "url"],
)
def test_langchain(chain, shown):
    ask = HumanMessage([shown, {"type": "text", "text": COLOUR}])
    assert chain.invoke([ask]).text == "red"
    assert "".join(chunk.text for chunk in chain.stream([ask])) == "red"


def test_langchain_tools(chain):
    with_tool = chain.bind_tools([REPORT_TOOL], tool_choice="any", parallel_tool_calls=False)
    (call,) = with_tool.invoke([HumanMessage(asked(COLOUR, "blue")[0]["content"])]).tool_calls
    assert call["args"]["colour"] in COLOURS
    call = {"name": "look", "args": {}, "id": "call_1", "type": "tool_call"}
    result = ToolMessage(asked(COLOUR, "red")[0]["content"], tool_call_id="call_1")
    messages = [HumanMessage("Look."), AIMessage("", tool_calls=[call]), result]
    assert chain.invoke(messages).text == "red"


@STREAMS
def test_litellm(seeing, streams):
    messages = asked(COLOUR, "blue")
    options = {"api_base": seeing.base_url, "api_key": seeing.api_key, "temperature": 0}
    answer = litellm.completion(
        model=f"openai/{seeing.model}", messages=messages, stream=streams, **options
    )
    if streams:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    assert answer.choices[0].message.content == "blue"
    schema = {"name": "report", "schema": GUIDED, "strict": True}
    typed = litellm.completion(
        model=f"openai/{seeing.model}",
        messages=messages,
        response_format={"type": "json_schema", "json_schema": schema},
        **options,
    )
    assert json.loads(typed.choices[0].message.content)["colour"] in COLOURS
