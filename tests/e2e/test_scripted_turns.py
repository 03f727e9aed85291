"""Turns of every format over HTTP, from models that write them token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from mlx_parallm.parsing.registry import reasoning_format, tool_format
from tests.builders.scripted_model import (
    Script,
    Typed,
    special_tokens_in,
    write_scripted_model,
)
from tests.server_process import ServerProcess
from tests.turn_texts import BY_TOOL, WRITTEN, Written

SPECIAL_TEXT = "tok.pad = <pad>; <s>x</s> <|endoftext|>"
PLACE = "@@"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "save",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "b": {"type": "integer"},
                    "c": {"type": "string"},
                },
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
#: Formats of different kinds: JSON, tags, special tokens around all, whole turns.
SAMPLE = ("hermes", "qwen3_coder", "kimi_k3", "openai")
#: Requests of all formats that run at once.
AT_ONCE = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The turn that a client reads; ``arguments`` of calls are values of JSON, if they are."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    finish: str = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A text that a model writes, and what the client must read.

    Attributes:
        script: what the model writes.
        answer: what the client must read.
        fields: further fields of the request.
    """

    script: Script
    answer: Answer
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


def called(*calls: tuple[str, Any], **parts: Any) -> Answer:
    return Answer(calls=calls, finish="tool_calls", **parts)


def turns_of(written: Written) -> Iterator[tuple[str, Turn]]:
    """Yield turns of a format with their names."""
    reasoning = reasoning_format(written.reasoning)
    plain = {"a": "x y", "b": 2}
    call = written.calls(("save", plain))
    yield "call", Turn(script=[call], answer=called(("save", plain)))
    yield "special text", Turn(script=[Typed(SPECIAL_TEXT)], answer=Answer(content=SPECIAL_TEXT))
    before, after = written.calls(("save", {"a": PLACE, "b": 2})).split(PLACE)
    yield (
        "special text in arguments",
        Turn(
            script=[before, Typed(SPECIAL_TEXT), after],
            answer=called(("save", {"a": SPECIAL_TEXT, "b": 2})),
        ),
    )
    end = written.end_of("a").strip() or "</tool_call>"
    yield (
        "end tag in arguments",
        Turn(
            script=[before, f"END = {end} and", after],
            answer=called(("save", {"a": f"END = {end} and", "b": 2})),
        ),
    )
    yield (
        "call in reasoning",
        Turn(
            script=[f"{reasoning.start}Hm. {call}"],
            answer=called(("save", plain), reasoning="Hm."),
        )
        if not written.bare
        else Turn(
            script=[f"{reasoning.start}Hm.\n{call}"],
            answer=called(("save", plain), reasoning="Hm."),
        ),
    )
    if not written.bare:
        said = "" if written.tool == "openai" else "\nDone."
        yield (
            "end of reasoning after a call",
            Turn(
                script=[f"{reasoning.start}Hm. {call}{reasoning.end}{said}"],
                answer=called(("save", plain), reasoning="Hm.", content=said.strip()),
            ),
        )
    other = written.calls(("other", {"a": "x"})).removesuffix("<|call|>")
    yield (
        "reasoning about a call",
        Turn(
            script=[f"{reasoning.start}I think of {other}."],
            answer=Answer(reasoning=f"I think of {other}."),
        ),
    )
    for number, text in enumerate(written.without_arguments):
        yield f"no arguments {number}", Turn(script=[text], answer=called(("now", {})))
    if written.parameter is not None:
        full = {"a": "x y", "b": 2, "c": "z"}
        yield (
            "missing end tag",
            Turn(
                script=[written.without_end(written.calls(("save", full)), "a", 0)],
                answer=called(("save", full)),
            ),
        )
    yield (
        "stop string in arguments",
        Turn(
            script=[before, "up to STOP", after],
            answer=Answer(calls=(("save", None),), finish="stop"),
            fields={"stop": ["STOP"]},
        ),
    )
    form = tool_format(written.tool)
    forced = form.forced or tool_format("json_array").forced
    assert forced is not None
    text = forced.begin + forced.call.replace("$name", "save").replace("$arguments", '{"a": "x"}')
    for limit in (1, 2, 4):
        yield (
            f"forced call of {limit} tokens",
            Turn(
                script=[text + forced.end],
                answer=Answer(finish="length"),
                fields={"tool_choice": "required", "max_tokens": limit},
            ),
        )
    yield (
        "forced call",
        Turn(
            script=[text + forced.end],
            answer=called(("save", {"a": "x"})),
            fields={"tool_choice": "required"},
        ),
    )


CASES = {written.tool: dict(turns_of(written)) for written in WRITTEN}


def answer_of(message: dict[str, Any], finish: str) -> Answer:
    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return None

    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Answer(
        reasoning=message.get("reasoning") or "",
        content=message.get("content") or "",
        calls=tuple((call["name"], value(call["arguments"])) for call in calls),
        finish=finish,
    )


async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> Answer:
    answer = await client.chat.completions.create(**fields)
    (choice,) = answer.choices
    return answer_of(choice.message.to_dict(), choice.finish_reason)


async def ask_streamed(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> Answer:
    """Return the answer that the deltas make; each has one kind of text."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = ""
    stream = await client.chat.completions.create(stream=True, **fields)
    async for chunk in stream:
        (choice,) = chunk.choices
        delta: dict[str, Any] = choice.delta.to_dict()
        kinds = [key for key in ("content", "reasoning", "tool_calls") if delta.get(key)]
        assert len(kinds) <= 1, delta
        for key in ("content", "reasoning"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                known = message["tool_calls"][call["index"]]["function"]
                known["arguments"] += call["function"]["arguments"]
        finish = choice.finish_reason or finish
    return answer_of(message, finish)


Answers = dict[tuple[str, str, bool], Answer]


async def ask_all(url: str, messages: dict[str, list[str]]) -> Answers:
    """Return the answers by format, turn, and whether it was streamed."""
    limit = asyncio.Semaphore(AT_ONCE)
    answers: Answers = {}

    async def ask_one(tool: str, name: str, message: str, turn: Turn, is_streamed: bool) -> None:
        fields = {
            "model": tool,
            "messages": [{"role": "user", "content": message}],
            "tools": TOOLS,
            "temperature": 0,
            **turn.fields,
        }
        async with limit:
            read = ask_streamed if is_streamed else ask
            answers[tool, name, is_streamed] = await read(client, fields)

    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        asyncio.TaskGroup() as group,
    ):
        for tool, first_messages in messages.items():
            for message, (name, turn) in zip(first_messages, CASES[tool].items(), strict=True):
                for is_streamed in (False, True):
                    group.create_task(ask_one(tool, name, message, turn, is_streamed))
    return answers


def write_model(folder: Path, tool: str) -> list[str]:
    forms = (tool_format(tool), reasoning_format(BY_TOOL[tool].reasoning))
    markers = [marker for form in forms for marker in (*form.markers, *form.silent)]
    scripts = [turn.script for turn in CASES[tool].values()]
    return write_scripted_model(folder, scripts, special_tokens_in(markers))


def tools_of(request: pytest.FixtureRequest) -> set[str]:
    """Return the formats whose tests were chosen."""
    items = [item for item in request.session.items if item.path == request.path]
    return {
        str(item.callspec.params["tool"]) for item in items if isinstance(item, pytest.Function)
    }


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    base = tmp_path_factory.mktemp("scripted")
    messages = {tool: write_model(base / tool, tool) for tool in sorted(tools_of(request))}
    flags = ["--stream-interval", "8"]
    for tool in messages:
        flags += ["--model", str(base / tool), "--tool-call-parser", f"{base / tool}={tool}"]
        flags += ["--reasoning-parser", f"{base / tool}={BY_TOOL[tool].reasoning}"]
    server = ServerProcess(*flags)
    try:
        server.wait_until_ready()
        return asyncio.run(ask_all(server.url, messages))
    finally:
        server.stop()


def cases() -> Iterator[Any]:
    """Yield each format with each turn; `make test` runs those of a few formats."""
    for tool, turns in CASES.items():
        marks = () if tool in SAMPLE else (pytest.mark.slow,)
        for name in turns:
            yield pytest.param(tool, name, marks=marks, id=f"{tool}-{name}")


@pytest.mark.parametrize(("tool", "name"), list(cases()))
def test_a_turn_is_read_as_it_was_written(answers: Answers, tool: str, name: str) -> None:
    expected = CASES[tool][name].answer
    assert answers[tool, name, False] == expected
    assert answers[tool, name, True] == expected, "streamed"
