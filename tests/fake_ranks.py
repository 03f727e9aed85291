"""Ranks that are threads of one process, without MLX."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

# Nothing here waits longer, even on a machine that is busy.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class FakeRanks:
    """One of several ranks whose broadcasts go through queues, by rank."""

    rank: int
    queues: Sequence[queue.Queue[bytes]]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.queues)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's ``data``; other ranks pass None."""
        if data is None:
            return self.queues[self.rank].get(timeout=PATIENCE_S)
        for others in self.queues[1:]:
            others.put(data)
        return data


def fake_ranks(size: int) -> list[FakeRanks]:
    """Return all ranks of a group."""
    queues = [queue.Queue[bytes]() for _ in range(size)]
    return [FakeRanks(rank, queues) for rank in range(size)]
