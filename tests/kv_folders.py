"""The folder of `--kv-disk` as servers leave it."""

from __future__ import annotations

import time
from collections import defaultdict
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


def wait_until_saved(server: ServerProcess, disk: Path) -> None:
    """Wait until all that engines have to save is in files, and each knows of all files."""
    while server.metric("mlx_parallm:kv_unsaved_blocks"):
        time.sleep(0.05)
    while not set(server.metric_by_engine("mlx_parallm:kv_tier_blocks")) <= _counts(disk):
        time.sleep(0.05)


def num_entries(path: Path) -> int:
    """Return how many blocks and states a file has."""
    return len(_contents(path))


def _counts(disk: Path) -> set[int]:
    """Return how many blocks and states are in the files of each owner."""
    contents = defaultdict[str, set[bytes]](set)
    for path in disk.glob("*/*.kv1"):
        # A file that a test has damaged is there until a server removes it.
        with suppress(BadFileError):
            contents[owner_of(path.name)] |= set(_contents(path))
    return {len(each) for each in contents.values()}


def _contents(path: Path) -> list[bytes]:
    """Return the contents of a file; raise BadFileError if it is damaged."""
    raw = path.read_bytes()
    packed = raw[: header_size(raw[:FIXED_BYTES])]
    return unpack_header(packed, owner_of(path.name), len(raw)).contents()
