"""Servers with `--kv-disk`: when they read and write it, and what they leave in its folder."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk.catalog import owner_of
from mlx_parallm.generation.kv_cache.disk.format import (
    FIXED_BYTES,
    BadFileError,
    header_size,
    unpack_header,
)
from tests.server_process import ServerProcess

WRITTEN = "mlx_parallm:kv_tier_written_blocks_total"


def know_weights(server: ServerProcess, ask: Callable[[int], object]) -> None:
    """Wait until a thread has hashed the weights: before that, nothing is saved or found.

    ``ask`` is called with the rank of an engine, which it asks for what no other request asks for.
    """
    for rank in range(len(server.metric_by_engine(WRITTEN))):
        while not server.metric_by_engine(WRITTEN)[rank]:
            ask(rank)


def wait_until_saved(server: ServerProcess, disk: Path) -> None:
    """Wait until all that engines have to save is in files, and each knows of all files."""
    while server.metric("mlx_parallm:kv_unsaved_blocks"):
        time.sleep(0.05)
    while not set(server.metric_by_engine("mlx_parallm:kv_tier_blocks")) <= _counts(disk):
        time.sleep(0.05)


def num_entries(path: Path) -> int:
    """Return how many blocks and states a file has."""
    return int.from_bytes(path.read_bytes()[12:16], "little")


def _counts(disk: Path) -> set[int]:
    """Return how many blocks and states are in the files of each owner."""
    contents = defaultdict[str, set[bytes]](set)
    for path in disk.glob("*/*.kv1"):
        raw, owner = path.read_bytes(), owner_of(path.name)
        # A file that a test has damaged is there until a server removes it.
        with suppress(BadFileError):
            packed = raw[: header_size(raw[:FIXED_BYTES])]
            contents[owner] |= set(unpack_header(packed, owner, len(raw)).contents())
    return {len(each) for each in contents.values()}
