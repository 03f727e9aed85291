"""Tool calls on chat completions, over a scripted engine and the real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.fake_engine import FakeEngine, serve_fake, write
from tests.fakes import ByteTokenizer

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "custom", "custom": {"name": "patch"}},
]
F = '<tool_call>\n{"name": "f", "arguments": {"a": "e\\n"}}\n</tool_call>'
PATCH = '<tool_call>{"name": "patch", "arguments": {"input": "x\\ny"}}</tool_call>'
ARGUMENTS = '{"a": "e\\n"}'


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    while not served[0].submitted.empty():
        served[0].submitted.get()
    return served[0]


@pytest.fixture
def client(served: tuple[FakeEngine, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="k", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": "alias", "messages": HI, "tools": TOOLS} | more
    return client.chat.completions.create(**fields)


def joined(chunks: Any) -> dict[int, dict[str, Any]]:
    """Return the joined deltas by choice: content, reasoning, calls, finish reason."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            known = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": {}, "finish": None}
            )
            delta = choice.delta.to_dict()
            known["content"] += delta.get("content") or ""
            known["reasoning"] += delta.get("reasoning") or ""
            known["finish"] = choice.finish_reason or known["finish"]
            for call in delta.get("tool_calls", ()):
                if call["index"] not in known["calls"]:
                    known["calls"][call["index"]] = call
                    assert call["id"].startswith("call_")
                    continue
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                known["calls"][call["index"]]["function"]["arguments"] += call["function"][
                    "arguments"
                ]
    return choices


def test_a_whole_answer_with_calls(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = write(f"<think>hm</think>\n{F}\n{F}")
    (choice,) = ask(client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning == choice.message.reasoning_content == "hm"
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "f", ARGUMENTS)
    ] * 2
    assert len({call.id for call in calls}) == 2


def test_content_beside_calls_stays(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = write(f"Let me see.\n{F}")
    assert ask(client).choices[0].message.content == "Let me see."


def test_a_stream_tells_the_name_first_and_leaks_no_marker(
    engine: FakeEngine, client: openai.OpenAI
) -> None:
    engine.script = write(f"<think>hm</think>\nLet me see. {F}\n{F}")
    chunks = list(ask(client, stream=True, n=2))
    firsts = [
        call.to_dict()
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
        if call.id
    ]
    assert all(call["function"] == {"name": "f", "arguments": ""} for call in firsts)
    assert all(call["type"] == "function" for call in firsts)
    choices = joined(chunks)
    assert set(choices) == {0, 1}
    for joint in choices.values():
        assert (joint["content"], joint["reasoning"]) == ("Let me see.", "hm")
        assert joint["finish"] == "tool_calls"
        arguments = [call["function"]["arguments"] for call in joint["calls"].values()]
        assert arguments == [ARGUMENTS] * 2


def test_arguments_come_in_pieces(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = write(F)
    pieces = [
        call.function.arguments
        for chunk in ask(client, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
        if not call.id
    ]
    assert len(pieces) > 5
    assert "".join(pieces) == ARGUMENTS


def test_a_custom_tool_cut_anywhere_shows_no_wrapper(
    engine: FakeEngine, client: openai.OpenAI
) -> None:
    engine.script = write(PATCH)
    for limit in range(PATCH.index("arguments"), len(PATCH), 3):
        (choice,) = ask(client, max_tokens=limit).choices
        streamed = joined(ask(client, max_tokens=limit, stream=True))[0]
        assert choice.finish_reason == streamed["finish"] == "length"
        for call in choice.message.tool_calls or ():
            assert "x\ny".startswith(call.custom.input)
            assert streamed["calls"][0]["custom"]["input"] == call.custom.input


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_answered_with_its_text(
    engine: FakeEngine, client: openai.OpenAI, stream: bool
) -> None:
    engine.script = write(PATCH)
    answer = ask(client, stream=stream)
    if stream:
        call = next(iter(joined(answer)[0]["calls"].values()))
    else:
        call = answer.choices[0].message.tool_calls[0].to_dict()
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "x\ny"})


@pytest.mark.parametrize("stream", [False, True])
def test_no_parallel_calls_are_one_call(
    engine: FakeEngine, client: openai.OpenAI, stream: bool
) -> None:
    engine.script = write(F + F)
    answer = ask(client, parallel_tool_calls=False, stream=stream)
    calls = joined(answer)[0]["calls"] if stream else answer.choices[0].message.tool_calls
    assert len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_call_ends_by_length(engine: FakeEngine, client: openai.OpenAI, stream: bool) -> None:
    engine.script = write(F)
    answer = ask(client, max_tokens=50, stream=stream)
    if stream:
        choice = joined(answer)[0]
        assert choice["finish"] == "length"
        assert ARGUMENTS.startswith(choice["calls"][0]["function"]["arguments"])
    else:
        assert answer.choices[0].finish_reason == "length"
        assert ARGUMENTS.startswith(answer.choices[0].message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("text", ["<tool_call>\nnot JSON\n</tool_call>", "<tool_call>", "a < b"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(
    engine: FakeEngine, client: openai.OpenAI, text: str, stream: bool
) -> None:
    engine.script = write(text)
    answer = ask(client, stream=stream)
    content = joined(answer)[0]["content"] if stream else answer.choices[0].message.content
    assert content == text


def test_none_tells_the_model_of_no_tool_and_reads_no_call(
    engine: FakeEngine, client: openai.OpenAI
) -> None:
    engine.script = write(F)
    (choice,) = ask(client, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (F, None)
    assert choice.finish_reason == "stop"


def test_log_probabilities_and_ids_are_of_every_token(
    engine: FakeEngine, client: openai.OpenAI
) -> None:
    engine.script = write(F)
    more = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = ask(client, **more).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, **more, stream=True)]
    streamed = [token for choice in chunks if choice.logprobs for token in choice.logprobs.content]
    assert len(streamed) == len(whole.logprobs.content) == len(F.encode()) + 1
    ids = [i for choice in chunks for i in choice.to_dict().get("token_ids", ())]
    assert ids == whole.to_dict()["token_ids"]


def test_the_deprecated_form_is_answered_in_kind(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = write(F + F)
    fields: Any = {"tools": openai.omit, "functions": [{"name": "f"}]}
    (choice,) = ask(client, **fields).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.to_dict() == {"name": "f", "arguments": ARGUMENTS}
    assert choice.message.tool_calls is None
    deltas = [chunk.choices[0].delta for chunk in ask(client, **fields, stream=True)]
    calls = [delta.function_call for delta in deltas if delta.function_call]
    assert calls[0].name == "f"
    assert "".join(call.arguments for call in calls) == ARGUMENTS


def test_reasoning_can_be_left_out_or_left_in(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.script = write("<think>hm</think>yes")
    message = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert (message.content, "reasoning" in message.to_dict()) == ("yes", False)
    message = ask(client, extra_body={"separate_reasoning": False}).choices[0].message
    assert (message.content, "reasoning" in message.to_dict()) == ("<think>hm</think>yes", False)
    deltas = joined(ask(client, stream=True, extra_body={"include_reasoning": False}))
    assert (deltas[0]["content"], deltas[0]["reasoning"]) == ("yes", "")


def test_tools_reach_the_template_unless_there_are_none_to_call(
    engine: FakeEngine, served: tuple[FakeEngine, str]
) -> None:
    class Recording(ByteTokenizer):
        seen: Any = None

        def render_chat(self, messages: Any, **options: Any) -> str:
            Recording.seen = options["tools"]
            return super().render_chat(messages, **options)

    recording = FakeEngine(Recording())
    with serve_fake(recording) as url:
        allowed = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
        for choice, names in (
            ("auto", ["f", "patch"]),
            ("none", None),
            ({"type": "allowed_tools", "allowed_tools": allowed}, ["patch"]),
        ):
            body = {"model": "alias", "messages": HI, "tools": TOOLS, "tool_choice": choice}
            assert httpx2.post(url + CHAT, json=body).status_code == 200
            seen = Recording.seen and [tool["function"]["name"] for tool in Recording.seen]
            assert seen == names


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": "f"}, "tools"),
        ({"tools": [7]}, "tools"),
        ({"tools": TOOLS, "tool_choice": 7}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[1].tool_calls[0].function",
        ),
    ],
)
def test_what_is_wrong_is_named(
    served: tuple[FakeEngine, str], body: dict[str, Any], param: str
) -> None:
    answer = httpx2.post(served[1] + CHAT, json={"model": "alias", "messages": HI} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_surrogates_in_arguments_of_the_history_are_harmless(
    engine: FakeEngine, served: tuple[FakeEngine, str]
) -> None:
    engine.script = write("yes")
    function = {"name": "f", "arguments": r'{"a": "\ud800"}'}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": json.dumps("\ud800")},
    ]
    body = {"model": "alias", "messages": messages}
    assert httpx2.post(served[1] + CHAT, json=body).status_code == 200
