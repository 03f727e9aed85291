"""Limits of MLX's allocator on devices of all kinds."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.config import MemoryConfig
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device import allocator
from mlx_parallm.worker.device.allocator import (
    STEP_BYTES,
    default_cache_bytes,
    limit_allocator,
    limit_arrays,
    most_wired_bytes,
)
from mlx_parallm.worker.device.properties import backend_name, cache_memory_bytes
from mlx_parallm.worker.generation.paged_cache import KVPools
from tests.fake_mac.mac import ALL, GIB, WORKING_SETS, FakeMac

Become = Callable[..., FakeMac]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory_gb", "limit"),
    [
        (8, int(5.33 * GIB) // 20),
        (16, int(10.67 * GIB) // 20),
        (32, int(21.33 * GIB) // 20),
        (64, 2 * GIB),
        (128, 2 * GIB),
    ],
)
def test_a_mac_keeps_little_of_freed_memory(fake_mac: Become, memory_gb: int, limit: int) -> None:
    mac = fake_mac(memory_gb=memory_gb)
    limit_allocator(MemoryConfig())
    assert mac.limits["set_cache_limit"] == limit


@pytest.mark.parametrize(
    ("memory_gb", "limit"), [(8, 256 * MIB), (16, int(10.67 * GIB) // 40), (128, GIB)]
)
def test_engines_of_a_mac_divide_the_limit(fake_mac: Become, memory_gb: int, limit: int) -> None:
    mac = fake_mac(memory_gb=memory_gb)
    limit_allocator(MemoryConfig(num_engines=2))
    assert mac.limits["set_cache_limit"] == limit


@pytest.mark.parametrize(("configured", "engines", "limit"), [(0, 1, 0), (GIB, 1, GIB), (9, 2, 4)])
def test_the_setting_counts_on_a_mac(
    fake_mac: Become, configured: int, engines: int, limit: int
) -> None:
    mac = fake_mac()
    limit_allocator(MemoryConfig(mlx_cache_bytes=configured, num_engines=engines))
    assert mac.limits["set_cache_limit"] == limit


@pytest.mark.parametrize("memory_gb", WORKING_SETS)
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_mac_waits_before_arrays_fill_the_working_set(
    fake_mac: Become, memory_gb: int, num_engines: int
) -> None:
    mac = fake_mac(memory_gb=memory_gb)
    limit_allocator(MemoryConfig(num_engines=num_engines))
    assert mac.limits["set_memory_limit"] == mac.working_set_bytes * 90 // 100
    assert "set_wired_limit" not in mac.limits


@pytest.mark.parametrize(("memory_gb", "held_gb"), [(8, 4.81), (16, 10.5), (64, 44.0)])
def test_steps_have_room_above_weights_and_kv(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch, memory_gb: int, held_gb: float
) -> None:
    mac = fake_mac(memory_gb=memory_gb, rejects=ALL)
    limit_allocator(MemoryConfig())
    monkeypatch.setattr(mx, "get_active_memory", lambda: int(held_gb * GIB))
    shape = LayerShape(num_kv_heads=1, key_dim=64, value_dim=64, dtype=mx.float16)
    KVPools(ReferenceAttention(16), [shape], 1)
    assert mac.limits["set_memory_limit"] == int(held_gb * GIB) + STEP_BYTES


def test_other_devices_keep_the_limit_of_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    for name in ("set_cache_limit", "set_memory_limit"):
        monkeypatch.setattr(mx, name, limits.append)
    assert backend_name() == "cpu"
    limit_allocator(MemoryConfig())
    limit_arrays()
    assert limits == []
    limit_allocator(MemoryConfig(mlx_cache_bytes=3 * MIB))
    assert limits == [3 * MIB]


@pytest.mark.parametrize(
    ("free_gb", "cached_gb", "room_gb"), [(12, 0, 4.8), (10, 2.5, 5.0), (0.5, 0, 0.5)]
)
def test_on_cuda_steps_take_part_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, free_gb: float, cached_gb: float, room_gb: float
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(allocator, "backend_name", lambda: "cuda")
    monkeypatch.setattr(mx, "device_info", lambda *_: {"free_memory": int(free_gb * GIB)})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 100 * GIB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: int(cached_gb * GIB))
    monkeypatch.setattr(mx, "set_memory_limit", limits.append)
    limit_arrays()
    assert limits == [pytest.approx((100 + room_gb) * GIB, abs=8)]


def test_on_cuda_of_unknown_free_memory_the_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(allocator, "backend_name", lambda: "cuda")
    monkeypatch.setattr(mx, "device_info", lambda *_: {})
    monkeypatch.setattr(mx, "set_memory_limit", limits.append)
    limit_arrays()
    assert limits == []


@pytest.mark.parametrize("name", ["memory_size", "max_recommended_working_set_size"])
@pytest.mark.parametrize("is_zero", [False, True])
def test_a_mac_of_unknown_size_keeps_the_limits_of_mlx(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch, name: str, is_zero: bool
) -> None:
    mac = fake_mac()
    info = mac.device_info()
    del info[name]
    if is_zero:
        info[name] = 0
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    limit_allocator(MemoryConfig())
    limit_arrays()
    assert bool(mac.limits) == (name == "memory_size")
    assert all(mac.limits.values())
    limit_allocator(MemoryConfig(mlx_cache_bytes=3 * MIB))
    assert mac.limits["set_cache_limit"] == 3 * MIB
    with pytest.raises(ConfigError, match="does not say what memory this Mac has"):
        limit_allocator(MemoryConfig(wired_bytes=1))


def test_freed_memory_can_be_read_and_refused() -> None:
    before = mx.set_cache_limit(0)
    try:
        limit_allocator(MemoryConfig(mlx_cache_bytes=8 * MIB))
        mx.eval(mx.zeros((MIB,), mx.float32))
        assert cache_memory_bytes() >= 4 * MIB
        limit_allocator(MemoryConfig(mlx_cache_bytes=0))
        assert cache_memory_bytes() == 0
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize(
    ("memory_gb", "most"),
    [(16, 8 * GIB), (32, 22333829940), (64, 44667659879), (128, 89335319757)],
)
def test_a_mac_wires_what_leaves_room_for_others(
    fake_mac: Become, memory_gb: int, most: int
) -> None:
    mac = fake_mac(memory_gb=memory_gb)
    limit_allocator(MemoryConfig(wired_bytes=most))
    assert mac.limits["set_wired_limit"] == most
    with pytest.raises(ConfigError, match=r"--wired-memory-bytes is .*; at most .* of the .* GiB"):
        limit_allocator(MemoryConfig(wired_bytes=most + 1))
    assert mac.limits["set_wired_limit"] == most


def test_engines_divide_what_is_wired(fake_mac: Become) -> None:
    mac = fake_mac(memory_gb=32)
    limit_allocator(MemoryConfig(wired_bytes=8 * GIB, num_engines=2))
    assert mac.limits["set_wired_limit"] == 4 * GIB
    with pytest.raises(ConfigError, match="at most"):
        limit_allocator(MemoryConfig(wired_bytes=24 * GIB, num_engines=2))


def test_a_small_mac_wires_nothing(fake_mac: Become) -> None:
    fake_mac(memory_gb=8)
    with pytest.raises(ConfigError, match="nothing of the 8 GiB"):
        limit_allocator(MemoryConfig(wired_bytes=1))


def test_nothing_is_wired_unless_it_is_configured(fake_mac: Become) -> None:
    mac = fake_mac(memory_gb=128)
    limit_allocator(MemoryConfig())
    assert "set_wired_limit" not in mac.limits


def test_only_a_mac_wires_memory() -> None:
    with pytest.raises(ConfigError, match="--wired-memory-bytes needs the GPU of a Mac"):
        limit_allocator(MemoryConfig(wired_bytes=1))


@given(st.integers(0, 1 << 41), st.integers(1, 8))
def test_freed_memory_stays_within_bounds(working_set: int, engines: int) -> None:
    limit = default_cache_bytes(working_set, engines)
    assert 256 * MIB <= limit <= 2 * GIB
    assert limit <= max(256 * MIB, working_set // 20)


@given(st.integers(0, 1 << 41), st.integers(0, 1 << 41))
def test_what_is_wired_leaves_a_third_or_8_gib(memory: int, working_set: int) -> None:
    most = most_wired_bytes(memory, working_set)
    assert 0 <= most <= working_set
    assert most == 0 or memory - most >= max(8 * GIB, memory * 35 // 100)
