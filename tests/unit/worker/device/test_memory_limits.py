"""Limits leave a part of the machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.memory_limits import (
    available_in,
    bytes_within_limits,
    check_mappable,
    host_free_bytes,
)
from mlx_parallm.worker.device.properties import allocate
from mlx_parallm.worker.generation.paged_cache import KVPools
from tests.fake_mac.mac import FakeMac

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
        list(allocate([array]))
    small = mx.zeros((4,))
    list(allocate([small]))
    assert small.tolist() == [0.0] * 4


def test_pools_that_do_not_fit_are_refused_in_words() -> None:
    shape = LayerShape(num_kv_heads=1 << 16, key_dim=1 << 10, value_dim=1, dtype=mx.float32)
    backend = ReferenceAttention(1 << 20)
    with pytest.raises(OutOfMemoryError):
        KVPools(backend, [shape], 1 << 8)


# VM_STAT: the form of macOS 10.9 and later; other lines have texts in quotes and words.
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               19455.
Pages active:                            425314.
Pages inactive:                          425521.
Pages speculative:                          946.
Pages throttled:                              0.
Pages wired down:                        118425.
Pages purgeable:                          23960.
"Translation faults":                3191714332.
Pages copy-on-write:                  107374182.
File-backed pages:                       210001.
Anonymous pages:                         640000.
Pages stored in compressor:             1189972.
Pages occupied by compressor:            545078.
Object cache: 12 hits of 345 lookups (3% hit rate)
Swapouts:                                125820.
"""


@pytest.mark.parametrize(
    ("text", "pages", "size"),
    [
        (VM_STAT, 19455 + 210001 + 23960, 16384),
        (VM_STAT.replace("16384", "4096"), 19455 + 210001 + 23960, 4096),
        (VM_STAT.replace("\n", "\r\n"), 19455 + 210001 + 23960, 16384),
        (VM_STAT.replace("19455.", "0."), 210001 + 23960, 16384),
    ],
)
def test_macos_says_what_it_can_hand_out(text: str, pages: int, size: int) -> None:
    assert available_in(text) == pages * size


@pytest.mark.parametrize("missing", ["Pages free", "File-backed pages", "Pages purgeable", "page"])
def test_what_macos_does_not_say_is_unknown(missing: str) -> None:
    assert available_in(VM_STAT.replace(missing, "Other")) is None
    assert available_in("") is None


def test_a_mac_has_what_no_program_holds(fake_mac: Callable[..., FakeMac]) -> None:
    fake_mac(memory_gb=64, held_gb=10)
    assert host_free_bytes() == 54 << 30


@pytest.mark.parametrize("command", ["exit 1", "echo nothing"])
def test_a_mac_that_says_nothing_has_an_unknown_size(
    fake_mac: Callable[..., FakeMac], tmp_path: Path, command: str
) -> None:
    fake_mac()
    (tmp_path / "vm_stat").write_text(f"#!/bin/sh\n{command}\n")
    assert host_free_bytes() is None
    (tmp_path / "vm_stat").unlink()
    assert host_free_bytes() is None
