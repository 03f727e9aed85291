"""The table of memory by size of Mac in docs/mac.md is what the rules give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_parallm.config import CacheConfig
from mlx_parallm.generation.kv_cache.budget import LEAST_BYTES, most_bytes
from mlx_parallm.worker.device.allocator import default_cache_bytes, most_wired_bytes
from tests.fake_mac.mac import GIB, WORKING_SETS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mac.md"
# WEIGHT_BYTES, TOKEN_BYTES: of the page's model. OTHERS: bytes of other programs.
WEIGHT_BYTES, TOKEN_BYTES, OTHERS = int(4.3 * GIB), 147_456, 5 * GIB
# SMALL_TOKEN_BYTES: KV of a token of Qwen3-0.6B, which most of the page's runs serve.
SMALL_TOKEN_BYTES = 28 * 2 * 8 * 128 * 2
ROWS = {
    int(cells[0]): [float(cell.replace(",", "")) for cell in cells[1:]]
    for line in PAGE.read_text().splitlines()
    if (cells := re.findall(r"([\d.,]+)(?= (?:GB|GiB|MiB) \||(?: \|$))", line)) and " GB |" in line
}


def kv_bytes(memory: int, working_set: int) -> int:
    """Return the KV of the page's model on a Mac of so many bytes."""
    share = int(max(0, working_set - WEIGHT_BYTES) * CacheConfig().memory_fraction)
    most = most_bytes("metal", WEIGHT_BYTES, max(0, memory - OTHERS - WEIGHT_BYTES))
    assert most is not None
    return min(share, most)


@pytest.mark.parametrize("memory_gb", WORKING_SETS)
def test_the_table_has_the_figures_of_the_rules(memory_gb: int) -> None:
    memory, working_set = memory_gb * GIB, int(WORKING_SETS[memory_gb] * GIB)
    kv = kv_bytes(memory, working_set)
    assert ROWS[memory_gb] == [
        WORKING_SETS[memory_gb],
        round(default_cache_bytes(working_set) / 2**20),
        round(most_wired_bytes(memory, working_set) / GIB, 1),
        round(kv / GIB, 1),
        kv // TOKEN_BYTES,
    ]


def test_the_requests_of_the_runs_fit_into_the_kv_of_any_mac() -> None:
    lengths = re.findall(r"--prompt-lengths (\d+) --output-lengths (\d+)", PAGE.read_text())
    assert len(lengths) == 2
    longest = max(sum(map(int, each)) for each in lengths)
    assert longest <= LEAST_BYTES // SMALL_TOKEN_BYTES
