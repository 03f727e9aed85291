"""``--engine``: which engines there are, beside which of this machine."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.cli.configure import SourcedValue, build_config
from mlx_parallm.cli.engines import open_engine, with_engine_count
from mlx_parallm.config import EngineConfig
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.origins import Dialled, Spawned
from mlx_parallm.serving.parallel_engines import parallel_life
from mlx_parallm.types.errors import ConfigError


def origins(**settings: Any) -> list[tuple[type, int]]:
    """Return where each engine comes from, and how many share its memory."""
    sourced = {
        name.replace("_", "-"): SourcedValue(value, name) for name, value in settings.items()
    }
    config, server = build_config(sourced)
    life = parallel_life(config, with_engine_count(server), lambda *_: None)
    lives = [each for each in life._lives if isinstance(each, RemoteLife)]
    return [(type(each._origin), each._config.cache.num_engines) for each in lives]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_engines_are_those_that_are_named() -> None:
    assert origins(engine="127.0.0.1:1,127.0.0.1:2") == [(Dialled, 1), (Dialled, 1)]
    assert origins(engine=["127.0.0.1:1"]) == [(Dialled, 1)]


def test_engines_of_one_listener_divide_its_memory() -> None:
    named = "127.0.0.1:1,127.0.0.1:2,127.0.0.1:1"
    assert origins(engine=named) == [(Dialled, 2), (Dialled, 1), (Dialled, 2)]


@pytest.mark.parametrize(("size", "count"), [("1", 1), ("2", 2), ("auto", 1)])
def test_engines_of_this_machine_serve_beside_them_if_asked_for(size: str, count: int) -> None:
    expected = [(Spawned, count)] * count + [(Dialled, 1)]
    assert origins(engine="127.0.0.1:1", data_parallel_size=size) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "127.0.0.1"}, "--engine must be HOST:PORT"),
        ({"engine": "10.0.0.1:1"}, "--engine 10.0.0.1:1 needs --peer-key-file"),
        ({"engine": "127.0.0.1:1", "peer_key_file": "/no/key"}, "--peer-key-file: /no/key: No"),
    ],
)
def test_wrong_addresses_and_keys_are_a_sentence(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        origins(**settings)
    assert str(refusal.value).startswith(message)


def test_devices_are_those_of_engines_of_this_machine() -> None:
    _, server = build_config(
        {
            "engine": SourcedValue("127.0.0.1:1", "engine"),
            "data-parallel-devices": SourcedValue("0", "devices"),
        }
    )
    with pytest.raises(ConfigError, match="needs a --data-parallel-size above 1"):
        open_engine(EngineConfig(), with_engine_count(server))


def test_ranks_have_no_engines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(ConfigError, match="--engine cannot be used under"):
        origins(engine="127.0.0.1:1")
