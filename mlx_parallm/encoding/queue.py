"""Which inputs an encoder runs next: of similar length, within a budget of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Container
from dataclasses import dataclass, field

from mlx_parallm.encode import EncodeInput, EncodeRequest

# An input joins a batch where padding it costs so little of the batch's length, or so few tokens,
# as launching a batch costs everywhere; and where launching one of its own would cost more.
MAX_PADDING_SHARE = 4
FREE_PADDING = 16


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
        self, max_tokens: int, *, max_adapters: int = 1, free_padding: int = 0
    ) -> list[WaitingInput]:
        """The next batch: the input that waits longest, and others near its length.

        Others join too while all padding of the batch is at most ``free_padding`` tokens.

        The batch's inputs, padded to the longest, have at most ``max_tokens`` together; the one
        that waits longest runs whatever its length. They have at most ``max_adapters``; there is no
        batch if that is 0 and the input that waits longest has one. Sorted by length.
        """
        oldest = next(iter(self._by_number.values()), None)
        if oldest is None or (oldest.input.adapter is not None and not max_adapters):
            return []
        first = bisect.bisect_left(self._by_length, oldest.key)
        begin, end = self._widen(first, max_tokens, max_adapters, free_padding)
        batch = [self._by_number[number] for _, number in self._by_length[begin:end]]
        for waiting in batch:
            self._forget(waiting)
        return batch

    def _widen(
        self, first: int, max_tokens: int, max_adapters: int, free_padding: int
    ) -> tuple[int, int]:
        """The neighbours of an input that run with it, as a slice of ``_by_length``.

        Whichever neighbour costs fewer tokens joins next; a longer one is paid for by all.
        """
        lengths = self._by_length
        begin, end = first, first + 1
        # The model as it is takes no slot.
        adapters = {None, self._adapter(first)}
        num_tokens = lengths[first][0]

        def joins(place: int, shortest: int, longest: int) -> bool:
            padding = (end - begin + 1) * longest - num_tokens - lengths[place][0]
            wanted = adapters | {self._adapter(place)}
            is_cheap = _is_near(shortest, longest) or padding <= free_padding
            return is_cheap and len(wanted) <= max_adapters + 1

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
            (joined,) = {wider[0], wider[1] - 1} - {begin, end - 1}
            adapters.add(self._adapter(joined))
            num_tokens += lengths[joined][0]
            begin, end = wider

    def _adapter(self, place: int) -> str | None:
        """Of the input that is there in ``_by_length``."""
        return self._by_number[self._by_length[place][1]].input.adapter

    def _forget(self, waiting: WaitingInput) -> None:
        del self._by_input[waiting.input], self._by_number[waiting.number]
        self._num_tokens -= len(waiting.input.token_ids)
        del self._by_length[bisect.bisect_left(self._by_length, waiting.key)]


def _is_near(shortest: int, longest: int) -> bool:
    return longest - shortest <= max(FREE_PADDING, longest // MAX_PADDING_SHARE)
