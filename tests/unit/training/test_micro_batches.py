"""A step's batch is cut into forwards."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.training.mezo.estimator import Estimator
from mlx_parallm.training.micro_batches import MicroBatch, micro_batches, naive_batches
from mlx_parallm.training.settings import MezoSettings, Sides
from mlx_parallm.types.training import ForwardSize, Segment


def covered(batches: list[MicroBatch], segments: tuple[Segment, ...]) -> None:
    """Assert that each segment has each of its rows once."""
    seen: list[list[int]] = [[] for _ in segments]
    for batch in batches:
        for place, segment in zip(batch.places, batch.segments, strict=True):
            expected = segments[place]
            assert (segment.direction, segment.sign) == (expected.direction, expected.sign)
            seen[place] += [batch.rows[row] for row in segment.rows]
    assert [sorted(rows) for rows in seen] == [sorted(segment.rows) for segment in segments]


@given(
    lengths=st.lists(st.integers(1, 200), min_size=4, max_size=32),
    sides=st.sampled_from(Sides),
    directions=st.integers(1, 4),
    splits=st.booleans(),
    max_tokens=st.integers(1, 4096),
    cost=st.integers(0, 4096),
)
def test_every_row_of_every_copy_is_computed_once(
    lengths: list[int], sides: Sides, directions: int, splits: bool, max_tokens: int, cost: int
) -> None:
    lengths = lengths[: len(lengths) // directions * directions]
    settings = MezoSettings(sides=sides, num_directions=directions, splits_batch=splits)
    segments = Estimator(settings).segments(len(lengths))
    batches = micro_batches(lengths, segments, ForwardSize(max_tokens, cost))
    covered(batches, segments)
    for batch in batches:
        counts = {len(segment.rows) for segment in batch.segments}
        assert len(counts) == 1
        assert batch.length == max(lengths[row] for row in batch.rows)
        # Only a pair of rows may be larger than the budget.
        assert batch.num_tokens <= max(max_tokens, 2 * batch.length)
    covered(naive_batches(lengths, segments), segments)


def test_rows_of_like_lengths_share_a_forward() -> None:
    segments = Estimator(MezoSettings()).segments(6)
    batches = micro_batches([10, 100, 11, 99, 12, 98], segments, ForwardSize(10_000, 32))
    assert [batch.rows for batch in batches] == [(1, 3, 5), (0, 2, 4)]
    assert sum(batch.num_tokens for batch in batches) == 2 * 3 * (100 + 12)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9), st.integers(0, 300))
def test_no_other_cut_costs_less(lengths: list[int], cost: int) -> None:
    segments = Estimator(MezoSettings()).segments(len(lengths))
    batches = micro_batches(lengths, segments, ForwardSize(10_000, cost))
    ordered = sorted(lengths, reverse=True)
    every = [
        [0, *(place for place in range(1, len(lengths)) if bits >> place & 1), len(lengths)]
        for bits in range(0, 1 << len(lengths), 2)
    ]
    least = min(
        sum(cost + 2 * (end - begin) * ordered[begin] for begin, end in pairwise(places))
        for places in every
    )
    assert sum(cost + batch.num_tokens for batch in batches) == least


def test_a_costly_forward_is_not_divided() -> None:
    segments = Estimator(MezoSettings()).segments(6)
    lengths = [10, 100, 11, 99, 12, 98]
    assert len(micro_batches(lengths, segments, ForwardSize(10_000, 2048))) == 1


def test_naive_forwards_are_padded_to_the_longest() -> None:
    segments = Estimator(MezoSettings()).segments(3)
    assert [batch.num_tokens for batch in naive_batches([10, 100, 10], segments)] == [300, 300]
