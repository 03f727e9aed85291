"""Cuts a step's batch into forwards: by lengths and a token budget, and never by load.

The number of rows of a product decides its rounding, so a session that is run again must cut its
batches in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_parallm.types.training import ForwardSize, Segment


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a step that is one forward.

    Attributes:
        rows: indices of the batch's inputs that it has.
        segments: see ``Segment``; their rows are indices into ``rows``.
        places: for each segment, its index among the step's segments.
        length: tokens of the longest input.
    """

    rows: tuple[int, ...]
    segments: tuple[Segment, ...]
    places: tuple[int, ...]
    length: int

    @property
    def order(self) -> list[int]:
        """The inputs of the batch, in the order of its forward's results."""
        return [self.rows[row] for segment in self.segments for row in segment.rows]

    @property
    def num_tokens(self) -> int:
        """The tokens of its forward, padding included."""
        return sum(len(segment.rows) for segment in self.segments) * self.length


def micro_batches(
    lengths: Sequence[int], segments: Sequence[Segment], size: ForwardSize
) -> list[MicroBatch]:
    """Return forwards that have all rows of all segments, with the signs of a row together.

    Args:
        lengths: tokens of each input of the batch.
        segments: all have equally many rows.
        size: bounds the tokens of a forward, but for a pair of rows. Less padding is worth another
            forward if it saves more than that costs.
    """
    most = max(2, size.max_tokens // max(lengths))
    return [
        _micro_batch(lengths, segments, places, parts)
        for first in range(0, len(segments), most)
        for places in [range(first, min(first + most, len(segments)))]
        for parts in _cut(lengths, [segments[place] for place in places], size)
    ]


def naive_batches(lengths: Sequence[int], segments: Sequence[Segment]) -> list[MicroBatch]:
    """Return a forward for each segment, padded to the longest input: what others compute."""
    return [
        _micro_batch(lengths, segments, [place], [segment.rows])
        for place, segment in enumerate(segments)
    ]


def _cut(
    lengths: Sequence[int], segments: Sequence[Segment], size: ForwardSize
) -> Iterator[list[list[int]]]:
    """Yield the rows of each segment that are in a forward: equally many, of like lengths."""
    ordered = [sorted(segment.rows, key=lambda row: -lengths[row]) for segment in segments]
    longest = [max(lengths[row] for row in rows) for rows in zip(*ordered, strict=True)]
    max_tokens, cost = size.max_tokens // len(segments), size.cost / len(segments)
    for begin, end in _cheapest(longest, max_tokens, cost):
        yield [rows[begin:end] for rows in ordered]


def _cheapest(
    longest: Sequence[int], max_tokens: int, forward_cost: float
) -> Iterator[tuple[int, int]]:
    """Yield the first row of each part and the row after it, so that all parts cost the least.

    A part costs ``forward_cost`` and its tokens, padding included. The best cut of rows after a
    place does not depend on those before it, so the best cuts are found from the last row on.

    Args:
        longest: the length of each row, in falling order.
        max_tokens: most tokens of a part; a row may have more.
        forward_cost: see above.
    """
    count = len(longest)
    costs, ends = np.zeros(count + 1), [count] * count
    sizes = np.arange(1, count + 1)
    for begin in reversed(range(count)):
        most = min(max(1, max_tokens // longest[begin]), count - begin)
        choices = forward_cost + sizes[:most] * longest[begin]
        choices = choices + costs[begin + 1 : begin + 1 + most]
        best = int(choices.argmin())
        costs[begin], ends[begin] = choices[best], begin + 1 + best
    begin = 0
    while begin < count:
        yield begin, ends[begin]
        begin = ends[begin]


def _micro_batch(
    lengths: Sequence[int],
    segments: Sequence[Segment],
    places: Sequence[int],
    parts: Sequence[Sequence[int]],
) -> MicroBatch:
    rows = tuple(sorted({row for part in parts for row in part}))
    at = {row: index for index, row in enumerate(rows)}
    own = tuple(
        replace(segments[place], rows=tuple(at[row] for row in part))
        for place, part in zip(places, parts, strict=True)
    )
    return MicroBatch(rows, own, tuple(places), max(lengths[row] for row in rows))
