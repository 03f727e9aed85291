"""Structured output through the real client, and what a hostile one gets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
HI: Any = [{"role": "user", "content": "Name a city."}]


class Place(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["city", "river"]
    size: int = Field(ge=0, le=999)


# Reasoning is off, because it might take all tokens.
PLACE: dict[str, Any] = {
    "model": MODEL,
    "messages": HI,
    "response_format": Place,
    "reasoning_effort": "none",
    "max_tokens": 400,
}


@pytest.fixture
def client(live_server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{live_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


def test_the_client_parses_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**PLACE, seed=1, n=3, logprobs=True)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Place)
        assert choice.logprobs is not None


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    body: dict[str, Any] = PLACE | {"seed": 2}
    whole = client.chat.completions.parse(**body)
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert streamed.choices[0].message.content == whole.choices[0].message.content


def test_reasoning_comes_before_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 12 + 7?"}],
        temperature=0,
        max_tokens=400,
        extra_body={
            "structured_outputs": {"regex": "The answer is [0-9]{1,3}"},
            "chat_template_kwargs": {"enable_thinking": True},
        },
    )
    message: Any = answer.choices[0].message
    assert answer.choices[0].finish_reason == "stop"
    assert message.reasoning
    assert re.fullmatch("The answer is [0-9]{1,3}", message.content)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "1|2"),
        ({"guided_choice": ["yes", "no"], "ignore_eos": True}, "yes|no"),
        ({"guided_regex": "[ab]{3}", "min_tokens": 30}, "[ab]{3}"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"regex": "a|b"}, "a|b"),
        ({"ebnf": 'root ::= "a" | "b"'}, "a|b"),
        ({"json_schema": '{"const": 5}'}, "5"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"response_format": {"type": "json_object"}, "stop": ["}", '"']}, r"\{\s*"),
    ],
)
def test_completions_take_every_field(
    client: openai.OpenAI, fields: dict[str, Any], pattern: str
) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=200, seed=4, extra_body=fields
    )
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].text, re.DOTALL)


def test_an_expression_ends_a_sample_and_its_stream(client: openai.OpenAI) -> None:
    ends = "[0-9]{2}"
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": HI,
        "max_tokens": 60,
        "seed": 1,
        "extra_body": {
            "regex": "abc[0-9]{3}[a-z]{20}",
            "stop_regex": ends,
            "reasoning_effort": "none",
        },
    }
    (choice,) = client.chat.completions.create(**body).choices
    assert (choice.message.content, choice.finish_reason) == ("abc", "stop")
    assert choice.model_extra is not None
    assert (choice.model_extra["stop_reason"], choice.model_extra["matched_stop"]) == (ends, ends)
    chunks = list(client.chat.completions.create(**body, stream=True))
    deltas = [each.delta.content or "" for chunk in chunks for each in chunk.choices]
    assert "".join(deltas) == "abc"
    last: Any = chunks[-1].choices[0]
    assert last.matched_stop == ends


def test_an_expression_that_cannot_end_a_text_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=MODEL, prompt="a", extra_body={"stop_regex": ["x", "a*"]})
    assert refusal.value.param == "stop_regex"


@pytest.mark.parametrize("text", ["<think>", "</think>x", "a<|im_end|>b", "<tool_call>{}"])
def test_a_text_that_spells_a_special_token_is_a_text(client: openai.OpenAI, text: str) -> None:
    schema = {"const": text}
    tool: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    tool["function"]["parameters"]["required"] = ["a"]
    structures: list[dict[str, Any]] = [
        {"json": schema},
        {"regex": re.escape(text)},
        {"choice": [text]},
        {"grammar": f'start: "{text}"'},
    ]
    for structure in structures:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HI,
            max_tokens=60,
            extra_body={"structured_outputs": structure, "reasoning_effort": "none"},
        )
        content = answer.choices[0].message.content or ""
        assert (json.loads(content) if "json" in structure else content) == text
        assert answer.choices[0].finish_reason == "stop"
    forced: Any = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=200, tools=[tool], tool_choice="required"
    )
    assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments) == {"a": text}


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"description": "x" * 1_000_000}},
        {"regex": "a" * 1_000_000},
        {"choice": ["a" * 100] * 10_000},
        {"json": nested(10_000)},
        {"json": {"$ref": "#/$defs/none"}},
        {"json": {"$ref": "http://127.0.0.1:1/schema"}},
        {"grammar": "root ::= " + "(" * 20_000},
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(15_000)}}},
        {"structural_tag": {"format": {"type": "or", "elements": []}}},
    ],
)
def test_too_much_is_refused_and_the_engine_goes_on(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(
            model=MODEL, prompt="a", max_tokens=5, extra_body={"structured_outputs": fields}
        )
    assert refusal.value.param == "structured_outputs"
    assert len(refusal.value.message) < 2000
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].text


def test_a_body_that_is_nested_too_deeply_is_refused(live_server: ServerProcess) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2})
    body = body[:-1] + f', "guided_json": {nested(10_000)}}}'
    response = httpx2.post(
        f"{live_server.url}/v1/completions",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a|b)*a(a|b){300}"},
        {"regex": "((a{1,50}){1,50}){1,50}"},
        {"json": {"type": "object", "properties": {"c": {"$ref": "#"}}}},
        {"json": {"enum": [f"value {i}" for i in range(5_000)]}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
    ],
)
def test_what_could_be_much_work_is_answered(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="a", max_tokens=20, seed=1, extra_body={"structured_outputs": fields}
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_strict_is_refused_where_it_cannot_be_kept(client: openai.OpenAI) -> None:
    schema: dict[str, Any] = {
        "name": "x",
        "schema": {"type": "string", "not": {"format": "date"}, "maxLength": 3},
    }
    body: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 20, "seed": 1}
    strict: Any = {"type": "json_schema", "json_schema": schema | {"strict": True}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**body, response_format=strict)
    assert refusal.value.param == "response_format"
    loose: Any = {"type": "json_schema", "json_schema": schema}
    answer = client.chat.completions.create(**body, response_format=loose)
    assert isinstance(json.loads(answer.choices[0].message.content or ""), str)
