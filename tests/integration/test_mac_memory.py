"""KV memory of a model on Macs of all sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_parallm.config import CacheConfig, EngineConfig, SchedulerConfig
from mlx_parallm.generation.assembly import LoadedGenerator
from mlx_parallm.serving.build import planned_models
from mlx_parallm.serving.parallel_engines import share_of
from mlx_parallm.types.errors import ConfigError
from tests.fake_mac.mac import ALL, GIB, WORKING_SETS, FakeMac

Become = Callable[..., FakeMac]
# BLOCK_BYTES: KV of 16 tokens of the demonstration model.
BLOCK_BYTES = 16 * 6 * 2 * 64 * 2 * 4


def kv_bytes(config: EngineConfig | None = None) -> int:
    """Return the size of the demonstration model's KV pool, without its last part of a block."""
    ((share, _),) = planned_models(config or EngineConfig())
    return share.num_bytes


def hold(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let the arrays of this process take so much memory."""
    monkeypatch.setattr(mx, "get_active_memory", lambda: num_bytes)


@pytest.mark.parametrize("memory_gb", WORKING_SETS)
def test_a_small_model_takes_1_gib_of_any_mac(fake_mac: Become, memory_gb: int) -> None:
    mac = fake_mac(memory_gb=memory_gb, rejects=ALL)
    assert 0 <= GIB - kv_bytes() < BLOCK_BYTES
    assert mac.limits.keys() == {"set_cache_limit", "set_memory_limit"}


@pytest.mark.parametrize(
    ("memory_gb", "held_gb", "weights_gb", "most"),
    [
        (8, 7.0, 4.5, 0.5 * 0.83),
        (16, 4.0, 4.5, 1.0),
        (16, 16.0, 4.5, 1.0),
        (32, 6.0, 19.74, 0.5 * 1.59),
        (64, 8.0, 4.5, 1.0),
    ],
)
def test_arrays_and_the_working_set_count(
    fake_mac: Become,
    monkeypatch: pytest.MonkeyPatch,
    memory_gb: int,
    held_gb: float,
    weights_gb: float,
    most: float,
) -> None:
    fake_mac(memory_gb=memory_gb, held_gb=held_gb, rejects=ALL)
    hold(monkeypatch, int(weights_gb * GIB))
    assert kv_bytes() == pytest.approx(most * GIB, rel=1e-4)


def test_two_engines_count_the_weights_of_each_other(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mac(memory_gb=16, rejects=ALL)
    hold(monkeypatch, int(4.5 * GIB))
    free = 10.67 - 2 * 4.5
    assert kv_bytes(share_of(EngineConfig(), 2)) == pytest.approx(free / 4 * GIB, rel=1e-4)
    hold(monkeypatch, int(5.5 * GIB))
    with pytest.raises(ConfigError, match=r"The models of 2 engines take 11 GiB, .* fewer"):
        kv_bytes(share_of(EngineConfig(), 2))


@pytest.mark.parametrize(("engines", "fits"), [(1, True), (2, False)])
def test_a_size_for_all_engines_must_fit_beside_all_weights(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch, engines: int, fits: bool
) -> None:
    fake_mac(memory_gb=16, rejects=ALL)
    hold(monkeypatch, int(4.5 * GIB))
    config = share_of(EngineConfig(cache=CacheConfig(kv_cache_bytes=4 * GIB)), engines)
    if fits:
        assert 0 <= 4 * GIB - kv_bytes(config) < BLOCK_BYTES
        return
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes is 4 GiB; only 1\.4\d? GiB"):
        kv_bytes(config)


def test_models_beyond_the_working_set_are_refused(
    fake_mac: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mac(memory_gb=32, rejects=ALL)
    hold(monkeypatch, 22 * GIB)
    for cache in (CacheConfig(), CacheConfig(kv_cache_bytes=GIB)):
        with pytest.raises(ConfigError, match=r"The models take 22 GiB, .*iogpu\.wired_limit_mb"):
            kv_bytes(EngineConfig(cache=cache))


@pytest.mark.parametrize(("fraction", "is_logged"), [(0.05, False), (0.5, True), (0.9, True)])
def test_the_log_says_that_the_share_is_bounded(
    fake_mac: Become, caplog: pytest.LogCaptureFixture, fraction: float, is_logged: bool
) -> None:
    fake_mac(memory_gb=16, rejects=ALL)
    with caplog.at_level(logging.INFO):
        kv_bytes(EngineConfig(cache=CacheConfig(memory_fraction=fraction)))
    assert ("KV takes at most 1 GiB" in caplog.text) == is_logged


@pytest.mark.parametrize(
    ("memory_gb", "weights_gb", "gib"),
    [
        *((8, 4.3, 0.515), (16, 4.3, 1.675), (32, 4.3, 5.675), (64, 4.3, 13.675)),
        *((128, 4.3, 29.675), (8, 0.34, 1.0), (16, 0.34, 2.665), (64, 0.34, 5.44)),
        (128, 0.34, 5.44),
    ],
)
def test_kv_of_large_and_small_models_on_macs_of_all_sizes(
    fake_mac: Become,
    monkeypatch: pytest.MonkeyPatch,
    memory_gb: int,
    weights_gb: float,
    gib: float,
) -> None:
    fake_mac(memory_gb=memory_gb, held_gb=5 + weights_gb, rejects=ALL)
    hold(monkeypatch, int(weights_gb * GIB))
    monkeypatch.setattr(LoadedGenerator, "weight_bytes", int(weights_gb * GIB))
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=10_000))
    assert kv_bytes(config) == pytest.approx(gib * GIB, rel=2e-3)
