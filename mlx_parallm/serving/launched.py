"""Reads what ``mlx.launch`` or MPI passes to a process: its rank, of how many, and the backend.

It imports no MLX, because the process that speaks HTTP reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.json_values import is_list

# RANK_VARIABLES: where a process finds its rank; the first is mlx.launch's.
RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# SIZE_VARIABLES: where MPI and NCCL write the number of ranks.
SIZE_VARIABLES = ("MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# FILE_VARIABLES: files of JSON with one entry a rank, by backend.
FILE_VARIABLES = {"ring": "MLX_HOSTFILE", "jaccl": "MLX_IBV_DEVICES"}


@dataclass(frozen=True, slots=True)
class Launched:
    """This process as one of several ranks.

    Attributes:
        rank: this process; rank 0 serves.
        size: the number of ranks, at least 2.
        backend: the name of MLX's backend by which the ranks reach each other.
    """

    rank: int
    size: int
    backend: str


def has_rank(environment: Mapping[str, str]) -> bool:
    """True if a launcher gave this process a rank, even if it is the only one."""
    return any(name in environment for name in RANK_VARIABLES)


def launched_in(environment: Mapping[str, str]) -> Launched | None:
    """Return what the launcher passed; None for a process that is alone.

    Raises:
        ConfigError: the variables do not fit together, or name a file that cannot be read.
    """
    name = next((name for name in RANK_VARIABLES if name in environment), None)
    if name is None:
        return None
    backend = _backend(environment)
    size = _size(environment, backend)
    rank = _number(environment, name)
    if not 0 <= rank < size:
        raise ConfigError(f"{name} is {rank}, but there are {size} ranks.")
    return Launched(rank, size, backend) if size > 1 else None


def _backend(environment: Mapping[str, str]) -> str:
    if "NCCL_HOST_IP" in environment:
        return "nccl"
    for backend, name in FILE_VARIABLES.items():
        if name in environment:
            return backend
    return "mpi"


def _size(environment: Mapping[str, str], backend: str) -> int:
    if backend in FILE_VARIABLES:
        return len(_entries(environment, FILE_VARIABLES[backend]))
    for name in SIZE_VARIABLES:
        if name in environment:
            return _number(environment, name)
    raise ConfigError(f"The launcher set a rank, but none of {', '.join(SIZE_VARIABLES)}.")


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name} is {environment[name]!r}, which is no number.") from None


def _entries(environment: Mapping[str, str], name: str) -> Sequence[Any]:
    """Return a file's list, which has an entry for each rank."""
    path = Path(environment[name])
    try:
        entries: Any = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{name}: {path} cannot be read: {problem}") from problem
    if not is_list(entries) or not entries:
        raise ConfigError(f"{name}: {path} has no list of ranks.")
    return entries
