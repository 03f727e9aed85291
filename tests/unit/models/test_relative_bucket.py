"""The buckets of MPNet's relative positions, against the formula with logarithms."""

from __future__ import annotations

import math

from mlx_parallm.models.mpnet import relative_bucket


def test_the_nearest_have_buckets_of_their_own() -> None:
    assert [relative_bucket(d) for d in range(-7, 8)] == [*range(7, -1, -1), *range(17, 24)]


def test_farther_buckets_grow_by_the_square_root_of_two() -> None:
    for away in range(8, 600):
        # Powers of two are whole numbers here; the small addend keeps rounding from lowering them.
        expected = min(8 + math.floor(8 * math.log(away / 8, 16) + 1e-9), 15)
        assert relative_bucket(-away) == expected
        assert relative_bucket(away) == expected + 16
