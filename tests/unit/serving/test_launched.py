"""Launchers pass a process its rank in variables of the environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_parallm.serving.launched import Launched, launched_in
from mlx_parallm.types.errors import ConfigError

HOSTS = [["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.3:5000"]]


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(HOSTS))
    return str(path)


def test_a_process_without_a_rank_is_alone(hostfile: str) -> None:
    assert launched_in({}) is None
    assert launched_in({"MLX_HOSTFILE": hostfile, "HOME": "/"}) is None


def test_the_size_comes_from_where_each_backend_tells_it(hostfile: str) -> None:
    ring = {"MLX_RANK": "2", "MLX_HOSTFILE": hostfile}
    assert launched_in(ring) == Launched(2, 3, "ring")
    jaccl = {"MLX_RANK": "0", "MLX_IBV_DEVICES": hostfile, "MLX_JACCL_COORDINATOR": "10.0.0.1:1"}
    assert launched_in(jaccl) == Launched(0, 3, "jaccl")
    nccl = {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "9"}
    assert launched_in(nccl) == Launched(1, 2, "nccl")
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert launched_in(mpi) == Launched(1, 4, "mpi")


def test_the_only_rank_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(HOSTS[:1]))
    assert launched_in({"MLX_RANK": "0", "MLX_HOSTFILE": str(path)}) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"MLX_RANK": "3"}, "MLX_RANK is 3, but there are 3 ranks"),
        ({"MLX_RANK": "-1"}, "MLX_RANK"),
        ({"MLX_RANK": "first"}, "MLX_RANK is 'first'"),
        ({"MLX_HOSTFILE": "/nowhere/hosts.json"}, "/nowhere/hosts.json cannot be read"),
    ],
)
def test_variables_that_do_not_fit_are_named(
    hostfile: str, changed: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        launched_in({"MLX_RANK": "0", "MLX_HOSTFILE": hostfile} | changed)


@pytest.mark.parametrize("text", ["", "{}", "[]", "3"])
def test_a_hostfile_without_a_list_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="MLX_HOSTFILE"):
        launched_in({"MLX_RANK": "0", "MLX_HOSTFILE": str(path)})


def test_a_rank_without_a_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE"):
        launched_in({"OMPI_COMM_WORLD_RANK": "1"})
