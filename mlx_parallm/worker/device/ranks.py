"""The processes that compute one model together: the only module that calls ``mx.distributed``.

Every rank must make the same calls in the same order, because each call waits for the other ranks.
Sums and gathers are lazy like other operations; ``agree``, ``least`` and ``broadcast`` evaluate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.errors import ConfigError, ModelLoadError

# RANK_VARIABLES: environment variables by which ``mlx.launch`` and MPI tell a process its rank.
RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# BACKEND_VARIABLES: variables that mlx.launch sets for one backend only.
BACKEND_VARIABLES = {
    "MLX_JACCL_COORDINATOR": "jaccl",
    "NCCL_HOST_IP": "nccl",
    "MLX_HOSTFILE": "ring",
    "OMPI_COMM_WORLD_RANK": "mpi",
    "PMI_RANK": "mpi",
}
#: ``OTHER_RANK``: why a kernel is not used that is right on this rank.
OTHER_RANK = "another rank does not find them right"
# BROADCAST_BYTES: bytes of one broadcast; a larger one only takes more memory.
BROADCAST_BYTES = 256 << 20


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process was started as one rank of several."""
    return any(name in environment for name in RANK_VARIABLES)


def launched_backend(environment: Mapping[str, str] = os.environ) -> str:
    """Return the backend that the variables of ``mlx.launch`` or MPI belong to."""
    for name, backend in BACKEND_VARIABLES.items():
        if name in environment:
            return backend
    return "any"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a model that several processes compute.

    Attributes:
        rank: this process; rank 0 decides.
        size: the number of processes.
        backend: the name of MLX's backend, such as "ring".
        group: MLX's group of them all.
    """

    rank: int
    size: int
    backend: str
    group: Any

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum over all ranks, with the shape and dtype of ``x``."""
        return mx.distributed.all_sum(x, group=self.group)

    def gather(self, x: mx.array) -> mx.array:
        """Return the arrays of all ranks, by rank, concatenated along the first axis."""
        return mx.distributed.all_gather(x, group=self.group)

    def agree(self, verdict: bool) -> bool:
        """Return True if all ranks pass True."""
        return self.sum(mx.array(int(not verdict), mx.int32)).item() == 0

    def least(self, number: int) -> int:
        """Return the least number that a rank passes, at least 0 and below 2**63."""
        words = mx.array([number >> 32, number & 0xFFFFFFFF], mx.uint32)
        pairs = np.array(self.gather(words)).reshape(-1, 2).astype(np.uint64)
        return min(int(high) << 32 | int(low) for high, low in pairs)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's ``data``; other ranks pass None.

        MLX has no broadcast, so ranks add zeros to unsigned words: the only way that all backends
        have, and that keeps every bit (a sum of floats turns -0.0 into 0.0).
        """
        length = self.least(len(data) if data is not None else (1 << 62))
        parts: list[bytes] = []
        for start in range(0, length, BROADCAST_BYTES):
            size = min(BROADCAST_BYTES, length - start)
            words = np.zeros(-(-size // 4), np.uint32)
            if data is not None:
                words.view(np.uint8)[:size] = np.frombuffer(data, np.uint8, size, start)
            parts.append(np.array(self.sum(mx.array(words))).tobytes()[:size])
        return b"".join(parts)


def agreed(ranks: Ranks | None, verdict: bool) -> bool:
    """Return True if all ranks pass True; without ranks, return this process's verdict."""
    return verdict if ranks is None else ranks.agree(verdict)


@contextmanager
def all_succeed(ranks: Ranks | None) -> Iterator[None]:
    """Raise on every rank if the context fails on one of them; it must not wait for others.

    A rank that fails alone would leave the others waiting for its next sum.

    Raises:
        ModelLoadError: another rank failed.
    """
    try:
        yield
    except Exception:
        agreed(ranks, False)
        raise
    if not agreed(ranks, True):
        raise ModelLoadError("The model could not be loaded by another rank, whose error says why.")


def join_ranks(backend: str | None = None) -> Ranks:
    """Join the group that the environment names; wait until all ranks have joined.

    Args:
        backend: the name of MLX's backend; None for the one that the launcher prepared.

    Raises:
        ConfigError: there is no such group, or it cannot be reached.
    """
    name = backend or launched_backend()
    try:
        group = mx.distributed.init(strict=True, backend=name)
    except RuntimeError as problem:
        raise ConfigError(f"The ranks cannot be joined by {name}: {problem}") from problem
    return Ranks(group.rank(), group.size(), name, group)
