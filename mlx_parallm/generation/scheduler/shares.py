"""Slots shared evenly among the clients that have work."""

from __future__ import annotations

from collections import Counter

from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.generation.scheduler.waiting import WaitingQueue

# DEFAULT_PRIORITY: only sequences of this priority or a better one are owed a share. A better
# priority does not keep other clients from their shares.
DEFAULT_PRIORITY = 0


class ClientShares:
    """The slots that each client may hold while others wait: an even share of all slots.

    A client may have more while no client with less than its share waits.

    Attributes:
        owed: since ``look``: of each client that has less than its share, what waits first.
    """

    def __init__(self, waiting: WaitingQueue, running: RunningSet) -> None:
        self._waiting = waiting
        self._running = running
        self._share = running.num_slots
        self.owed: list[Sequence] = []

    def look(self) -> None:
        """Note which clients have work; called before a step is planned."""
        self.owed = []
        if not len(self._waiting):
            return
        num_clients = len(self._waiting.clients.union(self._running.clients))
        self._share = max(1, self._running.num_slots // num_clients)
        if num_clients > 1:
            heads = [sequence for sequence in self._waiting.heads() if self.is_owed(sequence)]
            first: dict[str, Sequence] = {}
            for sequence in filter(self._running.may_start, heads):
                first.setdefault(sequence.request.client, sequence)
            self.owed = list(first.values())

    def is_owed(self, sequence: Sequence) -> bool:
        """Return True if a waiting sequence's client has less than its share."""
        is_usual = sequence.request.priority <= DEFAULT_PRIORITY
        return is_usual and self._running.count_of(sequence.request.client) < self._share

    def overdrawn(self) -> list[Sequence]:
        """Return running sequences beyond their clients' shares, the worst first."""
        counted = Counter[str]()
        beyond: list[Sequence] = []
        for sequence in self._running:
            counted[sequence.request.client] += 1
            if counted[sequence.request.client] > self._share:
                beyond.append(sequence)
        return beyond[::-1]
