"""The settings of a server that mlx.launch started as several ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlx_parallm.cli.ranks import is_open_pipe, with_ranks
from mlx_parallm.config import AUTO, CacheConfig, EngineConfig, RanksConfig, SpeculativeConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError

#: No test waits for it.
TIMEOUT_S = 3.0


@pytest.fixture
def launched(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([["127.0.0.1:5000"], ["127.0.0.1:5001"]]))
    return {"MLX_RANK": "1", "MLX_HOSTFILE": str(path)}


def test_a_process_that_is_alone_keeps_its_settings() -> None:
    engine = EngineConfig(ranks=RanksConfig(timeout_s=TIMEOUT_S))
    assert with_ranks(engine, ServerConfig(), {}) is engine


def test_the_launcher_says_which_rank_this_is(launched: dict[str, str]) -> None:
    engine = EngineConfig(ranks=RanksConfig(timeout_s=TIMEOUT_S, host="10.0.0.9"))
    ranks = with_ranks(engine, ServerConfig(), launched).ranks
    assert ranks == RanksConfig(
        rank=1, size=2, backend="ring", timeout_s=TIMEOUT_S, host="10.0.0.9"
    )


@pytest.mark.parametrize(
    ("engine", "server", "flag"),
    [
        (EngineConfig(), ServerConfig(data_parallel_size=2), "--data-parallel-size 2"),
        (EngineConfig(), ServerConfig(engine_process=True), "--engine-process"),
        (EngineConfig(restart_on_failure=True), ServerConfig(), "--restart-engine"),
        (EngineConfig(cache=CacheConfig(kv_disk=Path("/kv"))), ServerConfig(), "--kv-disk"),
        (EngineConfig(cache=CacheConfig(kv_host_bytes=1 << 30)), ServerConfig(), "--kv-host-bytes"),
        (
            EngineConfig(speculative=SpeculativeConfig(method="draft_model", model="small")),
            ServerConfig(),
            "draft model",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_its_flag(
    launched: dict[str, str], engine: EngineConfig, server: ServerConfig, flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        with_ranks(engine, server, launched)


def test_an_automatic_number_of_engines_is_taken(launched: dict[str, str]) -> None:
    assert with_ranks(EngineConfig(), ServerConfig(data_parallel_size=AUTO), launched)


def test_several_http_processes_and_ngrams_are_taken(launched: dict[str, str]) -> None:
    engine = EngineConfig(speculative=SpeculativeConfig(method="ngram"))
    assert with_ranks(engine, ServerConfig(api_server_count=2), launched).ranks.size == 2


def test_only_a_pipe_with_a_writer_tells_that_the_launcher_is_there(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    try:
        assert is_open_pipe(read_end)
        os.close(write_end)
        assert not is_open_pipe(read_end)
    finally:
        os.close(read_end)
    with (tmp_path / "file").open("w") as file:
        assert not is_open_pipe(file.fileno())
