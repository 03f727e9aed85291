"""`--kv-disk` with an encoder-decoder: sources that a killed server has written are read."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.make_seq2seq import make_seq2seq
from tests.server_process import ServerProcess

#: ``SOURCE``: of 410 tokens, with the one that ends it; the last block is full in part.
SOURCE = " ".join(f"t{5 + (7 * place) % 300}" for place in range(409))
NUM_TOKENS, NUM_BLOCKS = 410, 26
NUM_CLIENTS = 8


def start(folder: Path, disk: Path) -> ServerProcess:
    return ServerProcess(
        *("--model", str(folder), "--max-source-len", "500", "--max-model-len", "256"),
        *("--kv-cache-memory-bytes", str(32 << 20), "--kv-disk", str(disk)),
        *("--kv-disk-bytes", "1GiB", "--data-parallel-size", "2"),
    )


def ask(server: ServerProcess, **headers: str) -> dict[str, Any]:
    body = {"prompt": SOURCE, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    answer = httpx2.post(url, json=body, headers=headers, timeout=None)
    answer.raise_for_status()
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def cached(answer: dict[str, Any]) -> int:
    assert answer["usage"]["prompt_tokens"] == NUM_TOKENS + 1
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_a_source_is_encoded_once_by_two_engines_and_not_after_a_kill(tmp_path: Path) -> None:
    folder = make_seq2seq(tmp_path / "t5", "tiny-t5")
    server = start(folder, tmp_path / "kv")
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            answers = list(clients.map(lambda _: ask(server), range(NUM_CLIENTS)))
        (text,) = {text_of(answer) for answer in answers}
        assert server.metric("vllm:source_encoder_runs_total") == 1
        assert server.metric("vllm:source_hits_total") == NUM_CLIENTS - 1
        while server.metric("mlx_parallm:kv_tier_written_blocks_total") < NUM_BLOCKS:
            time.sleep(0.05)
        server.stop(signal.SIGKILL)
    finally:
        server.stop()
    server = start(folder, tmp_path / "kv")
    try:
        server.wait_until_ready()
        for rank in ("0", "1"):
            answer = ask(server, **{"X-data-parallel-rank": rank})
            assert text_of(answer) == text
            assert cached(answer) == NUM_TOKENS
        assert server.metric("vllm:source_encoder_runs_total") == 0
        assert server.metric("mlx_parallm:kv_tier_hit_tokens_total") == 2 * NUM_TOKENS
    finally:
        server.stop()
