"""Limits leave a part of the machine's memory."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.memory_limits import bytes_within_limits, check_mappable
from mlx_parallm.worker.device.properties import allocate
from mlx_parallm.worker.generation.kv_pools import KVPools

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_nothing_limits_a_process_without_cgroups(tmp_path: Path) -> None:
    assert bytes_within_limits(tmp_path) is None


def test_a_cgroup_leaves_its_limit_less_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.current": f"{70 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.stat": f"anon 5\ninactive_file {20 * MIB}\nactive_file 1\n",
            "sys/fs/cgroup/a/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.current": f"{90 * MIB}\n",
        },
    )
    assert bytes_within_limits(tmp_path) == 50 * MIB


def test_a_tighter_cgroup_around_it_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.current": "0\n",
            "sys/fs/cgroup/a/memory.max": f"{60 * MIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{90 * MIB}\n",
        },
    )
    assert bytes_within_limits(tmp_path) == 0


def test_controllers_of_version_1_are_read(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/x"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{30 * MIB}\n",
            f"{group}/memory.usage_in_bytes": f"{12 * MIB}\n",
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * MIB}\n",
        },
    )
    assert bytes_within_limits(tmp_path) == 20 * MIB


def test_memory_that_is_not_there_is_refused_in_words() -> None:
    check_mappable(0)
    check_mappable(MIB)
    for size in (1 << 60, 1 << 70):
        with pytest.raises(OutOfMemoryError, match="cannot provide"):
            check_mappable(size)


def test_arrays_that_are_too_large_are_refused_in_words() -> None:
    array = mx.zeros((1 << 30, 1 << 30), mx.float32)
    with pytest.raises(OutOfMemoryError, match="cannot provide"):
        allocate([array])
    small = mx.zeros((4,))
    allocate([small])
    assert small.tolist() == [0.0] * 4


def test_pools_that_do_not_fit_are_refused_in_words() -> None:
    shape = LayerShape(num_kv_heads=1 << 16, key_dim=1 << 10, value_dim=1, dtype=mx.float32)
    backend = ReferenceAttention(1 << 20)
    with pytest.raises(OutOfMemoryError):
        KVPools(backend, [shape], 1 << 8)
