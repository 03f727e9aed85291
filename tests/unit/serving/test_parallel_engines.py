"""``--data-parallel-size``: how many engines there are, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from mlx_parallm.api.http.auth import read_rank
from mlx_parallm.cli.engines import open_engine
from mlx_parallm.cli.setting_values import engine_count as parse_count
from mlx_parallm.config import AUTO, CacheConfig, EngineConfig
from mlx_parallm.llm import LLM
from mlx_parallm.machine import num_processors
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.parallel_engines import engine_count, parallel_life, share_of, thread_share
from mlx_parallm.types.errors import ConfigError, InvalidRequestError


@pytest.mark.parametrize(("text", "count"), [("auto", AUTO), ("1", 1), (3, 3)])
def test_a_number_of_engines_is_read(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["0", 0, -1, "two", True, 1.5, None])
def test_other_values_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="at least 1, or auto"):
        parse_count(text)


def test_auto_is_one_engine_for_each_gpu() -> None:
    assert engine_count(AUTO, {"CUDA_VISIBLE_DEVICES": "0,GPU-7,3"}) == 3
    assert engine_count(AUTO, {"CUDA_VISIBLE_DEVICES": "-1"}) == 1
    assert engine_count(2, {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 2


@pytest.mark.parametrize("variable", ["MLX_RANK", "OMPI_COMM_WORLD_RANK"])
def test_auto_is_one_engine_for_a_rank(variable: str) -> None:
    assert engine_count(AUTO, {"CUDA_VISIBLE_DEVICES": "0,1,2", variable: "0"}) == 1


@pytest.mark.parametrize(
    ("variables", "devices", "message"),
    [
        ({"MLX_RANK": "0"}, (), "mlx.launch"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, (), "there are 1 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ("0", "1"), "below 1"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ("0",), "needs 2 indices"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("0", "0"), "this machine has none"),
    ],
)
def test_engines_that_cannot_be_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    devices: tuple[str, ...],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = ServerConfig(data_parallel_size=2, data_parallel_devices=devices)
    with pytest.raises(ConfigError, match=message):
        parallel_life(EngineConfig(), config, lambda text, share: None)


def test_devices_of_one_engine_are_refused() -> None:
    config = ServerConfig(data_parallel_devices=("0", "1"))
    with pytest.raises(ConfigError, match="needs a --data-parallel-size above 1"):
        open_engine(EngineConfig(), config)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "two", None])
def test_llm_refuses_numbers_of_engines_that_cannot_be(size: object) -> None:
    with pytest.raises(ConfigError, match='must be a whole number of at least 1, or "auto"'):
        LLM(data_parallel_size=cast("int", size))


@pytest.mark.parametrize("text", ["0", "1", "01", 0, 1])
def test_the_number_of_an_engine_is_read(text: str | int) -> None:
    assert read_rank(text, 2, "rank") == int(text)


@pytest.mark.parametrize(
    "text", ["2", "0000000002", "-1", "", " 1", "1.0", "one", "\u00b2", "9" * 5000, True, 1.0]
)
def test_other_numbers_of_engines_are_refused(text: object) -> None:
    with pytest.raises(InvalidRequestError, match="from 0 to 1"):
        read_rank(text, 2, "rank")


def test_engines_share_memory_and_threads() -> None:
    config = EngineConfig(cache=CacheConfig(kv_cache_bytes=1001, memory_fraction=0.8))
    assert share_of(config, 2).cache.kv_cache_bytes == 500
    assert share_of(config, 2).cache.num_engines == 2
    assert share_of(config, 2).memory.num_engines == 2
    assert share_of(config, 4).cache.memory_fraction == pytest.approx(0.2)
    below = CacheConfig(kv_disk=Path("/kv"), kv_disk_bytes=1 << 30, kv_host_bytes=1 << 30)
    each = share_of(EngineConfig(cache=below), 2).cache
    assert replace(each, memory_fraction=below.memory_fraction, num_engines=1) == below
    assert "OMP_NUM_THREADS" not in thread_share({"OMP_NUM_THREADS": "3"}, 2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux has it")
def test_engines_share_the_processors_that_the_server_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert num_processors() == 1
        assert set(thread_share({}, 1).values()) == {"1"}
    finally:
        os.sched_setaffinity(0, allowed)
