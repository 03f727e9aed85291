"""The input of the chat template and of the sampler, and fields that change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest

from tests.fake_engine import FakeEngine, serve_fake, write
from tests.fakes import ByteTokenizer

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


class RecordingTokenizer(ByteTokenizer):
    """Keeps the template's input; ``opening`` ends the text."""

    def __init__(self) -> None:
        self.opening = ""
        self.messages: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}

    def render_chat(self, messages: Sequence[Any], **options: Any) -> str:
        self.messages, self.options = [dict(message) for message in messages], options
        return super().render_chat(messages, **options) + self.opening


@pytest.fixture(scope="module")
def tokenizer() -> RecordingTokenizer:
    return RecordingTokenizer()


@pytest.fixture(scope="module")
def served(tokenizer: RecordingTokenizer) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(tokenizer)
    with serve_fake(engine) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str], tokenizer: RecordingTokenizer) -> FakeEngine:
    served[0].reset()
    tokenizer.opening = ""
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


def ask(url: str, **body: Any) -> Any:
    body = {"model": "alias", "messages": HI} | body
    response = httpx2.post(url + CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_history_reaches_the_template_as_text(
    engine: FakeEngine, url: str, tokenizer: RecordingTokenizer
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    ask(url, messages=messages)
    assert [m["role"] for m in tokenizer.messages] == ["system", "user", "assistant", "tool"]
    assert [m["content"] for m in tokenizer.messages] == ["be brief", "ab", "", "42"]
    assert tokenizer.messages[2]["tool_calls"][0]["function"]["name"] == "f"
    assert tokenizer.messages[3]["tool_call_id"] == "c"


def test_nulls_of_a_message_are_absent(
    engine: FakeEngine, url: str, tokenizer: RecordingTokenizer
) -> None:
    nulls = dict.fromkeys(["tool_calls", "function_call", "refusal", "annotations", "audio"])
    answer = {"role": "assistant", "content": "yes"}
    ask(url, messages=[*HI, answer | nulls, *HI])
    assert tokenizer.messages[1] == answer


@pytest.mark.parametrize(
    ("sent", "kwargs"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"chat_template_kwargs": {"x": 1}}, {"x": 1}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_variables_reach_the_template(
    engine: FakeEngine,
    url: str,
    tokenizer: RecordingTokenizer,
    sent: dict[str, Any],
    kwargs: dict[str, Any],
) -> None:
    ask(url, **sent)
    assert tokenizer.options["template_kwargs"] == kwargs


@pytest.mark.parametrize(
    ("sent", "opens", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
    ],
)
def test_the_template_opens_a_turn_or_goes_on(
    engine: FakeEngine,
    url: str,
    tokenizer: RecordingTokenizer,
    sent: dict[str, Any],
    opens: bool,
    continues: bool,
) -> None:
    ask(url, **sent)
    assert tokenizer.options["add_generation_prompt"] == opens
    assert tokenizer.options["continue_final_message"] == continues


def test_reasoning_that_the_template_opened_is_split(
    engine: FakeEngine, url: str, tokenizer: RecordingTokenizer
) -> None:
    tokenizer.opening = "<think>\n"
    engine.script = write("so\n</think>\n\nyes")
    message = ask(url)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so", "yes")


@pytest.mark.parametrize(
    ("sent", "name", "value"),
    [
        ({}, "max_tokens", None),
        ({}, "logprobs", None),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", 3),
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"presence_penalty": -2}, "presence_penalty", -2),
        ({"frequency_penalty": 2}, "frequency_penalty", 2),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"n": 2}, "n", 2),
    ],
)
def test_a_parameter_reaches_the_sampler(
    engine: FakeEngine, url: str, sent: dict[str, Any], name: str, value: Any
) -> None:
    ask(url, **sent)
    assert getattr(engine.submitted.get().params, name) == value


def test_fields_without_effect_are_accepted(engine: FakeEngine, url: str) -> None:
    fields = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "verbosity": "low", "prediction": {}, "web_search_options": {}, "moderation": {},
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "modalities": ["text"],
        "never_heard_of": [{"x": 1}],
    }  # fmt: skip
    assert ask(url, **fields)["choices"][0]["message"]["content"] == "hello"
