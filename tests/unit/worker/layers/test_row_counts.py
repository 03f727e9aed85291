"""Paddings hold what they are for, grow with it, and are few."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlx_parallm.types.shape_buckets import (
    MIN_BLOCKS,
    MIN_TOKENS,
    padded_blocks,
    padded_rows,
    padded_tokens,
)


def test_rows_are_padded_to_few_numbers() -> None:
    padded = [padded_rows(count) for count in range(1, 1025)]
    assert all(rows >= count for count, rows in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert len(set(padded)) < 20


@pytest.mark.parametrize(
    ("pad", "longest", "share", "least", "most"),
    [(padded_blocks, 4096, 5 / 4, MIN_BLOCKS, 40), (padded_tokens, 8192, 9 / 8, MIN_TOKENS, 60)],
    ids=["tables, a quarter", "tokens, an eighth"],
)
def test_others_are_padded_by_a_share_at_most(
    pad: Callable[[int], int], longest: int, share: float, least: int, most: int
) -> None:
    padded = [pad(count) for count in range(1, longest + 1)]
    for count, num_rows in enumerate(padded, 1):
        assert count <= num_rows <= max(count * share, count + least - 1)
    assert padded == sorted(padded)
    assert len(set(padded)) <= most
