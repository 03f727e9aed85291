"""Prompts and messages that have no text, or something else, over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.fake_engine import FakeEngine, serve_fake, write
from tests.fakes import ByteTokenizer

BOS = 2


class BeginningTokenizer(ByteTokenizer):
    bos_id = BOS


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine(BeginningTokenizer())
    engine.script = write("hello")
    return engine


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with serve_fake(engine) as url:
        yield url


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}])
def test_an_absent_prompt_is_the_beginning_of_a_document(
    engine: FakeEngine, url: str, prompt: dict[str, Any]
) -> None:
    answer = httpx2.post(f"{url}/v1/completions", json={"model": "alias"} | prompt).json()
    assert answer["choices"][0]["text"] == "hello"
    assert engine.submitted.get().prompt_ids == (BOS,)


def test_an_absent_prompt_is_refused_where_no_token_begins_a_text() -> None:
    with serve_fake(FakeEngine()) as url:
        response = httpx2.post(f"{url}/v1/completions", json={"model": "alias"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("prompt", ["", [], [""]])
def test_an_empty_prompt_is_refused(url: str, prompt: Any) -> None:
    response = httpx2.post(f"{url}/v1/completions", json={"model": "alias", "prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_tool_that_says_nothing_has_null_as_its_content(engine: FakeEngine, url: str) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]
    body = {"model": "alias", "messages": messages}
    assert httpx2.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    assert bytes(engine.submitted.get().prompt_ids).endswith(b"tool: \n")
    body["messages"] = [{"role": "user", "content": None}]
    assert httpx2.post(f"{url}/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("kind", ["input_audio", "audio_url", "video_url", "file"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_refusal_of_a_part_names_its_type(url: str, path: str, kind: str) -> None:
    part = {"type": kind, kind: {"data": "AAAA", "format": "wav"}}
    messages = [{"role": "user", "content": [part]}]
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "alias", "max_tokens": 5, field: messages}
    response = httpx2.post(f"{url}{path}", json=body)
    assert response.status_code == 400
    assert kind in response.json()["error"]["message"]
