"""The memory of another process, as Linux reports it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

#: MAX_MB: most megabytes of a process without an engine that has nothing to do.
MAX_MB = 150
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process, shared pages included."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            return int(rest.split()[0]) * 1024 / 1e6
    raise AssertionError(f"process {pid} has no Rss")


def has_mlx(pid: int) -> bool:
    """True if a process has loaded MLX's library, or the BLAS that is loaded for it."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return "/mlx/" in maps or "/openblas-" in maps
