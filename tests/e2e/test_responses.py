"""/v1/responses over a scripted engine: shapes, events and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from openai.types import responses

from mlx_parallm.api.responses.schema import Includable
from mlx_parallm.generation.event_stream import EventStream
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import OverloadedError, StepError
from mlx_parallm.types.events import GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, fail, prompt_event, serve_fake, token_event, write
from tests.fakes import EOS
from tests.response_events import check_events, check_response
from tests.response_requests import TOOL, call, post, stream, without_ids

CUSTOM = {"type": "custom", "name": "c"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "e"]}}\n</tool_call>'
CUSTOM_CALL = '<tool_call>\n{"name": "c", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'
SCRIPTS = {
    "text": ("hello", ["message"]),
    "nothing": ("", ["message"]),
    "reasoning": ("<think>\nso\n</think>\n\nyes", ["reasoning", "message"]),
    "call": (f"<think>\nso\n</think>\n\n{CALL}", ["reasoning", "function_call"]),
    "said and called": (f"Look: {CALL}\n{CUSTOM_CALL}", "message function_call custom_tool_call"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    config = ServerConfig(api_keys=("one", "two"), max_stored_responses=16)
    with serve_fake(engine, config) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    engine = served[0]
    engine.reset()
    return engine


@pytest.fixture
def url(served: tuple[FakeEngine, str], engine: FakeEngine) -> str:
    return served[1]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("summary", [None, "auto"])
def test_a_stream_is_legal_and_ends_as_the_whole(
    engine: FakeEngine, url: str, name: str, summary: str | None
) -> None:
    text, kinds = SCRIPTS[name]
    engine.script = write(text)
    fields = {"tools": [TOOL, CUSTOM], "reasoning": {"summary": summary}, "top_logprobs": 1}
    whole = post(url, **fields)
    check_response(whole)
    expected = kinds if isinstance(kinds, list) else kinds.split()
    assert [item["type"] for item in whole["output"]] == expected
    last = check_events(stream(url, **fields))
    assert without_ids(last) == without_ids(whole)
    assert last["usage"]["output_tokens"] == len(text.encode()) + 1


def test_calls_have_their_ids_and_texts(engine: FakeEngine, url: str) -> None:
    engine.script = write(SCRIPTS["said and called"][0])
    message, function, custom = post(url, tools=[TOOL, CUSTOM])["output"]
    assert message["content"][0]["text"] == "Look:"
    assert (message["role"], message["id"][:4]) == ("assistant", "msg_")
    assert function["id"].startswith("fc_")
    assert function["call_id"].startswith("call_")
    assert json.loads(function["arguments"]) == {"x": [1, "e"]}
    assert (custom["name"], custom["input"]) == ("c", 'a\n"b"')


def test_an_answer_at_its_limit_is_incomplete(engine: FakeEngine, url: str) -> None:
    whole = post(url, max_output_tokens=2)
    check_response(whole)
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    events = stream(url, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(check_events(events)) == without_ids(whole)


def test_a_call_that_a_stop_string_cuts_is_incomplete(engine: FakeEngine, url: str) -> None:
    cut = CALL[: CALL.index('"arguments": ') + len('"arguments": {"')]

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        async for event in write(cut)(request):
            ends = isinstance(event, TokenEvent) and event.finish_reason is not None
            yield replace(event, stop_reason="x") if ends else event

    engine.script = script
    whole = post(url, tools=[TOOL], stop="x")
    check_response(whole)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": None})
    assert responses.Response.model_validate(whole).status == "incomplete"
    assert [item["status"] for item in whole["output"]] == ["incomplete"]
    assert without_ids(check_events(stream(url, tools=[TOOL], stop="x"))) == without_ids(whole)


@pytest.mark.parametrize("text", [CALL, CUSTOM_CALL])
def test_a_call_at_the_limit_is_incomplete_and_shows_no_wrapper(
    engine: FakeEngine, url: str, text: str
) -> None:
    engine.script = write(text)
    arguments = text.index('"arguments": ') + len('"arguments": ')
    for limit in range(arguments, text.index("}\n<")):
        fields = {"tools": [TOOL, CUSTOM], "max_output_tokens": limit}
        whole = post(url, **fields)
        check_response(whole)
        assert responses.Response.model_validate(whole).status == "incomplete"
        (item,) = whole["output"]
        is_whole = text[arguments:limit].endswith("}")
        if item["type"] == "message":
            # The first character of the arguments is not certain yet.
            assert limit == arguments
            continue
        assert item["status"] == ("completed" if is_whole else "incomplete")
        if "input" in item:
            assert 'a\n"b"'.startswith(item["input"])
        assert without_ids(check_events(stream(url, **fields))) == without_ids(whole)


def test_what_was_asked_is_echoed(engine: FakeEngine, url: str) -> None:
    body: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
        "presence_penalty": 0.1,
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    answer = post(url, **body)
    assert {key: answer[key] for key in body} == body
    request = engine.submitted.get_nowait()
    assert (request.params.max_tokens, request.params.temperature) == (9, 0.5)
    assert bytes(request.prompt_ids).decode() == "system: Be brief.\nuser: hi\n"


def test_what_an_agent_sends_passes(engine: FakeEngine, url: str) -> None:
    """Send the body of the Codex command line, which has unknown keys and tools."""
    body: dict[str, Any] = {
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer",
             "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        ],
        "tools": [
            {"type": "function", "name": "shell", "strict": False, "description": "run",
             "parameters": {"type": "object", "properties": {"command": {"type": "array"}}}},
            {"type": "namespace", "name": "mcp__docs", "description": "docs", "tools": [TOOL]},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto", "context": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content", "web_search_call.results"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x-codex-installation-id": "1"},
        "service_tier": "priority",
        "text": {"verbosity": "medium"},
    }  # fmt: skip
    engine.script = write('<think>\nso\n</think>\n\n<tool_call>\n{"name": "mcp__docs__f", '
                          '"arguments": {}}\n</tool_call>')  # fmt: skip
    last = check_events(stream(url, **body))
    assert last["status"] == "completed"
    assert [tool["type"] for tool in last["tools"]] == ["function", "namespace", "custom"]
    reasoning, called = last["output"]
    assert (called["name"], called["namespace"]) == ("f", "mcp__docs")
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "ok"}
    reasoning = {key: reasoning[key] for key in ("type", "summary", "encrypted_content")}
    engine.script = write("done")
    turn = [*body["input"], reasoning, called, result]
    assert post(url, **body | {"input": turn})["output"][0]["content"][0]["text"] == "done"


def test_log_probabilities_are_those_of_the_text(engine: FakeEngine, url: str) -> None:
    engine.script = write("<think>\nso\n</think>\n\nhe")
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    _, message = post(url, **fields)["output"]
    entries = message["content"][0]["logprobs"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "he"
    assert entries[0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [{"token": "h", "logprob": -0.5, "bytes": [104]}],
    }
    deltas = [e for e in stream(url, **fields) if e["type"] == "response.output_text.delta"]
    assert [len(event["logprobs"]) for event in deltas] == [1, 1]
    assert engine.submitted.get_nowait().params.logprobs == 1
    assert post(url)["output"][1]["content"][0]["logprobs"] == []


def test_log_probabilities_are_the_same_for_a_reader_that_is_behind(
    engine: FakeEngine, url: str
) -> None:
    """Tokens without text are among those that come as one event."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        ids = [*b"<think>\nso\n</think>\n\nh", EOS, *b"e", EOS, EOS]
        unread = EventStream(request)
        unread.put(prompt_event(request))
        for place, token in enumerate(ids, 1):
            unread.put(token_event(request, 0, [token], is_last=place == len(ids)))
        async for event in unread:
            yield event

    engine.script = script
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    _, message = post(url, **fields)["output"]
    spelled = [entry["bytes"] for entry in message["content"][0]["logprobs"]]
    assert spelled == [[ord("h")], [ord("e")]]
    deltas = [e for e in stream(url, **fields) if e["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == ["h", "e"]


def test_an_error_before_the_first_token_is_plain(engine: FakeEngine, url: str) -> None:
    engine.refusal = OverloadedError("full")
    assert call(url, stream=True).status_code == 429
    assert call(url, background=True).status_code == 429
    engine.refusal, engine.script = None, fail(StepError("broken"))
    assert call(url, stream=True).status_code == 500


def test_an_error_in_the_middle_ends_the_stream(engine: FakeEngine, url: str) -> None:
    engine.script = fail(StepError("broken"), after="<think>\nso\n</think>\n\nye")
    *_, error, failed = events = stream(url)
    last = check_events(events)
    assert (error["type"], error["message"]) == ("error", "broken")
    assert failed["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert [item["status"] for item in last["output"]] == ["completed", "incomplete"]
    assert call(url, "GET", f"/{last['id']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].image_url"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": [1]}, "input"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {f"k{number}": "" for number in range(17)}}, "metadata"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["reasoning.encrypted_content", "x"]}, "include"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]},
         "input[0].encrypted_content"),
        ({"n": 2}, "n"),
        ({"background": True, "store": False}, "background"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"truncation": "some"}, "truncation"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(url: str, body: dict[str, Any], param: str) -> None:
    response = call(url, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_null_means_absent(url: str) -> None:
    fields = ("instructions", "tools", "tool_choice", "reasoning", "text", "metadata", "store",
              "previous_response_id", "include", "truncation", "max_output_tokens")  # fmt: skip
    check_response(post(url, **dict.fromkeys(fields)))


def test_tokens_of_an_input(url: str) -> None:
    count = call(url, "POST", "/input_tokens").json()
    assert count == {"object": "response.input_tokens", "input_tokens": len("user: hi\n")}
    named = call(url, "POST", "/input_tokens", model=None, instructions="x").json()
    assert named["input_tokens"] == len("system: x\nuser: hi\n")
    assert call(url, "POST", "/input_tokens", model="no").status_code == 404


def test_every_value_of_include_is_taken(url: str) -> None:
    values = get_args(responses.ResponseIncludable)
    assert post(url, include=list(values))["status"] == "completed"
    assert set(values) == set(get_args(Includable)), "OpenAI's values have changed"
