"""Requests that have not ended, and the room left for others."""

from __future__ import annotations

from collections import Counter
from itertools import count

from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.weights import PolicyWeights


class LiveRequests:
    """Requests by id, their samples that have not ended by ``seq_id``, and how many a client has.

    ``max_waiting`` is the most samples that wait; 0 for any number.

    Attributes:
        groups: the requests by their ids.
        by_id: their samples that have not ended.
    """

    def __init__(self, running: RunningSet, max_waiting: int) -> None:
        self._running = running
        self._max_waiting = max_waiting
        self.groups: dict[str, RequestGroup] = {}
        self.by_id: dict[int, Sequence] = {}
        self._per_client: Counter[str] = Counter()
        self._seq_ids = count()
        self._arrivals = count()

    @property
    def num_waiting(self) -> int:
        """Return how many live sequences do not run, future forks of a leader included."""
        return len(self.by_id) - len(self._running)

    def add(
        self, request: GenerateRequest, end_ids: frozenset[int], weights: PolicyWeights, seed: int
    ) -> RequestGroup:
        """Add a request and return its group; sample i uses ``seed + i``.

        Raises:
            OverloadedError: too many sequences wait.
            InvalidRequestError: the request's id is in use.
        """
        self.check_room(request.client, request.params.n)
        if request.request_id in self.groups:
            raise InvalidRequestError("The request id is in use.", param="request_id")
        group = RequestGroup(request, end_ids, next(self._arrivals), weights)
        prompt_ids = list(request.prompt_ids)
        for index in range(request.params.n):
            sequence = Sequence(next(self._seq_ids), group, index, seed + index, prompt_ids)
            group.sequences[index] = sequence
            self.by_id[sequence.seq_id] = sequence
        self.groups[request.request_id] = group
        self._per_client[request.client] += request.params.n
        return group

    def forget(self, sequence: Sequence) -> None:
        """Stop counting a sample that neither runs nor waits."""
        del self.by_id[sequence.seq_id]
        client = sequence.request.client
        self._per_client[client] -= 1
        if not self._per_client[client]:
            del self._per_client[client]
        group = sequence.group
        del group.sequences[sequence.index]
        if not group.sequences:
            del self.groups[group.request.request_id]

    def check_room(self, client: str, n: int) -> None:
        """See ``Scheduler.check_room``."""
        limit = self._max_waiting
        if not limit or self.num_waiting + n <= limit:
            return
        # Copy at once: the engine thread may add to the counts meanwhile.
        live = dict(self._per_client)
        waiting = {name: num - self._running.count_of(name) for name, num in live.items()}
        own = waiting.pop(client, 0)
        num_clients = 1 + sum(num > 0 for num in waiting.values())
        if num_clients == 1 or own + n > limit // num_clients:
            raise OverloadedError(f"{self.num_waiting} sequences are waiting already.")

    def check_integrity(self) -> None:
        """Assert that every sample is counted."""
        assert self._per_client == Counter(
            sequence.request.client for sequence in self.by_id.values()
        )
