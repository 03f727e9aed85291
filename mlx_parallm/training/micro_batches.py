"""Cuts a step's batch into forwards: by lengths and a token budget, and never by load.

The number of rows of a product decides its rounding, so a session that is run again must cut its
batches in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_parallm.types.training import Segment

# LEAST_SHARE: a row that is shorter than this share of the longest begins a new forward.
LEAST_SHARE = 0.8
# LEAST_ROWS: fewest rows of each segment before padding is worth a new forward.
LEAST_ROWS = 2


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
    def num_tokens(self) -> int:
        """The tokens of its forward, padding included."""
        return sum(len(segment.rows) for segment in self.segments) * self.length


def micro_batches(
    lengths: Sequence[int], segments: Sequence[Segment], max_tokens: int
) -> list[MicroBatch]:
    """Return forwards that have all rows of all segments, with the signs of a row together.

    Args:
        lengths: tokens of each input of the batch.
        segments: all have equally many rows.
        max_tokens: most tokens of a forward; a pair of rows may have more.
    """
    most = max(2, max_tokens // max(lengths))
    return [
        _micro_batch(lengths, segments, places, parts)
        for first in range(0, len(segments), most)
        for places in [range(first, min(first + most, len(segments)))]
        for parts in _cut(lengths, [segments[place] for place in places], max_tokens)
    ]


def naive_batches(lengths: Sequence[int], segments: Sequence[Segment]) -> list[MicroBatch]:
    """Return a forward for each segment, padded to the longest input: what others compute."""
    return [
        _micro_batch(lengths, segments, [place], [segment.rows])
        for place, segment in enumerate(segments)
    ]


def _cut(
    lengths: Sequence[int], segments: Sequence[Segment], max_tokens: int
) -> Iterator[list[list[int]]]:
    """Yield the rows of each segment that are in a forward: equally many, of like lengths."""
    ordered = [sorted(segment.rows, key=lambda row: -lengths[row]) for segment in segments]
    longest = [max(lengths[row] for row in rows) for rows in zip(*ordered, strict=True)]
    begin = 0
    for end in range(1, len(longest) + 1):
        if end < len(longest) and not _breaks(longest, begin, end, max_tokens // len(segments)):
            continue
        yield [rows[begin:end] for rows in ordered]
        begin = end


def _breaks(longest: Sequence[int], begin: int, end: int, max_tokens: int) -> bool:
    """True if the row at ``end`` begins a new forward."""
    if (end + 1 - begin) * longest[begin] > max_tokens:
        return True
    return end - begin >= LEAST_ROWS and longest[end] < LEAST_SHARE * longest[begin]


def _micro_batch(
    lengths: Sequence[int],
    segments: Sequence[Segment],
    places: Sequence[int],
    parts: Sequence[Sequence[int]],
) -> MicroBatch:
    rows = tuple(sorted({row for part in parts for row in part}))
    at = {row: index for index, row in enumerate(rows)}
    own = tuple(
        Segment(segments[place].direction, segments[place].sign, tuple(at[row] for row in part))
        for place, part in zip(places, parts, strict=True)
    )
    return MicroBatch(rows, own, tuple(places), max(lengths[row] for row in rows))
