"""`--kv-disk` with several engines: each reads what another one wrote, and counts for itself."""

from __future__ import annotations

import time
from pathlib import Path

import httpx2
import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.hub_cache import hub_copy
from tests.server_process import ServerProcess

PROMPT = "\n".join(f"line {number} of a long prompt" for number in range(60))
FLAGS = ("--data-parallel-size", "2", "--kv-disk-bytes", "1GiB")


def ask(server: ServerProcess, rank: int) -> int:
    """Return how many tokens of the prompt an engine found."""
    body = {"prompt": PROMPT, "max_tokens": 1}
    headers = {"X-data-parallel-rank": str(rank)}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=None)
    answer.raise_for_status()
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def by_engine(server: ServerProcess, name: str) -> list[float]:
    """Return the values of a metric of the disk."""
    return server.metric_by_engine(f"mlx_parallm:kv_tier_{name}")


def wait_for(server: ServerProcess, name: str, least: list[float]) -> None:
    while any(a < b for a, b in zip(by_engine(server, name), least, strict=True)):
        time.sleep(0.05)


@pytest.mark.slow
def test_an_engine_reads_what_another_one_wrote_also_after_a_restart(tmp_path: Path) -> None:
    folder, disk = hub_copy(DEMO_FOLDER, tmp_path / "hub"), tmp_path / "kv"
    for is_restarted in (False, True):
        server = ServerProcess("--model", str(folder), "--kv-disk", str(disk), *FLAGS)
        try:
            server.wait_until_ready()
            first = ask(server, 0)
            assert (first > 0) == is_restarted
            if not is_restarted:
                wait_for(server, "blocks", [1, 1])
                wait_for(server, "used_bytes", [1, 1])
            assert ask(server, 1) > 0
            hits = by_engine(server, "hit_tokens_total")
            assert hits[0] == first
            assert hits[1] > 0
            assert by_engine(server, "limit_bytes") == [1 << 30, 1 << 30]
            assert by_engine(server, "off") == [0, 0]
        finally:
            server.stop()
    assert disk.stat().st_mode & 0o777 == 0o700
