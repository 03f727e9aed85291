"""Two keys that send the same texts learn nothing of each other, in one process and in two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODELS = ("mlx-parallm-demo", "demo:mlm")
# The text is longer than a block, because only whole blocks are cached.
PROMPT = "one two three four five six seven eight nine ten " * 4
MASKED = "The capital of France is [MASK]."


@pytest.fixture(scope="module", params=[[], ["--engine-process"]], ids=["thread", "process"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    keys = ["--api-key", "one", "--api-key", "two", "--admin-api-key", "admin"]
    process = ServerProcess("--model", *MODELS, *keys, *request.param)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def call(server: ServerProcess, key: str, method: str, path: str, **more: Any) -> httpx2.Response:
    headers = {"x-api-key": key}
    response = httpx2.request(method, server.url + path, headers=headers, **more)
    assert response.status_code == 200, response.text
    return response


def cached(server: ServerProcess, key: str, prompt: str) -> bool:
    body = {"model": MODELS[0], "prompt": prompt, "max_tokens": 1}
    answer = call(server, key, "POST", "/v1/completions", json=body).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def hit(server: ServerProcess, key: str) -> bool:
    body = {"model": MODELS[1], "texts": MASKED}
    return call(server, key, "POST", "/v1/mlm", json=body).json()["data"][0]["cache_hit"]


def test_a_key_finds_the_prompts_of_that_key_alone(server: ServerProcess) -> None:
    keys = ("one", "two", "admin")
    assert [cached(server, key, PROMPT) for key in keys] == [False] * 3
    assert [cached(server, key, PROMPT) for key in keys] == [True] * 3


def test_a_key_finds_the_results_of_that_key_alone(server: ServerProcess) -> None:
    assert [hit(server, key) for key in ("one", "two", "admin")] == [False] * 3
    assert [hit(server, key) for key in ("one", "two", "admin")] == [True] * 3


def test_a_batch_computes_for_the_key_that_made_it(server: ServerProcess) -> None:
    prompt = "of a batch " + PROMPT
    assert not cached(server, "one", prompt)
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODELS[0], "prompt": prompt, "max_tokens": 1},
    }
    num_cached = {key: of_batch(server, key, line) for key in ("one", "two")}
    assert num_cached["one"] > 0
    assert num_cached["two"] == 0


def of_batch(server: ServerProcess, key: str, line: dict[str, Any]) -> int:
    """Return the number of cached tokens in the answer to a batch of one line."""
    file = call(
        server,
        key,
        "POST",
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("a.jsonl", json.dumps(line).encode())},
    ).json()
    body = {
        "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"
    }  # fmt: skip
    batch = call(server, key, "POST", "/v1/batches", json=body).json()
    while batch["status"] not in ("completed", "failed", "expired"):
        batch = call(server, key, "GET", f"/v1/batches/{batch['id']}").json()
    content = call(server, key, "GET", f"/v1/files/{batch['output_file_id']}/content").json()
    return content["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
