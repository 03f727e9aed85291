"""Rendered requests are those that the model would run."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    response = httpx2.post(server.url + path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_rendered_chat_has_the_prompt_that_a_chat_has(live_server: ServerProcess) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3, "seed": 5}
    rendered = post(live_server, "/v1/chat/completions/render", **body, request_id="mine")
    chat = post(live_server, "/v1/chat/completions", **body, return_token_ids=True)
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert rendered["request_id"] == "chatcmpl-mine"
    assert rendered["sampling_params"]["max_tokens"] == 3
    assert rendered["sampling_params"]["seed"] == 5
    applied = post(live_server, "/apply-template", messages=MESSAGES)
    assert applied == {"prompt": rendered["prompt"]}
    tokens = post(live_server, "/tokenize", prompt=applied["prompt"], add_special_tokens=False)
    assert tokens["tokens"] == rendered["token_ids"]


def test_a_rendered_completion_has_every_prompt(live_server: ServerProcess) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": ["a b", "c"], "max_tokens": 1}
    rendered = post(live_server, "/v1/completions/render", **body)
    done = post(live_server, "/v1/completions", **body, return_token_ids=True)
    assert [request["prompt"] for request in rendered] == ["a b", "c"]
    expected = [choice["prompt_token_ids"] for choice in done["choices"]]
    assert [request["token_ids"] for request in rendered] == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions/render", {"model": "other", "messages": MESSAGES}, "model"),
        ("/v1/chat/completions/render", {"model": MODEL, "messages": []}, "messages"),
        ("/v1/completions/render", {"model": MODEL, "prompt": ""}, "prompt"),
        ("/v1/completions/render", {"model": MODEL, "prompt": "a", "suffix": "b"}, "suffix"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ("/apply-template", {"model": "other", "messages": MESSAGES}, "model"),
    ],
)
def test_a_bad_render_names_its_field(
    live_server: ServerProcess, path: str, body: dict[str, Any], param: str
) -> None:
    response = httpx2.post(live_server.url + path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
