"""Chunks that are written by a prepared event have the bytes of the general encoder."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.api.http import sse
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.events import FinishReason, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, Script, prompt_event

# Lone surrogates cannot be written in UTF-8, and no detokenizer gives one.
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)
#: Texts that look like JSON, like the prepared event, or need an escape.
ODD = ['"delta":{"content":""}', '""', "\\", '\\"', "\x00\n\t", "\u2028", "\U0001f469", "}\n\n"]


def script_of(pieces: Sequence[str]) -> Script:
    """Return a script that gives each sample these texts, a token each, and an end."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        yield prompt_event(request)
        for number, text in enumerate(pieces):
            for index in range(request.params.n):
                yield TokenEvent(
                    request_id=request.request_id, index=index, token_ids=(number,), text=text
                )
        for index in range(request.params.n):
            yield TokenEvent(
                request_id=request.request_id,
                index=index,
                token_ids=(),
                text="",
                finish_reason=FinishReason.STOP,
            )

    return script


async def stream(pieces: Sequence[str], **fields: Any) -> list[bytes]:
    """Return the events of a streamed chat, as they were sent."""
    engine = FakeEngine()
    engine.script = script_of(pieces)
    transport = httpx2.ASGITransport(make_app(engine, ServerConfig()))
    body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    events = [event + b"\n\n" for event in answer.content.split(b"\n\n")[:-1]]
    assert events.pop() == sse.DONE
    return events


def value_of(event: bytes) -> dict[str, Any]:
    return json.loads(event.removeprefix(b"data: "))


def delta_of(event: bytes) -> dict[str, Any]:
    choices = value_of(event)["choices"]
    return choices[0]["delta"] if choices else {}


@given(TEXTS)
@settings(deadline=None)
def test_a_prepared_event_has_the_bytes_of_the_general_encoder(text: str) -> None:
    def payload(text: str) -> dict[str, Any]:
        return {"id": '"a":"","b":""', "d": {"a": text, "b": text}, "model": "", "n": None}

    prepared = sse.TextEvents(payload(""), ("a", "b"))
    assert prepared.event(text) == sse.data(payload(text))


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}, {"n": 2}])
async def test_chunks_are_those_of_the_general_encoder(options: dict[str, Any]) -> None:
    pieces = ["<think>", "so ", *ODD, "</think>", "a", *ODD, "end"]
    opening, *others = await stream(pieces, **options)
    events = [event for event in others if "role" not in delta_of(event)]
    contents = [event for event in events if "content" in delta_of(event)]
    thoughts = [event for event in events if "reasoning" in delta_of(event)]
    # White space at the end of a text comes with the next one.
    assert min(len(contents), len(thoughts)) >= len(ODD)
    for event in events:
        assert sse.data(value_of(event)) == event
    for event in contents + thoughts:
        expected = copy.deepcopy(value_of(opening))
        choice = value_of(event)["choices"][0]
        expected["choices"][0] |= {"index": choice["index"], "delta": choice["delta"]}
        assert value_of(event) == expected
        assert list(value_of(event)) == list(expected)
        assert list(choice) == list(expected["choices"][0])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"return_token_ids": True}, "token_ids"),
        ({"logprobs": True}, "logprobs"),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "usage"),
    ],
)
async def test_what_differs_between_chunks_is_not_prepared(
    options: dict[str, Any], key: str
) -> None:
    _, *events = await stream(["a", "b", "c"], **options)
    values: list[Any] = [
        value.get(key) if key == "usage" else value["choices"][0].get(key)
        for value in map(value_of, events)
        if value["choices"] and value["choices"][0]["delta"].get("content")
    ]
    assert len(values) == 3
    if key == "token_ids":
        assert values == [[0], [1], [2]]
    if key == "usage":
        assert [each["completion_tokens"] for each in values] == [1, 2, 3]


async def test_reasoning_that_is_not_wanted_is_left_out() -> None:
    pieces = ["<think>", "so", "</think>", "a"]
    events = await stream(pieces, include_reasoning=False)
    assert not any("reasoning" in delta_of(event) for event in events)
    assert "".join(delta_of(event).get("content", "") for event in events) == "a"


async def test_no_chunk_has_two_kinds_of_text() -> None:
    pieces = ["<think>so</think>a<think>", "b"]
    for options in ({}, {"return_token_ids": True}, {"logprobs": True}):
        deltas = [delta_of(event) for event in await stream(pieces, **options)]
        texts = [
            {key: text for key, text in delta.items() if text}
            for delta in deltas
            if "role" not in delta
        ]
        assert [text for text in texts if text] == [
            {"reasoning": "so", "reasoning_content": "so"},
            {"content": "a<think>"},
            {"content": "b"},
        ]
