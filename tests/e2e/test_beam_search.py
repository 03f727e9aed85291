"""Beam search over HTTP: the fields of vLLM, what they become, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.turns.constraints import STRUCTURE_FIELDS
from mlx_parallm.api.turns.fields import SamplingFields
from mlx_parallm.types.beams import BeamParams
from tests.fake_engine import FakeEngine, serve_fake
from tests.server_process import ServerProcess

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "Once", "max_tokens": 6},
    CHAT: {"messages": HI, "max_tokens": 6},
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"temperature": 0.5}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 3}, "top_k"),
    ({"stop": ["."]}, "stop"),
    ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"early_stopping": "always"}, "early_stopping"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
]

SCHEMA: dict[str, Any] = {"type": "object"}
# STRUCTURES: what each field that asks for a structure may have.
STRUCTURES: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a*"},
    "guided_json": SCHEMA,
    "guided_regex": "a*",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "regex": "a*",
    "ebnf": 'root ::= "a"',
    "json_schema": SCHEMA,
    "grammar": 'root ::= "a"',
}
FUNCTION = {"name": "add", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": FUNCTION | {"strict": True}}
NAMED = {"type": "function", "function": {"name": "add"}}
# FORCED: fields of a chat whose calls match a grammar, and the field that asks for it.
FORCED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
    ({"functions": [FUNCTION], "function_call": {"name": "add"}}, "function_call"),
    ({"tools": [STRICT]}, "tools"),
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serve_fake(engine) as url:
        yield url


def post(url: str, path: str, **fields: Any) -> httpx2.Response:
    body = BODIES[path] | {"use_beam_search": True, "n": 3} | fields
    return httpx2.post(url + path, json=body)


@pytest.mark.parametrize("path", BODIES)
def test_fields_become_the_search(engine: FakeEngine, url: str, path: str) -> None:
    answer = post(url, path, length_penalty=-0.5, early_stopping="never", no_repeat_ngram_size=2)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    params = engine.submitted.get().params
    assert params.beams == BeamParams(width=3, length_penalty=-0.5, early_stopping="never")
    assert (params.n, params.temperature, params.no_repeat_ngram_size) == (3, 0.0, 2)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value))
def test_a_refusal_names_the_field(url: str, path: str, fields: dict[str, Any], param: str) -> None:
    answer = post(url, path, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--max-num-seqs", "8", "--max-logprobs", "1")
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.mark.parametrize("path", BODIES)
def test_answers_are_the_beams_best_first(server: ServerProcess, path: str) -> None:
    fields = {"logprobs": 1} if path == TEXT else {"logprobs": True}
    answer = post(server.url, path, n=4, **fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    scores = [score_of(choice, path) for choice in body["choices"]]
    assert scores == sorted(scores, reverse=True)
    texts = [str(choice.get("text") or choice["message"]["content"]) for choice in body["choices"]]
    assert len(set(texts)) > 1
    assert body["usage"]["completion_tokens"] > 4
    # Greedy decoding is never better than the best of the beams.
    greedy = httpx2.post(server.url + path, json=BODIES[path] | {"temperature": 0} | fields)
    assert score_of(greedy.json()["choices"][0], path) <= scores[0] + 1e-4


@pytest.mark.parametrize(("path", "schema"), [(TEXT, CompletionRequest), (CHAT, ChatRequest)])
def test_each_structure_is_refused_by_its_own_name(
    server: ServerProcess, path: str, schema: type[SamplingFields]
) -> None:
    named = {name for name in STRUCTURE_FIELDS if name in schema.model_fields}
    assert named <= STRUCTURES.keys()
    for name in sorted(named):
        assert_refused(post(server.url, path, **{name: STRUCTURES[name]}), name)


@pytest.mark.parametrize(("fields", "param"), FORCED)
def test_forced_and_strict_calls_are_refused_by_their_own_names(
    server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    assert_refused(post(server.url, CHAT, **fields), param)


def assert_refused(answer: httpx2.Response, param: str) -> None:
    """Check that a structure is refused because of beams, by the name of its field."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"] == f"This {param} cannot be combined with beam search."


def score_of(choice: dict[str, Any], path: str) -> float:
    logprobs = choice["logprobs"]
    if path == TEXT:
        values = logprobs["token_logprobs"]
    else:
        values = [entry["logprob"] for entry in logprobs["content"]]
    return sum(values) / len(values)


def test_more_beams_than_the_server_runs_are_refused(server: ServerProcess) -> None:
    answer = post(server.url, TEXT, n=9)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert "--max-num-seqs" in answer.text or "8 sequences" in answer.text
