"""Rows that attend together are split by length, none lost, none twice, and never at a loss."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.decode_groups import make_decode_groups, split_by_length

LENGTHS = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    st.lists(st.sampled_from([1, 2, 500, 501, 8000]), min_size=1, max_size=40),
)
MIN_SAVED = st.integers(1, 500)


def split(lengths: list[int], min_saved: int) -> list[list[int]]:
    return [part.tolist() for part in split_by_length(np.array(lengths), min_saved)]


def padded(lengths: list[int], parts: list[list[int]]) -> int:
    """Positions read when each part is padded to its longest."""
    return sum(len(part) * max(lengths[i] for i in part) for part in parts)


def most_saved(lengths: list[int]) -> int:
    """Return the tokens that the best cut in two saves."""
    down = sorted(lengths, reverse=True)
    return max(((len(down) - i) * (down[0] - down[i]) for i in range(1, len(down))), default=0)


@given(lengths=LENGTHS, min_saved=MIN_SAVED)
def test_every_index_is_in_exactly_one_part(lengths: list[int], min_saved: int) -> None:
    parts = split(lengths, min_saved)
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@given(lengths=LENGTHS, min_saved=MIN_SAVED)
def test_every_cut_saves_what_it_must(lengths: list[int], min_saved: int) -> None:
    parts = split(lengths, min_saved)
    whole = len(lengths) * max(lengths)
    assert padded(lengths, parts) <= whole - (len(parts) - 1) * min_saved


@given(lengths=LENGTHS, min_saved=MIN_SAVED)
def test_no_part_is_left_that_a_cut_would_help(lengths: list[int], min_saved: int) -> None:
    for part in split(lengths, min_saved):
        assert most_saved([lengths[i] for i in part]) < min_saved


@given(lengths=LENGTHS, min_saved=MIN_SAVED)
def test_parts_are_ranges_of_length_longest_first(lengths: list[int], min_saved: int) -> None:
    parts = split(lengths, min_saved)
    for longer, shorter in pairwise(parts):
        assert min(lengths[i] for i in longer) > max(lengths[i] for i in shorter)


@given(lengths=LENGTHS)
def test_a_single_part_keeps_the_order(lengths: list[int]) -> None:
    assert split(lengths, 10**9) == [list(range(len(lengths)))]


@given(length=st.integers(1, 100), count=st.integers(1, 20))
def test_equal_lengths_stay_together(length: int, count: int) -> None:
    assert split([length] * count, 1) == [list(range(count))]


@pytest.mark.parametrize(
    ("lengths", "min_saved", "expected"),
    [
        ([7], 1, [[0]]),
        ([10, 1, 1], 18, [[0], [1, 2]]),
        ([10, 1, 1], 19, [[0, 1, 2]]),
        ([1, 9, 5, 9], 4, [[1, 3], [2], [0]]),
        ([1, 9, 5, 9], 5, [[1, 3], [2, 0]]),
    ],
)
def test_cuts_are_made_where_most_is_saved(
    lengths: list[int], min_saved: int, expected: list[list[int]]
) -> None:
    assert split(lengths, min_saved) == expected


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    most=st.integers(1, 200),
)
def test_groups_have_at_most_so_many_tokens_unless_they_are_one_row(
    lengths: list[int], most: int
) -> None:
    firsts = np.cumsum([0, *lengths])
    sequences = [
        ScheduledSequence(
            seq_id=row,
            slot=row,
            start=4 * length - 1,
            token_ids=(0,),
            block_table=tuple(range(firsts[row], firsts[row + 1])),
        )
        for row, length in enumerate(lengths)
    ]
    rows = 10 + np.arange(len(lengths))
    groups = make_decode_groups(sequences, rows, 4, most)
    assert sorted(row for group in groups for row in group.rows) == rows.tolist()
    for group in groups:
        assert len(group.rows) == 1 or 4 * group.block_table.size <= most
        for row, table in zip(group.rows, np.array(group.block_table), strict=True):
            own = sequences[row - 10].block_table
            assert tuple(table[: len(own)].tolist()) == own
    if sum(lengths) * 4 <= most and max(lengths) * len(lengths) * 4 <= most:
        assert len(groups) == len(make_decode_groups(sequences, rows, 4))
