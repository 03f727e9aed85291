"""/v1/responses over a scripted engine: shapes, events, errors, and what is kept for whom."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, get_args

import httpx2
import openai
import pytest
from openai.types import responses

from mlx_parallm.api.responses.items import unsealed
from mlx_parallm.api.responses.schema import Includable
from mlx_parallm.generation.event_stream import EventStream
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import OverloadedError, StepError
from mlx_parallm.types.events import GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import (
    FakeEngine,
    fail,
    hang,
    prompt_event,
    serve_fake,
    token_event,
    write,
)
from tests.fakes import EOS
from tests.response_events import check_events, check_response

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
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


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        yield client


def call(url: str, method: str = "POST", path: str = "", key: str = "one", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    sent: dict[str, Any] = (
        {"json": {"model": "alias", "input": "hi"} | body} if method == "POST" else {}
    )
    return httpx2.request(method, url + PATH + path, headers=headers, **sent)


def post(url: str, **body: Any) -> dict[str, Any]:
    response = call(url, **body)
    assert response.status_code == 200, response.text
    return response.json()


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(url: str, **body: Any) -> list[dict[str, Any]]:
    response = call(url, stream=True, **body)
    assert response.headers["content-type"] == "text/event-stream", response.text
    return read_events(response.text)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a response that equal requests have in common."""
    output = [{k: v for k, v in item.items() if "id" not in k} for item in response["output"]]
    return response | {"output": output, "id": "", "created_at": 0, "completed_at": 0}


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


def test_a_conversation_goes_on_from_a_stored_response(engine: FakeEngine, url: str) -> None:
    first = post(url, instructions="not carried over")
    second = post(url, input="more", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    third = stream(url, input="on", previous_response_id=second["id"])[-1]["response"]
    prompts = [bytes(engine.submitted.get_nowait().prompt_ids).decode() for _ in range(3)]
    assert prompts[2] == "user: hi\nassistant: hello\nuser: more\nassistant: hello\nuser: on\n"
    listed = call(url, "GET", f"/{third['id']}/input_items?order=asc").json()
    assert [item["role"] for item in listed["data"]] == ["user", "assistant"] * 2 + ["user"]
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    post(url, input=[reference, {"role": "user", "content": "?"}])
    assert bytes(engine.submitted.get_nowait().prompt_ids) == b"assistant: hello\nuser: ?\n"


def test_a_response_belongs_to_its_key(url: str) -> None:
    mine = post(url)
    assert call(url, "GET", f"/{mine['id']}").json() == mine
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
        assert call(url, method, f"/{mine['id']}{path}", key="two").status_code == 404
    refused = call(url, key="two", previous_response_id=mine["id"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        404, "previous_response_not_found",
    )  # fmt: skip
    reference = [{"type": "item_reference", "id": mine["output"][0]["id"]}]
    assert call(url, key="two", input=reference).status_code == 400


def test_what_is_not_stored_is_gone(url: str) -> None:
    kept, left = post(url), post(url, store=False)
    assert call(url, "GET", f"/{left['id']}").status_code == 404
    assert call(url, "DELETE", f"/{kept['id']}").json() == {
        "id": kept["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    assert call(url, "DELETE", f"/{kept['id']}").status_code == 404


def test_pages_of_input_items(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    answer = client.responses.create(model="alias", input=items)
    for order, texts in (("desc", "43210"), ("asc", "01234")):
        page = client.responses.input_items.list(answer.id, limit=2, order=order)  # type: ignore[arg-type]
        assert page.has_more
        assert "".join(item.content[0].text for item in page) == texts  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(answer.id, after="no")


def test_stored_items_show_what_is_included(url: str) -> None:
    thought = {"type": "reasoning", "summary": [],
               "content": [{"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
    logprobs, secret = "message.output_text.logprobs", "reasoning.encrypted_content"
    first = post(url, include=[logprobs], input=[thought, {"role": "user", "content": "hi"}])
    second = post(url, previous_response_id=first["id"])

    def parts(name: str, query: str) -> tuple[bool, bool]:
        items = call(url, "GET", f"/{name}/input_items?{query}").json()["data"]
        said = next(item for item in items if item.get("role") == "assistant")
        (hidden,) = (item for item in items if item["type"] == "reasoning")
        return bool(said["content"][0]["logprobs"]), bool(hidden["encrypted_content"])

    for query, wanted in (
        ("", (False, False)),
        (f"include={logprobs}", (True, False)),
        (f"include[]={logprobs}&include[]={secret}", (True, True)),
    ):
        assert parts(second["id"], query) == wanted
    for name in ("include", "include[]"):
        for path in ("?", "?stream=true&", "/input_items?"):
            refused = call(url, "GET", f"/{first['id']}{path}{name}=all")
            assert refused.status_code == 400, refused.text
    assert call(url, "GET", f"/{first['id']}").json() == first


def test_a_response_shows_its_reasoning_if_that_is_included(engine: FakeEngine, url: str) -> None:
    engine.script = write("<think>\nso\n</think>\n\nhello")
    made = post(url)
    path = f"/{made['id']}?include=reasoning.encrypted_content"
    (item, _) = call(url, "GET", path).json()["output"]
    assert "encrypted_content" not in made["output"][0]
    assert unsealed(item["encrypted_content"]) == item["content"][0]["text"]


def test_a_response_in_the_background_can_be_read_again(engine: FakeEngine, url: str) -> None:
    events = stream(url, background=True)
    last = check_events(events)
    kinds = [event["type"] for event in events[:3]]
    assert kinds == ["response.created", "response.queued", "response.in_progress"]
    again = call(url, "GET", f"/{last['id']}?stream=true")
    assert read_events(again.text) == events
    rest = call(url, "GET", f"/{last['id']}?stream=true&starting_after=4")
    assert read_events(rest.text) == events[5:]
    assert call(url, "GET", f"/{last['id']}").json() == last
    silent = post(url)
    refused = call(url, "GET", f"/{silent['id']}?stream=true")
    assert refused.json()["error"]["param"] == "stream"


def test_a_response_in_the_background_can_be_cancelled(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="hel")
    headers = {"authorization": "Bearer one"}
    body = {"model": "alias", "input": "hi", "background": True, "stream": True}
    with httpx2.stream("POST", url + PATH, json=body, headers=headers) as response:
        lines = response.iter_lines()
        created = json.loads([next(lines) for _ in range(2)][1].removeprefix("data: "))
        name = created["response"]["id"]
        while "hel"[-1:] not in next(lines).partition('"delta":')[2][:3]:
            pass
        running = call(url, "GET", f"/{name}").json()
        check_response(running)
        assert (running["status"], running["output"][0]["content"][0]["text"]) == (
            "in_progress", "hel",
        )  # fmt: skip
        assert call(url, previous_response_id=name).status_code == 400
        cancelled = call(url, "POST", f"/{name}/cancel").json()
        rest = "\n".join(lines)
    check_response(cancelled)
    assert cancelled["status"] == "cancelled"
    assert '"type":"response.incomplete"' in rest
    assert engine.aborted.get() == name
    assert call(url, "POST", f"/{name}/cancel").json() == cancelled
    engine.script = write("hello")
    assert call(url, "POST", f"/{post(url)['id']}/cancel").status_code == 400


def test_a_failure_in_the_background_is_told_later(engine: FakeEngine, url: str) -> None:
    engine.script = fail(StepError("broken"), after="hel")
    last = check_events(stream(url, background=True))
    assert call(url, "GET", f"/{last['id']}").json() == last
    assert (last["status"], last["error"]["message"]) == ("failed", "broken")


def test_deleting_ends_what_runs(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="hel")
    queued = post(url, background=True)
    check_response(queued)
    assert (queued["status"], queued["output"]) == ("queued", [])
    assert call(url, "DELETE", f"/{queued['id']}").status_code == 200
    assert engine.aborted.get() == queued["id"]
    assert call(url, "GET", f"/{queued['id']}").status_code == 404


def test_what_runs_in_the_background_is_bounded(engine: FakeEngine, url: str) -> None:
    engine.script = hang()
    answers = [call(url, background=True) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]
    for answer in answers[:4]:
        call(url, "DELETE", f"/{answer.json()['id']}")
    engine.script = write("hello")
    assert call(url, background=True).status_code == 200


def test_a_server_that_stops_ends_what_runs() -> None:
    engine = FakeEngine()
    engine.script = hang()
    with serve_fake(engine) as url:
        queued = post(url, background=True)
    assert engine.aborted.get() == queued["id"]


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


def test_a_summary_is_an_input(engine: FakeEngine, client: openai.OpenAI) -> None:
    first = client.responses.create(model="alias", input="ab")
    engine.submitted.get()
    engine.script = write("<think>\nhm\n</think>\n\nThey met.")
    compacted = client.responses.compact(
        model="alias", previous_response_id=first.id, input=[{"role": "user", "content": "bye"}]
    )
    prompt = bytes(engine.submitted.get().prompt_ids).decode()
    assert prompt.startswith("user: ab\nassistant: hello\nuser: bye\n\nSum up")
    assert compacted.object == "response.compaction"
    output: Any = compacted.to_dict(warnings=False)["output"]
    assert [item["type"] for item in output] == ["message", "message", "compaction"]
    assert compacted.usage.output_tokens > 0
    more: Any = [*output, {"role": "user", "content": "and?"}]
    client.responses.create(model="alias", input=more)
    prompt = bytes(engine.submitted.get().prompt_ids).decode()
    assert prompt.startswith("user: ab\nuser: bye\nuser: A summary")
    assert prompt.endswith("They met.\nuser: and?\n")


@pytest.mark.parametrize("limit", [None, "cut"])
def test_a_trigger_asks_for_a_summary_in_place_of_an_answer(
    engine: FakeEngine, url: str, limit: str | None
) -> None:
    # The fake model's context leaves room for few bytes.
    engine.script = write(f"<think>\nhm\n</think>\n\n{'They met.' * (1 if limit is None else 40)}")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    body: dict[str, Any] = {"input": [*turns, {"type": "compaction_trigger"}], "tools": [TOOL]}
    events = stream(url, store=False, **body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    items = ["output_item.added", "output_item.done"]
    assert kinds == ["created", "in_progress", *items, "completed"]
    last = events[-1]["response"]
    prompt = bytes(engine.submitted.get().prompt_ids).decode()
    assert prompt.startswith("user: hi\nassistant: yo\nuser: Sum up")
    (item,) = last["output"]
    assert item.keys() == {"id", "type", "encrypted_content"}
    assert last["status"] == "completed"
    assert without_ids(post(url, store=False, **body)) == without_ids(last)
    engine.submitted.get()
    post(url, input=[item, {"role": "user", "content": "and?"}])
    assert "They met." in bytes(engine.submitted.get().prompt_ids).decode()
    engine.script = write("")
    events = stream(url, **body)
    assert events[-1]["response"]["error"]["message"] == "The model wrote no summary."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"input": []}, "input"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_what_cannot_be_summed_up_is_refused(url: str, body: dict[str, Any], param: str) -> None:
    response = call(url, path="/compact", **body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


def test_an_empty_summary_is_an_error(engine: FakeEngine, url: str) -> None:
    engine.script = write("")
    response = call(url, path="/compact")
    assert response.status_code == 500
    assert "no summary" in response.json()["error"]["message"]
