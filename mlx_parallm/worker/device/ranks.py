"""The processes that compute one model together: the only module that calls ``mx.distributed``.

Every rank must make the same calls in the same order, because each call waits for the other ranks.
Sums and gathers are lazy like other operations; the others evaluate.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.errors import ConfigError, ModelLoadError

#: ``OTHER_RANK``: why a kernel is not used that is right on this rank.
OTHER_RANK = "another rank does not find them right"


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
        pairs = _host(self.gather(words)).reshape(-1, 2).astype(np.uint64)
        return min(int(high) << 32 | int(low) for high, low in pairs)

    def first_other(self, digest: bytes) -> int | None:
        """Return the first rank that passes another digest than rank 0; None if all are alike."""
        words = mx.array(np.frombuffer(digest, np.uint32))
        rows = _host(self.gather(words[None]))
        others = np.flatnonzero((rows != rows[0]).any(axis=1))
        return int(others[0]) if others.size else None

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's ``data``, some bytes; other ranks pass None.

        MLX has no broadcast, so ranks add zeros to unsigned words: the only way that all backends
        have, and that keeps every bit (a sum of floats turns -0.0 into 0.0).
        """
        length = self.least(len(data) if data is not None else (1 << 62))
        words = np.zeros(-(-length // 4), np.uint32)
        if data is not None:
            words.view(np.uint8)[:length] = np.frombuffer(data, np.uint8)
        return _host(self.sum(mx.array(words))).tobytes()[:length]


def agreed(ranks: Ranks | None, verdict: bool) -> bool:
    """Return True if all ranks pass True; without ranks, return this process's verdict."""
    return verdict if ranks is None else ranks.agree(verdict)


@contextmanager
def all_succeed(ranks: Ranks | None) -> Generator[None]:
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


def join_ranks(backend: str) -> Ranks:
    """Join the group that the environment names; wait until all ranks have joined.

    No other Python thread of the process runs meanwhile, because MLX keeps the GIL.

    Args:
        backend: the name of MLX's backend, such as "ring".

    Raises:
        ConfigError: there is no such group, or it cannot be reached.
    """
    try:
        group = mx.distributed.init(strict=True, backend=backend)
        ranks = Ranks(group.rank(), group.size(), backend, group)
        # A ring does not ask who has the port of a rank; a sum shows that it is the rank.
        ranks.agree(True)
    except RuntimeError as problem:
        raise ConfigError(f"The ranks cannot be joined by {backend}: {problem}") from problem
    return ranks


def _host(x: mx.array) -> np.ndarray:
    # NumPy would evaluate it too, but a lost rank would then end the process without an error.
    mx.eval(x)
    return np.array(x)
