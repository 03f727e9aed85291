"""Devices and kernels as a process sees them on a fake Mac."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.config import CacheConfig
from mlx_parallm.worker.attention.backend_choice import BackendChoice, choose_backend
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.device.properties import backend_name
from tests.fake_mac.mac import ALL, GIB, WORKING_SETS, FakeMac
from tests.kernels.shim_compile import require_compiler

Become = Callable[..., FakeMac]
SHAPE = LayerShape(num_kv_heads=1, key_dim=32, value_dim=32, dtype=mx.float32)


def choose() -> BackendChoice:
    return choose_backend(CacheConfig(), [SHAPE], 2)


@pytest.mark.parametrize("memory_gb", WORKING_SETS)
def test_metal_is_there(fake_mac: Become, memory_gb: int) -> None:
    fake_mac(memory_gb=memory_gb)
    assert backend_name() == "metal"
    assert mx.device_info()["memory_size"] == memory_gb * GIB


def test_kernels_of_the_shim_are_right(fake_mac: Become) -> None:
    require_compiler()
    fake_mac()
    choice = choose()
    assert (choice.backend.name, choice.rejected) == ("metal", None)


def test_rejected_kernels_leave_the_reference(fake_mac: Become) -> None:
    fake_mac(rejects=ALL)
    choice = choose()
    assert choice.backend.name == "reference"
    assert "Unable to build metal library" in (choice.rejected or "")


@pytest.mark.parametrize("kernel", ["attend", "write"])
def test_wrong_kernels_leave_the_reference(fake_mac: Become, kernel: str) -> None:
    require_compiler()
    fake_mac(wrong=kernel)
    choice = choose()
    assert choice.backend.name == "reference"
    assert "off by" in (choice.rejected or "")


def test_kernels_can_break_later(fake_mac: Become, tmp_path: Path) -> None:
    broken_by = tmp_path / "broken"
    fake_mac(broken_by=str(broken_by))
    broken_by.touch()
    assert choose().backend.name == "reference"
