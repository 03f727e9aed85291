"""`--kv-disk` with an encoder-decoder: sources that a killed server has written are read."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.make_seq2seq import make_seq2seq
from tests.hub_cache import hub_copy
from tests.kv_folders import wait_until_saved
from tests.server_process import ServerProcess

#: ``SOURCE``: of 410 tokens, with the one that ends it; the last block is full in part.
SOURCE = " ".join(f"t{5 + (7 * place) % 300}" for place in range(409))
NUM_TOKENS = 410
NUM_CLIENTS = 8


@contextmanager
def serving(folder: Path, disk: Path) -> Iterator[ServerProcess]:
    """Start two engines, and kill them."""
    server = ServerProcess(
        *("--model", str(folder), "--max-source-len", "500", "--max-model-len", "256"),
        *("--kv-cache-memory-bytes", str(32 << 20), "--kv-disk", str(disk)),
        *("--kv-disk-bytes", "1GiB", "--data-parallel-size", "2"),
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop(signal.SIGKILL)


def ask(server: ServerProcess, rank: int | None = None) -> dict[str, Any]:
    """Ask an engine, or any, for a greedy completion of the source."""
    body = {"prompt": SOURCE, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
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
    folder = hub_copy(make_seq2seq(tmp_path / "t5", "tiny-t5"), tmp_path / "hub")
    disk = tmp_path / "kv"
    with serving(folder, disk) as server:
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            answers = list(clients.map(lambda _: ask(server), range(NUM_CLIENTS)))
        (text,) = {text_of(answer) for answer in answers}
        assert server.metric("vllm:source_encoder_runs_total") == 1
        assert server.metric("vllm:source_hits_total") == NUM_CLIENTS - 1
        wait_until_saved(server, disk)
    with serving(folder, disk) as server:
        for rank in (0, 1):
            answer = ask(server, rank)
            assert text_of(answer) == text
            assert cached(answer) == NUM_TOKENS
        assert server.metric("vllm:source_encoder_runs_total") == 0
        assert server.metric("mlx_parallm:kv_tier_hit_tokens_total") == 2 * NUM_TOKENS
