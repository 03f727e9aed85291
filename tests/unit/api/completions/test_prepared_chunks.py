"""Chunks of completions that are written by a prepared event are those of the general encoder."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from mlx_parallm.api.http import sse
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine
from tests.unit.api.chat.test_prepared_chunks import ODD, script_of

#: ``RUNNING``: with a running count no chunk is prepared.
RUNNING = {"include_usage": True, "continuous_usage_stats": True}
PIECES = ["a", "", *ODD, '"text":""', "", "end"]


async def stream(**fields: Any) -> list[bytes]:
    """Return the events of a streamed completion, as they were sent."""
    engine = FakeEngine()
    engine.script = script_of(PIECES)
    transport = httpx2.ASGITransport(make_app(engine, ServerConfig()))
    body = {"model": "alias", "prompt": "hi", "stream": True}
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    events = [event + b"\n\n" for event in answer.content.split(b"\n\n")[:-1]]
    assert events.pop() == sse.DONE
    return events


def value_of(event: bytes) -> dict[str, Any]:
    return json.loads(event.removeprefix(b"data: "))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"n": 2},
        {"prompt": ["hi", "ho"], "n": 2},
        {"echo": True},
        {"return_weight_versions": True},
    ],
)
async def test_chunks_are_those_of_the_general_encoder(options: dict[str, Any]) -> None:
    events = await stream(**options)
    values = [value_of(event) for event in events]
    general = [value_of(event) for event in await stream(**options | {"stream_options": RUNNING})]
    for event, value in zip(events, values, strict=True):
        assert sse.data(value) == event
    for value, other in zip(values, [each for each in general if each["choices"]], strict=False):
        assert value["choices"] == other["choices"]
        assert list(value["choices"][0]) == list(other["choices"][0])
    has_usage = "stream_options" in options
    assert all(("usage" in value) == has_usage for value in values)
    assert len([each for each in values if each["choices"]]) == len(general) - 1


@pytest.mark.parametrize(
    ("options", "key"), [({"return_token_ids": True}, "token_ids"), ({"logprobs": 1}, "logprobs")]
)
async def test_what_differs_between_chunks_is_not_prepared(
    options: dict[str, Any], key: str
) -> None:
    choices = [value["choices"][0] for value in map(value_of, await stream(**options))]
    assert all(key in choice for choice in choices)
    if key == "token_ids":
        assert [choice["token_ids"] for choice in choices if choice["token_ids"]] == [
            [number] for number in range(len(PIECES))
        ]
