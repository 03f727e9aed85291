"""Prompts that cannot fit are refused in every dialect, in its form, with the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.tokenize.routes import _json
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.tokenizer.tokenizer import load_tokenizer
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
    """A million of them are told in seconds, during which nothing else runs."""
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
