"""Division of one request's samples or inputs among engines. Pure Python, without a clock."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# LEAST_TOKENS: tokens of inputs for which one more engine pays. Fewer are one batch, which takes
# hardly longer than a half of it.
LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Share:
    """The samples or inputs of one request that one engine is to have.

    Attributes:
        rank: the engine's number.
        places: their indices in the request, in ascending order; those of samples have no gaps.
    """

    rank: int
    places: Sequence[int]

    @property
    def first(self) -> int:
        """The index of the first of them."""
        return self.places[0]

    @property
    def count(self) -> int:
        """Number of them."""
        return len(self.places)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could have samples of a request. Costs are counted in rows.

    Attributes:
        rank: the engine's number.
        waiting: rows of prompts that wait there.
        uncached: tokens of the request's prompt that it would have to compute.
        num_open: samples that it has.
        max_num_seqs: samples that it runs at the same time.
        sample_rows: rows of a whole sample of others.
    """

    rank: int
    waiting: int
    uncached: int
    num_open: int
    max_num_seqs: int
    sample_rows: float

    def end(self, count: int, rows: float) -> float:
        """Return the rows until ``count`` samples of the request end, each of which takes some."""
        return self.waiting + self.uncached + self.others(count) + count * rows

    def others(self, count: int) -> float:
        """Return the rows of other samples before ``count`` more would end."""
        beyond = max(0, self.num_open + count - self.max_num_seqs)
        # A sample that runs is half over, in the mean; those beyond the limit wait for others.
        return (self.num_open / 2 + min(beyond, self.num_open)) * self.sample_rows

    @property
    def price(self) -> int:
        """Return what one more prompt costs: its rows, for itself and each sample beside it."""
        return self.uncached * (1 + self.num_open)


def divide(candidates: Sequence[Candidate], num_samples: int, rows: float) -> list[Share]:
    """Return one share for each engine that is to have samples, in the order of the samples.

    They are divided if all of them end sooner together by more than the further prompts cost.

    Args:
        candidates: the engine that would have the request as a whole, then the others, those that
            begin soonest first.
        num_samples: of the request.
        rows: that each of them takes.
    """
    first = candidates[0]
    shares, least = [Share(first.rank, range(num_samples))], 0.0
    whole_end = first.end(num_samples, rows)
    price = 0
    for count in range(2, min(len(candidates), num_samples) + 1):
        price += candidates[count - 1].price
        divided, end = _level(candidates[:count], num_samples, rows)
        cost = price - num_samples * (whole_end - end)
        if cost < least:
            shares, least = divided, cost
    return shares


def _level(
    candidates: Sequence[Candidate], num_samples: int, rows: float
) -> tuple[list[Share], float]:
    """Let engines end their samples at nearly the same time; return the shares and the last end."""
    ends = [(candidate.end(1, rows), place) for place, candidate in enumerate(candidates)]
    heapq.heapify(ends)
    counts = [0] * len(candidates)
    last = 0.0
    for _ in range(num_samples):
        end, place = ends[0]
        last = max(last, end)
        counts[place] += 1
        heapq.heapreplace(ends, (candidates[place].end(counts[place] + 1, rows), place))
    shares: list[Share] = []
    first = 0
    for candidate, count in zip(candidates, counts, strict=True):
        if count:
            shares.append(Share(candidate.rank, range(first, first + count)))
            first += count
    return shares, last


def divide_inputs(before: Mapping[int, float], costs: Mapping[int, Sequence[int]]) -> list[Share]:
    """Return one share for each engine that is to have inputs of a request, in no order.

    Every input goes where the inputs so far end soonest, the longest first. A result that an engine
    keeps costs nothing there.

    Args:
        before: the rows before the request begins, by the numbers of engines; the first one would
            have the request as a whole.
        costs: tokens of each input that an engine would have to compute, by its number.
    """
    first = next(iter(before))
    others = sorted((rank for rank in before if rank != first), key=before.__getitem__)
    count = sum(costs[first]) // LEAST_TOKENS
    ends = {rank: before[rank] for rank in [first, *others][: max(1, count)]}
    places: dict[int, list[int]] = {rank: [] for rank in ends}
    for place in sorted(range(len(costs[first])), key=lambda place: -costs[first][place]):
        rank = min(ends, key=lambda rank: ends[rank] + costs[rank][place])
        ends[rank] += costs[rank][place]
        places[rank].append(place)
    return [Share(rank, sorted(own)) for rank, own in places.items() if own]
