"""Ollama's streams over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types import errors
from tests.fake_engine import FakeEngine, fail, hang, serve_fake, write

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "e\\n"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine, ServerConfig(sse_keep_alive_s=0.01)) as url:
        yield engine, url


def stream(url: str, path: str = "chat", **body: Any) -> list[dict[str, Any]]:
    answer = httpx2.post(f"{url}/api/{path}", json={"messages": HI} | body)
    assert answer.headers["content-type"] == "application/x-ndjson", answer.text
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_each_token_is_a_line(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    engine.script = write("hey")
    *pieces, last = stream(url, model="alias:latest")
    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": letter} for letter in "hey"
    ]
    assert {piece["model"] for piece in pieces} == {"alias:latest"}
    assert (last["message"], last["done"], last["eval_count"]) == (
        {"role": "assistant", "content": ""},
        True,
        4,
    )


def test_a_call_is_one_line_with_an_object(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    engine.script = write(f"so {CALL}")
    pieces = stream(url, tools=TOOLS)
    (calls,) = [each["message"]["tool_calls"] for each in pieces if "tool_calls" in each["message"]]
    assert calls[0]["function"] == {"index": 0, "name": "f", "arguments": {"a": "e\n"}}
    assert pieces[-1]["done_reason"] == "stop"


def test_parameters_reach_the_engine(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    engine.reset()
    engine.script = write("hey")
    options = {"num_predict": 7, "top_p": 0, "min_p": 0.1, "stop": "x", "repeat_penalty": 1.2}
    stream(url, options=options | {"seed": -1, "presence_penalty": 0.5, "num_ctx": 4096})
    params = engine.submitted.get().params
    assert (params.max_tokens, params.top_k, params.top_p, params.min_p) == (7, 1, 1, 0.1)
    assert (params.stop, params.repetition_penalty, params.seed) == (("x",), 1.2, None)
    assert (params.temperature, params.presence_penalty) == (0.8, 0.5)
    stream(url, options={"num_predict": -1, "seed": 5})
    params = engine.submitted.get().params
    assert (params.max_tokens, params.top_k, params.top_p, params.seed) == (None, 40, 0.9, 5)


def test_a_failure_is_the_last_line(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    engine.script = fail(errors.StepError("broken"), after="he")
    *pieces, last = stream(url, "generate", prompt="hi")
    assert "".join(piece["response"] for piece in pieces) == "he"
    assert last == {"error": "broken"}
    engine.script = fail(errors.StepError("broken"))
    answer = httpx2.post(f"{url}/api/chat", json={"messages": HI})
    assert (answer.status_code, answer.json()) == (500, {"error": "broken"})


def test_silence_is_broken_by_spaces(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    engine.script = hang(after="h")
    with httpx2.stream("POST", f"{url}/api/chat", json={"messages": HI}) as answer:
        text = ""
        for piece in answer.iter_text():
            text += piece
            if len(text.partition("\n")[2]) > 1:
                break
    line, end, silence = text.partition("\n")
    assert json.loads(line)["message"]["content"] == "h"
    # A reader of lines sees these before the next value.
    assert (end, set(silence)) == ("\n", {" "})
