"""Chooses which inputs a pooling model runs next: similar lengths, within a token budget."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from mlx_parallm.types.pooling import PoolingInput, PoolRequest

# An input joins a batch if padding it costs at most this share of the batch's length (one in so
# many), or so few tokens: launching another batch costs about as much.
MAX_PADDING_SHARE = 4
FREE_PADDING = 16

#: ``BatchSeconds`` returns the seconds of a batch, from its inputs and the tokens of the longest.
BatchSeconds = Callable[[int, int], float]


@dataclass(slots=True, eq=False)
class WaitingInput:
    """An input that is not computed yet, and the requests that wait for it.

    Attributes:
        input: the input.
        number: its place in the order of arrival.
        arrival_s: when it was requested first.
        askers: request ids, with the index of the input in each request.
    """

    input: PoolingInput
    number: int
    arrival_s: float = 0.0
    askers: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    @property
    def key(self) -> tuple[int, int, WaitingInput]:
        """Return the sort key, length and then arrival, with the input itself."""
        return len(self.input.token_ids), self.number, self


class PoolingQueue:
    """The inputs of all requests, equal ones once. It is not thread-safe.

    Attributes:
        num_tokens: tokens of all inputs that wait.
    """

    def __init__(self) -> None:
        # In the order of arrival.
        self._by_input: dict[PoolingInput, WaitingInput] = {}
        self._by_length: list[tuple[int, int, WaitingInput]] = []
        self._count = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of distinct inputs that wait."""
        return len(self._by_input)

    @property
    def oldest(self) -> WaitingInput:
        """Return the input that arrived first; the queue must not be empty."""
        return next(iter(self._by_input.values()))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest input; the queue must not be empty."""
        return self._by_length[-1][0]

    def add(
        self, request: PoolRequest, known: Container[int] = (), *, arrival_s: float = 0.0
    ) -> None:
        """Queue a request's inputs; an input that waits already is computed once for both.

        ``known``: indices of inputs that need not be computed.
        """
        for place, item in enumerate(request.inputs):
            if place in known:
                continue
            waiting = self._by_input.get(item)
            if waiting is None:
                waiting = WaitingInput(item, self._count, arrival_s)
                self._count += 1
                self.num_tokens += len(item.token_ids)
                self._by_input[item] = waiting
                bisect.insort(self._by_length, waiting.key)
            waiting.askers.append((request.request_id, place))

    def remove(self, request: PoolRequest) -> None:
        """Drop a request; inputs that no other request waits for are not computed."""
        for item in set(request.inputs):
            waiting = self._by_input.get(item)
            if waiting is None:
                continue
            waiting.askers = [asker for asker in waiting.askers if asker[0] != request.request_id]
            if not waiting.askers:
                self._forget(waiting)

    def take(
        self, max_tokens: int, *, max_adapters: int = 1, seconds: BatchSeconds | None = None
    ) -> list[WaitingInput]:
        """Return the next batch, sorted by length: the oldest input and others near its length.

        Args:
            max_tokens: most tokens, padding included. The oldest input runs even if it has more.
            max_adapters: most adapters of the batch. If it is 0 and the oldest input has an
                adapter, the batch is empty.
            seconds: predicts a batch's seconds. Groups of other lengths join if one batch is
                predicted to cost less than two. None: no group joins.
        """
        if not self._by_input or (self.oldest.input.adapter is not None and not max_adapters):
            return []
        first = bisect.bisect_left(self._by_length, self.oldest.key)
        begin, end = self._widen(first, max_tokens, max_adapters)
        if seconds is not None:
            begin, end = self._join_groups(begin, end, max_tokens, max_adapters, seconds)
        batch = [waiting for _, _, waiting in self._by_length[begin:end]]
        for waiting in batch:
            self._forget(waiting)
        return batch

    def _widen(self, first: int, max_tokens: int, max_adapters: int) -> tuple[int, int]:
        """Return the inputs that run with the one at ``first``, as a slice of ``_by_length``.

        The neighbour that adds fewer tokens joins next; a longer one pads all others.
        """
        lengths = self._by_length
        begin, end = first, first + 1
        # None is the base model, which needs no slot.
        adapters = {None, self._adapter(first)}

        def joins(place: int, shortest: int, longest: int) -> bool:
            joined = adapters | {self._adapter(place)}
            return _is_near(shortest, longest) and len(joined) <= max_adapters + 1

        while True:
            count, longest = end - begin, lengths[end - 1][0]
            costs: list[tuple[int, int, int]] = []
            if begin > 0 and joins(begin - 1, lengths[begin - 1][0], longest):
                costs.append(((count + 1) * longest, begin - 1, end))
            if end < len(lengths) and joins(end, lengths[begin][0], lengths[end][0]):
                costs.append(((count + 1) * lengths[end][0], begin, end + 1))
            cost, *wider = min(costs, default=(max_tokens + 1, begin, end))
            if cost > max_tokens:
                return begin, end
            adapters |= {self._adapter(place) for place in (wider[0], wider[1] - 1)}
            begin, end = wider

    def _join_groups(
        self, begin: int, end: int, max_tokens: int, max_adapters: int, seconds: BatchSeconds
    ) -> tuple[int, int]:
        """Return the slice widened by neighbouring groups where that saves a launch.

        A group joins as a whole: if a part of it were left, no launch would be saved.
        """

        def cost(begin: int, end: int) -> float:
            return seconds(end - begin, self._by_length[end - 1][0])

        while True:
            choices: list[tuple[float, tuple[int, int]]] = []
            for group in self._groups_beside(begin, end):
                union = min(begin, group[0]), max(end, group[1])
                saved = cost(begin, end) + cost(*group) - cost(*union)
                if saved > 0 and self._fits(union, max_tokens, max_adapters):
                    choices.append((saved, union))
            if not choices:
                return begin, end
            _, (begin, end) = max(choices)

    def _groups_beside(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the groups of similar length next to a slice, below and above it, as slices."""
        lengths = self._by_length
        if begin > 0:
            low = begin - 1
            while low > 0 and _is_near(lengths[low - 1][0], lengths[begin - 1][0]):
                low -= 1
            yield low, begin
        if end < len(lengths):
            high = end + 1
            while high < len(lengths) and _is_near(lengths[end][0], lengths[high][0]):
                high += 1
            yield end, high

    def _fits(self, part: tuple[int, int], max_tokens: int, max_adapters: int) -> bool:
        """True if a slice is within the limits of a batch."""
        begin, end = part
        if (end - begin) * self._by_length[end - 1][0] > max_tokens:
            return False
        adapters = {self._adapter(place) for place in range(begin, end)} - {None}
        return len(adapters) <= max_adapters

    def _adapter(self, place: int) -> str | None:
        """Return the adapter of the input at this place of ``_by_length``."""
        return self._by_length[place][2].input.adapter

    def _forget(self, waiting: WaitingInput) -> None:
        del self._by_input[waiting.input]
        self.num_tokens -= len(waiting.input.token_ids)
        del self._by_length[bisect.bisect_left(self._by_length, waiting.key)]


def _is_near(shortest: int, longest: int) -> bool:
    return longest - shortest <= max(FREE_PADDING, longest // MAX_PADDING_SHARE)
