"""Speculative decoding as an operator and a client meet it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

TEXT = "Repeat this text: the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    server = ServerProcess("--max-model-len", "512", "--speculative-config", config)
    server.wait_until_ready()
    yield server
    server.stop()


def ask(server: ServerProcess, **options: Any) -> httpx2.Response:
    body = {
        "model": "mlx-parallm-demo",
        "messages": [{"role": "user", "content": TEXT}],
        "temperature": 0,
        "max_tokens": 50,
        "ignore_eos": True,
        **options,
    }
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body)


# It reads lines of metrics without the label of an engine.
@pytest.mark.one_engine
def test_a_request_may_refuse_it_and_gets_the_same_text(server: ServerProcess) -> None:
    plain = ask(server, speculative=False)
    assert server.metric("vllm:spec_decode_num_drafts_total") == 0
    copied = ask(server)
    assert copied.json()["choices"] == plain.json()["choices"]
    assert copied.json()["usage"]["completion_tokens"] == 50
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    proposed = server.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < drafts <= proposed <= 3 * drafts
    assert 0 < accepted <= proposed
    metrics = httpx2.get(f"{server.url}/metrics").text
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [line for line in metrics.splitlines() if line.startswith(name)]
    assert [f'position="{i}"' in line for i, line in enumerate(by_position)] == [True] * 3
    assert sum(float(line.rpartition(" ")[2]) for line in by_position) == accepted


def test_a_wrong_switch_is_named(server: ServerProcess) -> None:
    answer = ask(server, speculative="no")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculative"
