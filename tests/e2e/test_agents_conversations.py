"""Conversations of agents, by every dialect, with chat templates that do not take them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from tests.fake_engine import FakeEngine, serve_fake
from tests.strict_templates import TEMPLATES

# CUT: arguments that ended with max_tokens.
CUT = '{"path": "file-path", "text": "def f('
WORDS = ("rules-first", "ask-one", "file-path", "result-one", "rules-later", "ask-two")


def call(name: str = "write") -> dict[str, Any]:
    return {"id": "call_one", "type": "function", "function": {"name": name, "arguments": CUT}}


CHAT = [
    {"role": "system", "content": "rules-first"},
    {"role": "user", "content": "ask-one"},
    {"role": "assistant", "content": None, "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "call_one", "content": "result-one"},
    {"role": "developer", "content": "rules-later"},
    {"role": "user", "content": "ask-two"},
]
CLAUDE: dict[str, Any] = {
    "system": "rules-first",
    "messages": [
        {"role": "user", "content": "ask-one"},
        {
            "role": "assistant",
            "content": [
                {
                    "type": "tool_use",
                    "id": "call_one",
                    "name": "write",
                    "input": {"path": "file-path"},
                }
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_one", "content": "result-one"}
            ],
        },
        {"role": "system", "content": "rules-later"},
        {"role": "user", "content": "ask-two"},
    ],
}
CODEX: dict[str, Any] = {
    "instructions": "rules-first",
    "input": [
        {"role": "user", "content": "ask-one"},
        {"type": "function_call", "call_id": "call_one", "name": "write", "arguments": CUT},
        {"type": "function_call_output", "call_id": "call_one", "output": "result-one"},
        {"role": "developer", "content": "rules-later"},
        {"role": "user", "content": "ask-two"},
    ],
}
#: A route, and its body without the model's name.
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {**CLAUDE, "max_tokens": 4},
    "/v1/responses": {**CODEX, "store": False},
    "/v1/rl/rollout": {"prompts": [{"messages": CHAT}], "max_tokens": 4},
}
COUNTING: dict[str, tuple[str, dict[str, Any]]] = {
    "/tokenize": ("count", {"messages": CHAT}),
    "/v1/chat/completions/input_tokens": ("input_tokens", {"messages": CHAT}),
    "/v1/messages/count_tokens": ("input_tokens", CLAUDE),
    "/v1/responses/input_tokens": ("input_tokens", CODEX),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> ParallmTokenizer:
    template = TEMPLATES[request.param] + "{% if add_generation_prompt %}<assistant>{% endif %}"
    return load_tokenizer(DEMO_FOLDER, chat_template=template)


@pytest.fixture(scope="module")
def served(tokenizer: ParallmTokenizer) -> Iterator[tuple[FakeEngine, str]]:
    unchecked: Any = tokenizer
    engine = FakeEngine(unchecked)
    with serve_fake(engine) as url:
        yield engine, url


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    response = httpx2.post(url + path, json={"model": "alias", **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(served: tuple[FakeEngine, str], path: str) -> tuple[int, ...]:
    engine, url = served
    post(url, path, GENERATING[path])
    return engine.submitted.get().prompt_ids


@pytest.mark.parametrize("path", GENERATING)
def test_no_part_is_lost(
    served: tuple[FakeEngine, str], tokenizer: ParallmTokenizer, path: str
) -> None:
    text = tokenizer.decode(prompt_of(served, path), skip_special_tokens=False)
    assert [word for word in WORDS if text.count(word) != 1] == []


@pytest.mark.parametrize("path", COUNTING)
def test_what_is_counted_is_the_prompt(served: tuple[FakeEngine, str], path: str) -> None:
    field, body = COUNTING[path]
    same = {"/tokenize": "/v1/chat/completions"}.get(path) or path.rpartition("/")[0]
    assert post(served[1], path, body)[field] == len(prompt_of(served, same))


def test_a_rendered_prompt_is_the_one_that_runs(
    served: tuple[FakeEngine, str], tokenizer: ParallmTokenizer
) -> None:
    body = {"messages": CHAT}
    rendered = post(served[1], "/v1/chat/completions/render", body)
    assert tuple(rendered["token_ids"]) == prompt_of(served, "/v1/chat/completions")
    applied = post(served[1], "/apply-template", body)["prompt"]
    assert tokenizer.encode(applied, add_special_tokens=False) == rendered["token_ids"]


@pytest.mark.parametrize("arguments", ["", "null", "[1]", "no JSON", '{"a": 1} {"b": 2}', CUT])
def test_arguments_that_are_no_object_can_be_sent_back(
    served: tuple[FakeEngine, str], arguments: str
) -> None:
    sent = call()
    sent["function"] = {"name": "write", "arguments": arguments}
    messages = [CHAT[1], {"role": "assistant", "tool_calls": [sent]}, CHAT[3]]
    prompt = post(served[1], "/apply-template", {"messages": messages})["prompt"]
    if arguments in ("[1]", "no JSON"):
        assert json.dumps({"INVALID_JSON": arguments}) in prompt.replace("\\", "")


THINKING_OFF: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "reasoning_effort": "none"},
    "/v1/messages": {**CLAUDE, "max_tokens": 4, "thinking": {"type": "disabled"}},
    "/v1/responses": {**CODEX, "store": False, "reasoning": {"effort": "none"}},
    "/v1/rl/rollout": {
        "prompts": [{"messages": CHAT}],
        "max_tokens": 4,
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


@pytest.fixture(scope="module")
def thinking() -> Iterator[tuple[FakeEngine, str]]:
    """Serve a template whose switch of thinking has another name."""
    template = TEMPLATES["free"] + "{{ 'thinks' if thinking | default(true) else 'answers' }}"
    unchecked: Any = load_tokenizer(DEMO_FOLDER, chat_template=template)
    engine = FakeEngine(unchecked)
    with serve_fake(engine) as url:
        yield engine, url


@pytest.mark.parametrize("path", GENERATING)
def test_thinking_is_turned_off(thinking: tuple[FakeEngine, str], path: str) -> None:
    engine, url = thinking
    tokenizer = GENERATION.client(engine).first_model().tokenizer
    for body, end in ((GENERATING[path], "thinks"), (THINKING_OFF[path], "answers")):
        post(url, path, body)
        prompt = tokenizer.decode(engine.submitted.get().prompt_ids, skip_special_tokens=False)
        assert prompt.endswith(end)


def test_thinking_is_off_in_prompts_that_are_counted(thinking: tuple[FakeEngine, str]) -> None:
    body = {**CLAUDE, "thinking": {"type": "disabled"}}
    engine, url = thinking
    count = post(url, "/v1/messages/count_tokens", body)["input_tokens"]
    post(url, "/v1/messages", {**body, "max_tokens": 4})
    assert count == len(engine.submitted.get().prompt_ids)
