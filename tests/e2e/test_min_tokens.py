"""More tokens at least than the context leaves, on every route that generates."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

HI = [{"role": "user", "content": "hi"}]
ROOMLESS = 2048
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HI, "min_tokens": ROOMLESS}, "min_tokens"),
    (
        "/v1/completions",
        {"prompt": "hi", "min_tokens": ROOMLESS, "max_tokens": ROOMLESS - 1},
        "min_tokens",
    ),
    ("/v1/responses", {"input": "hi", "min_tokens": ROOMLESS}, "min_tokens"),
    ("/v1/rl/rollout", {"prompts": ["hi"], "min_tokens": ROOMLESS}, "min_tokens"),
    (
        "/inference/v1/generate",
        {"token_ids": [5], "sampling_params": {"min_tokens": ROOMLESS}},
        "sampling_params.min_tokens",
    ),
    (
        "/generate",
        {
            "text": "hi",
            "sampling_params": {"min_new_tokens": ROOMLESS, "max_new_tokens": None},
        },
        "sampling_params.min_new_tokens",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), BODIES)
def test_it_is_refused(
    live_server: ServerProcess, path: str, body: dict[str, Any], field: str
) -> None:
    response = httpx2.post(live_server.url + path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


def test_messages_cut_their_max_tokens_and_say_so(live_server: ServerProcess) -> None:
    body = {"messages": HI, "min_tokens": ROOMLESS, "max_tokens": ROOMLESS}
    response = httpx2.post(f"{live_server.url}/v1/messages", json=body)
    assert response.status_code == 400, response.text
    assert "min_tokens" in response.json()["error"]["message"]
