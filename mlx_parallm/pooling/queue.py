"""Which inputs an encoder runs next: of similar length, within a budget of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from mlx_parallm.types.pooling import EncodeInput, EncodeRequest

# An input joins a batch where padding it costs so little of the batch's length, or so few tokens:
# launching a batch costs about as much as these.
MAX_PADDING_SHARE = 4
FREE_PADDING = 16

#: What a batch takes, by the number of its inputs and the tokens of the longest.
BatchSeconds = Callable[[int, int], float]


@dataclass(slots=True, eq=False)
class WaitingInput:
    """An input that has not been computed, and everybody who asked for it.

    Attributes:
        input: the input.
        number: its place in the order of arrival.
        arrival_s: when it was first asked for.
        askers: request ids, and the places of the input in those requests.
    """

    input: EncodeInput
    number: int
    arrival_s: float = 0.0
    askers: list[tuple[str, int]] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """Sorts by length, then by arrival."""
        return len(self.input.token_ids), self.number


class EncodeQueue:
    """Inputs of all requests, each distinct one once. Not thread-safe."""

    def __init__(self) -> None:
        self._by_input: dict[EncodeInput, WaitingInput] = {}
        # The same inputs: by length, and (in the dict's own order) by arrival.
        self._by_length: list[tuple[int, int]] = []
        self._by_number: dict[int, WaitingInput] = {}
        self._count = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        """Distinct inputs that wait."""
        return len(self._by_number)

    @property
    def num_tokens(self) -> int:
        """Of all inputs that wait."""
        return self._num_tokens

    @property
    def oldest_s(self) -> float:
        """When the input arrived that waits longest; only where one waits."""
        return next(iter(self._by_number.values())).arrival_s

    @property
    def oldest_length(self) -> int:
        """Tokens of the input that waits longest; only where one waits."""
        return len(next(iter(self._by_number.values())).input.token_ids)

    def add(
        self, request: EncodeRequest, known: Container[int] = (), *, arrival_s: float = 0.0
    ) -> None:
        """Queue a request's inputs; one that waits already is computed for both.

        ``known``: places of inputs that need not be computed.
        """
        for place, one in enumerate(request.inputs):
            if place in known:
                continue
            waiting = self._by_input.get(one)
            if waiting is None:
                waiting = WaitingInput(one, self._count, arrival_s)
                self._count += 1
                self._num_tokens += len(one.token_ids)
                self._by_input[one] = self._by_number[waiting.number] = waiting
                bisect.insort(self._by_length, waiting.key)
            waiting.askers.append((request.request_id, place))

    def remove(self, request: EncodeRequest) -> None:
        """Compute nothing more for a request."""
        for given in set(request.inputs):
            waiting = self._by_input.get(given)
            if waiting is None:
                continue
            waiting.askers = [one for one in waiting.askers if one[0] != request.request_id]
            if not waiting.askers:
                self._forget(waiting)

    def take(
        self, max_tokens: int, *, max_adapters: int = 1, seconds: BatchSeconds | None = None
    ) -> list[WaitingInput]:
        """The next batch: the input that waits longest, and others near its length. Sorted by it.

        Args:
            max_tokens: of the batch's inputs together, padded to the longest; the one that waits
                longest runs whatever its length.
            max_adapters: of the batch; there is none if that is 0 and the input that waits longest
                has one.
            seconds: of a batch of so many inputs of such a length. Others that would be a batch
                join too where they cost less with this one than by themselves. None: none do.
        """
        oldest = next(iter(self._by_number.values()), None)
        if oldest is None or (oldest.input.adapter is not None and not max_adapters):
            return []
        first = bisect.bisect_left(self._by_length, oldest.key)
        begin, end = self._widen(first, max_tokens, max_adapters)
        if seconds is not None:
            begin, end = self._join_groups(begin, end, max_tokens, max_adapters, seconds)
        batch = [self._by_number[number] for _, number in self._by_length[begin:end]]
        for waiting in batch:
            self._forget(waiting)
        return batch

    def _widen(self, first: int, max_tokens: int, max_adapters: int) -> tuple[int, int]:
        """The neighbours of an input that run with it, as a slice of ``_by_length``.

        Whichever neighbour costs fewer tokens joins next; a longer one is paid for by all.
        """
        lengths = self._by_length
        begin, end = first, first + 1
        # The model as it is takes no slot.
        adapters = {None, self._adapter(first)}

        def joins(place: int, shortest: int, longest: int) -> bool:
            wanted = adapters | {self._adapter(place)}
            return _is_near(shortest, longest) and len(wanted) <= max_adapters + 1

        while True:
            count, longest = end - begin, lengths[end - 1][0]
            costs = []
            if begin > 0 and joins(begin - 1, lengths[begin - 1][0], longest):
                costs.append(((count + 1) * longest, begin - 1, end))
            if end < len(lengths) and joins(end, lengths[begin][0], lengths[end][0]):
                costs.append(((count + 1) * lengths[end][0], begin, end + 1))
            cost, *wider = min(costs, default=(max_tokens + 1, begin, end))
            if cost > max_tokens:
                return begin, end
            adapters |= {self._adapter(one) for one in (wider[0], wider[1] - 1)}
            begin, end = wider

    def _join_groups(
        self, begin: int, end: int, max_tokens: int, max_adapters: int, seconds: BatchSeconds
    ) -> tuple[int, int]:
        """The same slice with the neighbouring groups with which a launch is worth saving.

        A group comes as a whole: while some of it is left, no launch is saved.
        """

        def cost(begin: int, end: int) -> float:
            return seconds(end - begin, self._by_length[end - 1][0])

        while True:
            choices = []
            for group in self._groups_beside(begin, end):
                union = min(begin, group[0]), max(end, group[1])
                saved = cost(begin, end) + cost(*group) - cost(*union)
                if saved > 0 and self._fits(union, max_tokens, max_adapters):
                    choices.append((saved, union))
            if not choices:
                return begin, end
            _, (begin, end) = max(choices)

    def _groups_beside(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The inputs of similar length next to a slice, below and above it, as slices."""
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
        """Whether a slice is no more than a batch."""
        begin, end = part
        if (end - begin) * self._by_length[end - 1][0] > max_tokens:
            return False
        adapters = {self._adapter(place) for place in range(begin, end)} - {None}
        return len(adapters) <= max_adapters

    def _adapter(self, place: int) -> str | None:
        """Of the input that is there in ``_by_length``."""
        return self._by_number[self._by_length[place][1]].input.adapter

    def _forget(self, waiting: WaitingInput) -> None:
        del self._by_input[waiting.input], self._by_number[waiting.number]
        self._num_tokens -= len(waiting.input.token_ids)
        del self._by_length[bisect.bisect_left(self._by_length, waiting.key)]


def _is_near(shortest: int, longest: int) -> bool:
    return longest - shortest <= max(FREE_PADDING, longest // MAX_PADDING_SHARE)
