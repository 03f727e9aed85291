"""top_n_sigma on every route that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

HI = [{"role": "user", "content": "~x~ What? qqq"}]
# Only the likeliest token has a logit this close to the largest.
LIKELIEST = {"top_n_sigma": 1e-6, "seed": 3}
GREEDY = {"temperature": 0.0}
MAX_TOKENS = 16
# Each route with a body, the object that takes sampling parameters, and the limit's name.
ROUTES: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/chat/completions", {"messages": HI}, None, "max_tokens"),
    ("/v1/completions", {"prompt": "17 + 25 ="}, None, "max_tokens"),
    ("/v1/responses", {"input": HI}, None, "max_output_tokens"),
    ("/v1/messages", {"messages": HI}, None, "max_tokens"),
    ("/v1/rl/rollout", {"prompts": ["17 + 25 ="]}, None, "max_tokens"),
    ("/inference/v1/generate", {"token_ids": [5, 6]}, "sampling_params", "max_tokens"),
    ("/generate", {"text": "17 + 25 ="}, "sampling_params", "max_new_tokens"),
]
# The names under which answers have text or tokens of samples.
TEXTS = frozenset(
    ["text", "content", "reasoning_content", "reasoning", "thinking", "token_ids", "output_ids"]
)


def with_params(
    body: dict[str, Any], place: str | None, limit: str, params: dict[str, Any]
) -> dict[str, Any]:
    params = {limit: MAX_TOKENS, "ignore_eos": True} | params
    return body | (params if place is None else {place: params})


def texts(answer: Any) -> Iterator[Any]:
    """Yield the texts and token ids of an answer: its other parts differ between equal answers."""
    if isinstance(answer, list):
        for part in answer:
            yield from texts(part)
    if isinstance(answer, dict):
        for name, value in answer.items():
            is_ids = isinstance(value, list) and all(isinstance(part, int) for part in value)
            if name in TEXTS and (isinstance(value, str) or is_ids):
                yield value
            yield from texts(value)


@pytest.mark.parametrize(("path", "body", "place", "limit"), ROUTES)
def test_the_likeliest_tokens_are_chosen(
    live_server: ServerProcess, path: str, body: dict[str, Any], place: str | None, limit: str
) -> None:
    # Messages allow no higher temperature than 1.
    temperature = 1.0 if path == "/v1/messages" else 2.0
    likeliest_params = LIKELIEST | {"temperature": temperature}
    answers = [
        httpx2.post(
            live_server.url + path, json=with_params(body, place, limit, params), timeout=None
        )
        for params in (likeliest_params, GREEDY, likeliest_params | {"top_n_sigma": 0})
    ]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    likeliest, greedy, free = (list(texts(answer.json())) for answer in answers)
    assert any(likeliest)
    assert likeliest == greedy
    assert likeliest != free


@pytest.mark.parametrize("value", ["-0.5", "1e999", "NaN", '"1"', "true", "[1]"])
@pytest.mark.parametrize(("path", "body", "place", "limit"), ROUTES)
def test_a_bad_value_is_refused_by_the_name_of_its_field(
    live_server: ServerProcess,
    path: str,
    body: dict[str, Any],
    place: str | None,
    limit: str,
    value: str,
) -> None:
    text = json.dumps(with_params(body, place, limit, {"top_n_sigma": "VALUE"}))
    response = httpx2.post(
        live_server.url + path,
        content=text.replace('"VALUE"', value),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "top_n_sigma" in f"{error.get('param')} {error['message']}"
