"""The servers of ``benchmarks.kv_disk``, and what they count."""

from __future__ import annotations

import contextlib
import random
import re
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.servers import Server, mlx_parallm_server

BLOCK_SIZE = 16
# IDS: token ids of random prompts, which are no special tokens of the embedded model.
IDS = range(10, 3000)


@contextlib.contextmanager
def disk_server(folder: Path | None, options: Sequence[str] = ()) -> Iterator[Server]:
    """Run a server of the embedded model, with a store in a folder or without one."""
    store = [] if folder is None else ["--kv-disk", str(folder)]
    with mlx_parallm_server(None, [*store, *options]) as server:
        yield server


def random_ids(count: int, seed: int) -> list[int]:
    """Return random token ids."""
    draw = random.Random(f"kv {seed}")
    return [draw.choice(IDS) for _ in range(count)]


def metric(server: Server, name: str) -> float:
    """Return the sum of a metric of ``/metrics`` over its labels."""
    with urllib.request.urlopen(f"{server.base_url}/metrics") as answer:
        text = answer.read().decode()
    values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))
