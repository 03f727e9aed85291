"""Tools, reasoning and structured output of the embedded model, by the real client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": CITY,
    },
}
ROLL: Any = {
    "type": "function",
    "function": {
        "name": "roll_dice",
        "description": "Roll dice.",
        "parameters": {
            "type": "object",
            "properties": {
                "sides": {"type": "integer", "minimum": 2, "maximum": 20},
                "kind": {"enum": ["fair", "loaded"]},
            },
            "required": ["sides", "kind"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
HI: Any = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def client(live_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: Any, *tools: Any, **more: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 200, "tools": list(tools) or openai.omit} | more
    with client.chat.completions.stream(model=MODEL, messages=messages, **fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(model=MODEL, messages=messages, **fields).choices[0]
    if fields["temperature"] == 0:
        assert without_call_ids(streamed) == without_call_ids(whole)
    return whole


def without_call_ids(choice: Any) -> Any:
    """Return a choice without the ids of its calls and without empty content."""
    message = choice.message.to_dict()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (
        [(call["name"], call["arguments"]) for call in calls],
        message.get("content") or "",
        message.get("reasoning"),
        choice.finish_reason,
    )


def arguments(choice: Any) -> list[tuple[str, Any]]:
    calls = choice.message.tool_calls or ()
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_a_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    choice = ask(client, PARIS, WEATHER, ROLL)
    assert arguments(choice) == [("get_weather", {"city": "Paris"})]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    result = {
        "role": "tool",
        "tool_call_id": choice.message.tool_calls[0].id,
        "content": '{"temperature": 21, "sky": "clear"}',
    }
    answer = ask(client, [*PARIS, choice.message.to_dict(), result], WEATHER, ROLL)
    assert answer.finish_reason == "stop"
    assert "21" in answer.message.content
    assert not answer.message.tool_calls


def test_auto_does_not_call_what_is_not_needed(client: openai.OpenAI) -> None:
    choice = ask(client, HI, WEATHER)
    assert (choice.finish_reason, arguments(choice)) == ("stop", [])
    assert choice.message.content


def test_none_answers_without_tools(client: openai.OpenAI) -> None:
    choice = ask(client, PARIS, WEATHER, tool_choice="none")
    assert arguments(choice) == []
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_calls_whatever_was_said(client: openai.OpenAI, temperature: int) -> None:
    more = {"temperature": temperature, "seed": 4, "parallel_tool_calls": not temperature}
    choice = ask(client, HI, ROLL, tool_choice="required", **more)
    assert choice.finish_reason == "tool_calls"
    for name, named in arguments(choice):
        assert name == "roll_dice"
        assert 2 <= named["sides"] <= 20
        assert named["kind"] in ("fair", "loaded")


def test_a_named_tool_is_called_once(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "roll_dice"}}
    choice = ask(client, PARIS, WEATHER, ROLL, tool_choice=named)
    assert [name for name, _ in arguments(choice)] == ["roll_dice"]
    assert choice.finish_reason == "stop"


def test_of_allowed_tools_one_is_called(client: openai.OpenAI) -> None:
    allowed = {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "roll_dice"}}],
    }
    choice = ask(
        client,
        PARIS,
        WEATHER,
        ROLL,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
    )
    assert [name for name, _ in arguments(choice)] == ["roll_dice"]
    assert choice.finish_reason == "tool_calls"


def test_several_calls_or_one(client: openai.OpenAI) -> None:
    both: Any = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    choice = ask(client, both, WEATHER, tool_choice="required")
    assert len(arguments(choice)) >= 1
    choice = ask(client, both, WEATHER, tool_choice="required", parallel_tool_calls=False)
    assert len(arguments(choice)) == 1


def test_a_strict_tool_is_called_as_its_schema_says(client: openai.OpenAI) -> None:
    roll: Any = [{"role": "user", "content": "Roll a die with 6 sides."}]
    choice = ask(client, roll, ROLL, temperature=1, seed=1, n=1)
    for name, named in arguments(choice):
        assert name == "roll_dice"
        assert set(named) == {"sides", "kind"}
    assert arguments(ask(client, PARIS, WEATHER | {}, ROLL)) == [("get_weather", {"city": "Paris"})]


def test_a_custom_tool_is_called_with_a_text(client: openai.OpenAI) -> None:
    custom: Any = {"type": "custom", "custom": {"name": "note", "description": "Note a text."}}
    choice = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=[custom],
        tool_choice={"type": "custom", "custom": {"name": "note"}},
        temperature=0,
        max_tokens=400,
    ).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.name == "note"
    assert isinstance(call.custom.input, str)


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("regex", r"(add|sub) \d{1,3} \"[a-c]{1,4}\"\n"),
        (
            "lark",
            'start: OP SP INT SP "\\"" LETTER~1..4 "\\"" LF\nOP: "add" | "sub"\nSP: " "\n'
            "INT: /[0-9]{1,3}/\nLETTER: /[a-c]/\n%import common.LF",
        ),
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_text_of_a_custom_tool_matches_its_grammar(
    client: openai.OpenAI, api: str, syntax: str, definition: str
) -> None:
    grammar: Any = {"syntax": syntax, "definition": definition}
    tool: Any = {"type": "custom", "name": "calc", "format": {"type": "grammar", **grammar}}
    for seed in range(3):
        more: Any = {"temperature": 1.5, "extra_body": {"seed": seed}}
        if api == "chat":
            format_ = {"type": "grammar", "grammar": grammar}
            custom: Any = {"type": "custom", "custom": {"name": "calc", "format": format_}}
            choice: Any = client.chat.completions.create(
                model=MODEL,
                messages=HI,
                tools=[custom],
                tool_choice="required",
                max_tokens=200,
                parallel_tool_calls=False,
                **more,
            ).choices[0]
            text = choice.message.tool_calls[0].custom.input
        else:
            answer = client.responses.create(
                model=MODEL,
                input="Hello!",
                tools=[tool],
                tool_choice="required",
                max_output_tokens=200,
                parallel_tool_calls=False,
                **more,
            )
            (text,) = [item.input for item in answer.output if item.type == "custom_tool_call"]
        assert re.fullmatch(r"(add|sub) [0-9]{1,3} \"[a-c]{1,4}\"\n", text), text


def test_reasoning_before_a_forced_call_or_an_answer(client: openai.OpenAI) -> None:
    hard: Any = [{"role": "user", "content": "What is 47 + 38?"}]
    choice = ask(client, hard)
    assert "85" in choice.message.content
    assert "carry" in choice.message.reasoning
    choice = ask(client, hard, ROLL, tool_choice="required", reasoning_effort="low")
    assert arguments(choice)
    assert "carry" in choice.message.reasoning
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    choice = ask(client, hard, response_format=wanted)
    assert isinstance(json.loads(choice.message.content)["sum"], int)


def test_a_structured_answer_or_a_call(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"reply": {"type": "string", "maxLength": 40}},
        "required": ["reply"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}}
    choice = ask(client, PARIS, WEATHER, response_format=wanted)
    assert arguments(choice) == [("get_weather", {"city": "Paris"})]
    choice = ask(client, HI, WEATHER, response_format=wanted)
    if not arguments(choice):
        assert set(json.loads(choice.message.content)) == {"reply"}


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_the_reasoning(client: openai.OpenAI, budget: int) -> None:
    hard: Any = [{"role": "user", "content": "What is 347 + 438?"}]
    body = {"thinking_token_budget": budget}
    answer = client.chat.completions.create(
        model=MODEL, messages=hard, temperature=0, max_tokens=100, extra_body=body
    )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    # The usage counts the start marker too.
    assert (details.reasoning_tokens or 0) <= budget + 1
    assert answer.choices[0].message.content
    assert "</think>" not in answer.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {
                                "type": "object",
                                "properties": {"a": {"not": {"format": "date"}}},
                            },
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"messages": [*HI, {"role": "tool", "content": "x" * 9}]}, "messages[1].tool_call_id"),
    ],
)
def test_what_cannot_be_served_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**({"model": MODEL, "messages": HI} | fields))
    assert refusal.value.param == param
