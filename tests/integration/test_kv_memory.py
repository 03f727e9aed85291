"""KV memory of real models: its shares, and the messages about it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_parallm import LLM
from mlx_parallm.config import (
    CacheConfig,
    EngineConfig,
    LoadingConfig,
    ModelConfig,
    SchedulerConfig,
)
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.engine import build
from mlx_parallm.engine.build import check_host_blocks
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.model import GENERATION_TRAITS
from mlx_parallm.serving.build import build_engines
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.worker import Worker

# KV of a token of the demonstration model, float32: 6 layers, 2 heads of 64, keys and values.
TOKEN_BYTES = 6 * 2 * 64 * 2 * 4
BLOCK_BYTES = 16 * TOKEN_BYTES


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return folders of the demonstration model with other context lengths."""
    return {length: _with_context(tmp_path_factory, length) for length in (600, 131_072)}


def _with_context(paths: pytest.TempPathFactory, length: int) -> str:
    folder = paths.mktemp("models") / f"of-{length}"
    shutil.copytree(DEMO_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = length
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def built(paths: Sequence[str], kv_cache_bytes: int | None, *, max_num_seqs: int = 8) -> list[Any]:
    config = EngineConfig(
        models=tuple(ModelConfig(path=path) for path in paths),
        cache=CacheConfig(kv_cache_bytes=kv_cache_bytes),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )
    models = build_engines(config, MetricFamilies(), Worker(), lambda text, share: None)
    return [cast("Any", model) for model in models if model.model.traits is GENERATION_TRAITS]


def test_a_small_model_keeps_its_context_beside_a_large_one(
    folders: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    small, large = built([folders[600], folders[131_072]], 64 << 20)
    assert small.model.info.max_model_len == 600
    assert 8192 < large.model.info.max_model_len < 131_072
    taken = small.model.info.kv_bytes + large.model.info.kv_bytes
    assert 0 <= (64 << 20) - taken < 2 * BLOCK_BYTES
    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    for part in (folders[131_072], "from 131072", f"to {large.model.info.max_model_len} tokens"):
        assert part in warning


@pytest.mark.parametrize(
    ("backend", "free_bytes", "sentence"),
    [
        ("cpu", None, "--kv-host-bytes needs a GPU with memory of its own"),
        ("metal", 1 << 40, "--kv-host-bytes needs a GPU with memory of its own"),
        ("cuda", 1 << 29, "--kv-host-bytes is 1 GiB; only 512 MiB of host memory are free"),
        ("cuda", 1 << 30, None),
        ("cuda", None, None),
    ],
)
def test_host_memory_keeps_kv_only_beside_a_gpu_with_its_own(
    backend: str, free_bytes: int | None, sentence: str | None
) -> None:
    check_host_blocks(CacheConfig(kv_disk=Path("/kv")), backend, free_bytes)
    refused = nullcontext() if sentence is None else pytest.raises(ConfigError, match=sentence)
    with refused:
        check_host_blocks(CacheConfig(kv_host_bytes=1 << 30), backend, free_bytes)


def test_a_load_is_refused_before_it_begins() -> None:
    with pytest.raises(ConfigError, match="--kv-host-bytes needs a GPU"):
        LLM("/no/folder", cache=CacheConfig(kv_host_bytes=1 << 30))
    with pytest.raises(ConfigError, match=r"--kv-disk: .* is not a folder"):
        LLM(cache=CacheConfig(kv_disk=Path(__file__)))


def test_less_than_a_block_of_each_is_refused(folders: dict[int, str]) -> None:
    with pytest.raises(ConfigError, match="does not hold one block of each model"):
        built([*folders.values()], 2 * BLOCK_BYTES - 1)


def test_a_size_is_taken_as_said_beyond_what_sequences_can_use(
    folders: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    size = 64 << 20
    (engine,) = built([folders[600]], size, max_num_seqs=1)
    info = engine.model.info
    assert 0 <= size - info.kv_bytes < BLOCK_BYTES
    assert info.max_model_len == 600
    said = f" of KV: {info.num_blocks} blocks of 16 tokens, {info.num_blocks * 16:,} tokens"
    assert any(said in record.getMessage() for record in caplog.records)


def test_models_together_take_the_size_as_said(folders: dict[int, str]) -> None:
    size = 64 << 20
    engines = built(list(folders.values()), size, max_num_seqs=1)
    taken = sum(engine.model.info.kv_bytes for engine in engines)
    assert 0 <= size - taken < 2 * BLOCK_BYTES


def test_without_a_size_no_more_is_taken_than_sequences_can_use(folders: dict[int, str]) -> None:
    (engine,) = built([folders[600]], None, max_num_seqs=2)
    assert engine.model.info.num_blocks == 2 * 38


def test_a_size_that_is_not_free_is_refused(folders: dict[int, str]) -> None:
    with pytest.raises(ConfigError, match=r"is 1024 GiB; only \S+ GiB are free"):
        built([folders[600]], 1 << 40)


@pytest.mark.parametrize(
    ("loading", "num_models", "count"),
    [
        (LoadingConfig(), 0, 1),
        (LoadingConfig(), 3, 3),
        (LoadingConfig(directories=("/models",)), 0, 2),
        (LoadingConfig(allowed_roots=("/models",)), 1, 2),
        (LoadingConfig(allowed_repos=("org/*",)), 2, 2),
        (LoadingConfig(scans_hub_cache=True), 3, 3),
    ],
)
def test_models_that_come_later_find_host_memory(
    loading: LoadingConfig, num_models: int, count: int
) -> None:
    config = EngineConfig(models=(ModelConfig(),) * num_models, loading=loading)
    assert config.num_host_shares == count


def test_a_model_keeps_its_share_of_host_memory(
    folders: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    # Only a GPU has host memory besides its own.
    monkeypatch.setattr(build, "check_host_blocks", lambda *_: None)
    monkeypatch.setattr(
        ModelRunner, "reserve_host_memory", lambda _, num_bytes: reserved.append(num_bytes)
    )
    config = EngineConfig(
        models=(ModelConfig(path=folders[600]),),
        cache=CacheConfig(kv_cache_bytes=64 << 20, kv_host_bytes=1 << 26),
        loading=LoadingConfig(directories=(str(DEMO_FOLDER.parent),)),
        warm_up=False,
    )
    (model,) = build_engines(config, MetricFamilies(), Worker(), lambda text, share: None)
    engine = cast(Any, model.engine)
    (place,) = engine._tiers.stats().tiers
    assert [place.store.limit_bytes, *reserved] == [1 << 25, 1 << 25]
