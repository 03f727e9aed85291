"""Prompts that cannot fit are refused in every dialect, in its form, with the field's name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.chat import routes as chat_routes
from mlx_parallm.api.chat.request import chat_turn
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.tokenize.routes import _json
from mlx_parallm.api.turns import prepare
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.tokenizer.loading import load_tokenizer
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, serve_fake
from tests.fakes import make_info

LONG = "word " * 200_000
MODEL = "org/fake"
CHAT = [{"role": "user", "content": LONG}]
QUESTION = {"type": "predicate", "instructions": "It is late."}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tokenizer = load_tokenizer(DEMO_FOLDER).limited(make_info().max_model_len)
    with serve_fake(FakeEngine(tokenizer)) as served:  # type: ignore[arg-type]
        yield served


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/v1/completions/render", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/chat/completions/render", {"messages": CHAT}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": LONG, "truncation": "auto"}, "input"),
        ("/v1/decisions", {"input": LONG, "questions": [QUESTION]}, "input"),
        ("/generate", {"text": LONG}, "text"),
        ("/v1/score", {"query": LONG, "items": ["a"], "label_token_ids": [1]}, "items"),
        ("/v1/rl/rollout", {"prompts": ["a", LONG]}, "prompts"),
        ("/v1/rl/rollout", {"prompts": [CHAT]}, "prompts"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused(
    url: str, path: str, body: dict[str, Any], param: str
) -> None:
    response = httpx2.post(url + path, json={"model": MODEL, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert "maximum context length is 256 tokens" in error["message"]
    assert "your prompt has at least" in error["message"]


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE] * 16_385}, "at most 16384 items"),
        ("/v1/messages", {"messages": [MESSAGE] * 16_385, "max_tokens": 1}, "at most 16384 items"),
        ("/v1/responses", {"input": [MESSAGE] * 16_385}, "at most 16384 items"),
        ("/apply-template", {"messages": [MESSAGE] * 16_385}, "at most 16384 items"),
        ("/v1/completions", {"prompt": ["a"] * 65_537}, "at most 65536 items"),
        ("/v1/completions", {"prompt": [[1]] * 65_537}, "at most 65536 items"),
        ("/generate", {"text": ["a"] * 65_537}, "at most 65536 items"),
        ("/generate", {"text": "a", "sampling_params": [{}] * 8193}, "at most 8192 items"),
        ("/v1/completions", {"prompt": "a", "stop": "a" * 65_537}, "at most 65536 characters"),
        (
            "/v1/messages",
            {"messages": [MESSAGE], "max_tokens": 1, "stop_sequences": ["ab" * 20_000] * 2},
            "at most 65536 characters",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {str(number): 1 for number in range(16_385)}},
            "at most 16384 items",
        ),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [1] * 262_145}, "at most 262144"),
        (
            "/v1/chat/completions",
            {"messages": [MESSAGE], "chat_template_kwargs": dict.fromkeys(map(str, range(1025)))},
            "at most 1024 items",
        ),
    ],
)
def test_lists_of_more_than_could_be_served_are_refused(
    url: str, path: str, body: dict[str, Any], expected: str
) -> None:
    response = httpx2.post(url + path, json={"model": MODEL, **body})
    assert response.status_code == 400
    assert expected in response.json()["error"]["message"]


def test_arguments_of_a_call_are_bounded_as_a_body_is(url: str) -> None:
    function = {"name": "f", "arguments": f"[{'[],' * 262_144}[]]"}
    call = {"id": "a", "type": "function", "function": function}
    messages = [MESSAGE, {"role": "assistant", "tool_calls": [call]}]
    response = httpx2.post(f"{url}/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert "too many values" in response.json()["error"]["message"]


@pytest.mark.parametrize(("num_messages", "is_apart"), [(2, False), (4000, True)])
async def test_a_long_body_is_worked_on_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, num_messages: int, is_apart: bool
) -> None:
    threads: list[int] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*args, **kwargs)

        return note

    monkeypatch.setattr(chat_routes, "chat_turn", noting(chat_turn))
    monkeypatch.setattr(prepare, "template_messages", noting(template_messages))
    transport = httpx2.ASGITransport(make_app(FakeEngine(), ServerConfig()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        body = {"model": "alias", "messages": [MESSAGE] * num_messages, "max_tokens": 1}
        await client.post("/v1/chat/completions", json=body)
    assert [thread != threading.get_ident() for thread in threads] == [is_apart] * 2


def test_anthropic_clients_read_the_words_that_they_know(url: str) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 8}
    response = httpx2.post(f"{url}/v1/messages", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: at least 289 tokens > ")


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/tokenize", {"prompt": LONG}, "count"),
        ("/v1/messages/count_tokens", {"messages": CHAT}, "input_tokens"),
        ("/v1/responses/input_tokens", {"input": LONG}, "input_tokens"),
    ],
)
def test_what_is_only_counted_may_be_longer(
    url: str, path: str, body: dict[str, Any], count: str
) -> None:
    response = httpx2.post(url + path, json={"model": MODEL, **body})
    assert response.status_code == 200
    assert response.json()[count] >= 200_000


def test_one_wrong_entry_of_a_list_is_told_and_not_all() -> None:
    """Bound the reported errors: reporting a million would block the event loop for seconds."""
    with pytest.raises(ValueError, match="prompt") as refusal:
        CompletionRequest.model_validate({"prompt": [None] * 1000})
    assert len(refusal.value.errors()) < 20  # type: ignore[attr-defined]


@given(
    answer=st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_an_answer_of_tokens_is_written_in_parts(answer: Any) -> None:
    assert json.loads(_json(answer)) == answer


def test_long_lists_of_tokens_are_written_whole() -> None:
    answer = {"count": 3000, "tokens": list(range(3000)), "token_strs": ["\u4f60"] * 3000}
    assert json.loads(_json(answer)) == answer
    assert json.loads(_json([[{"id": 1}] * 3000, []])) == [[{"id": 1}] * 3000, []]
