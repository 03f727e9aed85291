"""``--kv-peers``: prefixes that another server computed are read from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

NUM_TOKENS = 600
PROMPT = [10 + 7 * place % 2900 for place in range(NUM_TOKENS)]
KEY = "the-key-of-the-fleet"
FLAGS = ("--admin-api-key", KEY)


def ask(server: ServerProcess, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    """Return a greedy completion with its log-probabilities."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, **more}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=None)
    answer.raise_for_status()
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_for_blocks(server: ServerProcess) -> None:
    """Return once a server knows that a peer has blocks."""
    while server.metric("mlx_parallm:kv_tier_blocks") == 0:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def first() -> Iterator[ServerProcess]:
    server = ServerProcess("--kv-serve", *FLAGS)
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture
def second(first: ServerProcess) -> Iterator[ServerProcess]:
    server = ServerProcess("--kv-peers", first.url, *FLAGS)
    server.wait_until_ready()
    yield server
    server.stop()


def test_a_prefix_comes_from_a_peer(first: ServerProcess, second: ServerProcess) -> None:
    ask(first)
    memory = ask(first)
    wait_for_blocks(second)
    answer = ask(second)
    assert answer["choices"] == memory["choices"]
    assert cached(answer) == cached(memory) == NUM_TOKENS // 16 * 16
    assert second.metric("mlx_parallm:kv_tier_hit_tokens_total") == cached(answer)
