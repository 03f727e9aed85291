"""Shapes of forwards over texts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.worker.pooling.forward_shapes import ForwardShapes

LONGEST = 8192


@given(st.integers(1, LONGEST))
def test_lengths_hold_the_text_and_little_more(length: int) -> None:
    padded = ForwardShapes(LONGEST, are_few=True).length(length)
    assert length <= padded <= LONGEST
    assert padded < length + max(8, length / 4)


def test_lengths_are_few() -> None:
    shapes = ForwardShapes(LONGEST, are_few=True)
    assert len({shapes.length(length) for length in range(1, LONGEST + 1)}) <= 4 * 9


@given(st.integers(1, 700))
def test_lengths_stay_within_the_model(longest: int) -> None:
    shapes = ForwardShapes(longest, are_few=True)
    assert shapes.length(longest) == longest
    # Padding of the load's own trials may be longer than what requests may send.
    assert shapes.length(longest + 1) == longest + 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300))
def test_rows_are_followed_by_the_last(rows: list[int]) -> None:
    padded = ForwardShapes(LONGEST, are_few=True).rows(np.array(rows)).tolist()
    assert padded[: len(rows)] == rows
    assert set(padded[len(rows) :]) <= {rows[-1]}


def test_other_devices_take_any_shape() -> None:
    shapes = ForwardShapes(LONGEST, are_few=False)
    assert [shapes.length(length) for length in range(1, 100)] == list(range(1, 100))
    assert shapes.rows(np.array([3, 1, 2])).tolist() == [3, 1, 2]
