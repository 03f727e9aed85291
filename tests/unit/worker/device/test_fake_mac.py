"""Devices and kernels as a process sees them on a fake Mac."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.config import CacheConfig
from mlx_parallm.worker.attention import backend_choice
from mlx_parallm.worker.attention.backend_choice import BackendChoice, choose_backend
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernels import TEXTS as attention_texts
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.lora.adapter_check import choose_change_kernels
from mlx_parallm.worker.lora.kernels import TEXTS as adapter_texts
from mlx_parallm.worker.sampling.check import choose_sampling
from mlx_parallm.worker.sampling.kernels import TEXTS as sampling_texts
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


def kernels_of(texts: Path) -> list[str]:
    """Return the names of the kernels of Macs below a folder; others include some texts."""
    names = {file.stem for file in texts.glob("*.metal")}
    return sorted(names - {"common", "quantise", "heads"})


@pytest.mark.parametrize("fault", ["wrong", pytest.param("rejects", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", kernels_of(attention_texts))
def test_a_faulty_kernel_leaves_the_reference(fake_mac: Become, kernel: str, fault: str) -> None:
    require_compiler()
    fake_mac(**{fault: f"_{kernel}_"})
    choice = choose()
    assert choice.backend.name == "reference"
    assert re.search("off by|copied blocks|Unable to build", choice.rejected or "")


@pytest.mark.parametrize("fault", ["wrong", "rejects"])
@pytest.mark.parametrize("kernel", ["draw", "logprobs"])
def test_a_faulty_sampling_kernel_leaves_stock(fake_mac: Become, kernel: str, fault: str) -> None:
    require_compiler()
    fake_mac(**{fault: f"_{kernel}_"})
    kernels, reason = choose_sampling(300, mx.float32)
    assert kernels is None
    assert reason


@pytest.mark.parametrize("fault", ["wrong", "rejects"])
def test_a_faulty_kernel_that_macs_do_not_use_changes_nothing(fake_mac: Become, fault: str) -> None:
    require_compiler()
    assert kernels_of(sampling_texts) == ["draw", "greedy", "logprobs"]
    fake_mac(**{fault: "_greedy_"})
    kernels, reason = choose_sampling(300, mx.float32)
    assert kernels is not None
    assert reason is None
    assert not kernels.serve_greedy(mx.zeros((1, 300)))


@pytest.mark.parametrize("fault", ["wrong", "rejects"])
@pytest.mark.parametrize("kernel", kernels_of(adapter_texts))
def test_a_faulty_adapter_kernel_leaves_stock(fake_mac: Become, kernel: str, fault: str) -> None:
    require_compiler()
    fake_mac(**{fault: f"_{kernel}_"})
    kernels, reason = choose_change_kernels(mx.float32)
    assert kernels is None
    assert reason


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_kernels_that_run_too_early_leave_the_reference(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    require_compiler()
    fake_mac()
    monkeypatch.setattr(backend_choice, "order_error", lambda *_, **__: error)
    choice = choose()
    assert choice.backend.name == "reference"
    assert "unless each launch is waited for" in (choice.rejected or "")


def test_kernels_can_break_later(fake_mac: Become, tmp_path: Path) -> None:
    broken_by = tmp_path / "broken"
    fake_mac(broken_by=str(broken_by))
    broken_by.touch()
    assert choose().backend.name == "reference"
