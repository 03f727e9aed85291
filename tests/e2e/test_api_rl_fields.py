"""Fields of completions and chats for trainers: token ids, log-probabilities, weight versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.events import FinishReason, GenerateEvent, TokenEvent
from mlx_parallm.types.request import PROCESSED_LOGPROBS, GenerateRequest
from mlx_parallm.types.step import TokenLogprob
from tests.e2e.test_api_answers import post, stream
from tests.fake_engine import FakeEngine, Script, prompt_event, serve_fake, token_event
from tests.fakes import EOS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": [104, 105]},
}
PATHS = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serve_fake(engine, ServerConfig(max_logprobs=-1)) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    served[0].reset()
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str]) -> str:
    return served[1]


def samples(*events: tuple[str, FinishReason | None, str]) -> Script:
    """Return a script of events ``(bytes, why it ended, version)`` for each sample in turn.

    The text of a stopped sample lacks its last token, as behind a stop token or a stop string.
    """

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield prompt_event(request)
        for index in range(request.params.n):
            for text, reason, version in events:
                shown = text[:-1] if reason is FinishReason.STOP else text
                event = token_event(request, index, text.encode(), is_last=False)
                yield replace(event, text=shown, finish_reason=reason, version=version)

    return script


ENDS: dict[str, list[tuple[str, FinishReason | None, str]]] = {
    "stop": [("a", None, "1"), ("bc", None, "1"), ("d", FinishReason.STOP, "2")],
    "length": [("ab", None, "1"), ("", None, "1"), ("c", FinishReason.LENGTH, "1")],
    "abort": [("a", None, "7"), ("b", None, "8"), ("", FinishReason.ABORT, "9")],
    "nothing": [("", FinishReason.ABORT, "9")],
}


def names_of(choice: dict[str, Any], path: str) -> list[str]:
    if path == TEXT:
        return choice["logprobs"]["tokens"] if choice.get("logprobs") else []
    return [token["token"] for token in (choice.get("logprobs") or {"content": []})["content"]]


@PATHS
@pytest.mark.parametrize("end", ENDS)
def test_every_token_has_its_id_logprob_and_version(
    engine: FakeEngine, url: str, path: str, end: str
) -> None:
    engine.script = samples(*ENDS[end])
    ids = [ord(char) for text, _, _ in ENDS[end] for char in text]
    versions = [version for text, _, version in ENDS[end] for _ in text]
    fields = {
        **PROMPTS[path],
        "n": 2,
        "return_token_ids": True,
        "return_weight_versions": True,
        "return_tokens_as_token_ids": True,
        "logprobs": True,
    }
    chunks = stream(url, path, **fields)
    whole = post(url, path, **fields)["choices"]
    for choice in whole:
        index = choice["index"]
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        streamed = [i for part in parts for i in part.get("token_ids", ())]
        assert choice["token_ids"] == streamed == ids
        wanted = [f"token_id:{i}" for i in ids]
        assert names_of(choice, path) == wanted
        assert [name for part in parts for name in names_of(part, path)] == wanted
        streamed_spans = [part["weight_versions"] for part in parts if "weight_versions" in part]
        assert streamed_spans == [choice["weight_versions"]]
        assert "weight_versions" in parts[-1]
        spans = choice["weight_versions"]
        assert [s["version"] for s in spans for _ in range(s["start"], s["end"])] == versions
        reason = str(ENDS[end][-1][1])
        assert (choice["finish_reason"], parts[-1]["finish_reason"]) == (reason, reason)


@PATHS
def test_they_come_only_when_asked_for(engine: FakeEngine, url: str, path: str) -> None:
    engine.script = samples(*ENDS["length"])
    answer = post(url, path, **PROMPTS[path])
    (choice,) = answer["choices"]
    assert "weight_versions" not in choice
    # vLLM's fields are null if a request does not set their flags.
    assert (choice["token_ids"], (answer | choice)["prompt_token_ids"]) == (None, None)
    assert (answer | choice)["prompt_logprobs"] is None
    for chunk in stream(url, path, **PROMPTS[path]):
        assert {"token_ids", "weight_versions"}.isdisjoint(chunk["choices"][0])


def test_prompt_ids_are_in_each_choice_of_a_completion(engine: FakeEngine, url: str) -> None:
    engine.script = samples(*ENDS["length"])
    prompts = [[1, 2, EOS], [3], [255, 254]]
    answer = post(url, TEXT, prompt=prompts, n=3, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(9))
    prompts_of_choices = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts_of_choices == [prompt for prompt in prompts for _ in range(3)]
    requests = [engine.submitted.get() for _ in prompts]
    assert sorted(request.prompt_ids for request in requests) == sorted(map(tuple, prompts))


def test_prompt_ids_of_a_chat_are_at_the_top(engine: FakeEngine, url: str) -> None:
    engine.script = samples(*ENDS["length"])
    answer = post(url, CHAT, **PROMPTS[CHAT], return_token_ids=True)
    ids = engine.submitted.get().prompt_ids
    assert answer["prompt_token_ids"] == list(ids)
    first = stream(url, CHAT, **PROMPTS[CHAT], return_token_ids=True)[0]
    assert first["prompt_token_ids"] == list(ids)


@pytest.mark.parametrize(
    ("fields", "count", "named"),
    [
        ({"logprobs": True}, 1, ()),
        ({"logprobs": False}, None, ()),
        ({"logprobs": None}, None, ()),
        ({"logprobs": 0}, 0, ()),
        ({"logprobs": 5}, 5, ()),
        ({"logprobs": -1}, -1, ()),
        ({"logprob_token_ids": [7, 3]}, 0, (7, 3)),
        ({"logprobs": 2, "logprob_token_ids": [7]}, 2, (7,)),
    ],
)
def test_logprobs_of_a_completion_take_every_form(
    engine: FakeEngine, url: str, fields: dict[str, Any], count: int | None, named: tuple[int, ...]
) -> None:
    engine.script = samples(*ENDS["length"])
    (choice,) = post(url, TEXT, **PROMPTS[TEXT], **fields)["choices"]
    params = engine.submitted.get().params
    assert (params.logprobs, params.logprob_token_ids) == (count, named)
    assert (choice["logprobs"] is None) == (count is None)


@pytest.mark.parametrize(
    ("fields", "count", "named"),
    [
        ({"logprobs": True}, 0, ()),
        ({"logprobs": True, "top_logprobs": -1}, -1, ()),
        ({"logprob_token_ids": [7, 3]}, 0, (7, 3)),
    ],
)
def test_logprobs_of_a_chat_take_every_form(
    engine: FakeEngine, url: str, fields: dict[str, Any], count: int, named: tuple[int, ...]
) -> None:
    engine.script = samples(*ENDS["length"])
    (choice,) = post(url, CHAT, **PROMPTS[CHAT], **fields)["choices"]
    params = engine.submitted.get().params
    assert (params.logprobs, params.logprob_token_ids) == (count, named)
    assert len(choice["logprobs"]["content"]) == 3


@PATHS
def test_alternatives_that_were_asked_for_by_id_are_told(
    engine: FakeEngine, url: str, path: str
) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield prompt_event(request)
        entry = TokenLogprob(97, -0.5, ((120, -7.0), (121, -20000.0)))
        yield TokenEvent(
            request_id=request.request_id, index=0, token_ids=(97,), text="a", logprobs=(entry,),
            finish_reason=FinishReason.LENGTH,
        )  # fmt: skip

    engine.script = script
    (choice,) = post(url, path, **PROMPTS[path], logprob_token_ids=[120, 121])["choices"]
    if path == TEXT:
        assert choice["logprobs"]["token_logprobs"] == [-0.5]
        assert choice["logprobs"]["top_logprobs"] == [{"x": -7.0, "y": -20000.0, "a": -0.5}]
    else:
        (entry,) = choice["logprobs"]["content"]
        assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
            ("x", -7.0), ("y", -20000.0)
        ]  # fmt: skip


@PATHS
@pytest.mark.parametrize("count", [0, 1, -1])
def test_prompt_logprobs_name_tokens_by_id_and_text(
    engine: FakeEngine, url: str, path: str, count: int
) -> None:
    engine.script = samples(*ENDS["length"])
    fields = {"prompt_logprobs": count, "return_tokens_as_token_ids": True}
    answer = post(url, path, **PROMPTS[path], **fields)
    request = engine.submitted.get()
    assert request.params.prompt_logprobs == count
    holder = answer if path == CHAT else answer["choices"][0]
    first, *others = holder["prompt_logprobs"]
    assert first is None
    assert len(others) == len(request.prompt_ids) - 1
    for token_id, entry in zip(request.prompt_ids[1:], others, strict=True):
        assert list(entry) == [str(token_id)]
        score = entry[str(token_id)]
        assert (score["logprob"], score["decoded_token"]) == (-0.25, chr(token_id))
        assert "rank" in score


@PATHS
def test_the_mode_can_be_named(engine: FakeEngine, url: str, path: str) -> None:
    engine.script = samples(*ENDS["length"])
    post(url, path, **PROMPTS[path], logprobs_mode=PROCESSED_LOGPROBS)
    post(url, path, **PROMPTS[path])
    modes = [engine.submitted.get().params.logprobs_mode for _ in range(2)]
    assert modes == [PROCESSED_LOGPROBS, None]


@PATHS
def test_what_other_servers_read_is_accepted_and_what_nobody_knows_is_named(
    engine: FakeEngine, url: str, path: str
) -> None:
    engine.script = samples(*ENDS["length"])
    body = PROMPTS[path] | {
        "model": "alias",
        "session_id": "s",
        "nvext": {"extra_fields": ["engine_data"]},
        "vllm_xargs": {"a": 1},
        "cache_salt": "v7",
        "priority": 3,
    }
    headers = {
        "X-Session-ID": "a",
        "X-SMG-Routing-Key": "b",
        "X-data-parallel-rank": "0",
    }
    known = httpx2.post(url + path, json=body, headers=headers)
    assert known.status_code == 200, known.text
    assert "x-ignored-fields" not in known.headers
    request = engine.submitted.get()
    assert (request.cache_salt, request.priority) == ("v7", 3)
    for streams in (False, True):
        with_unknown = body | {"some_field": 1, "é": 2, "stream": streams}
        unknown = httpx2.post(url + path, json=with_unknown)
        assert unknown.status_code == 200
        assert unknown.headers["x-ignored-fields"] == "some_field"
