"""Paddings hold what they are for, grow with it, and are few."""

from __future__ import annotations

from mlx_parallm.runner.row_counts import (
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


def test_tables_are_padded_by_a_quarter_at_most() -> None:
    padded = [padded_blocks(count) for count in range(1, 4097)]
    for count, blocks in enumerate(padded, 1):
        assert count <= blocks <= max(count * 5 / 4, count + MIN_BLOCKS - 1)
    assert padded == sorted(padded)
    assert len(set(padded)) <= 40


def test_tokens_are_padded_by_an_eighth_at_most() -> None:
    padded = [padded_tokens(count) for count in range(1, 8193)]
    for count, tokens in enumerate(padded, 1):
        assert count <= tokens <= max(count * 9 / 8, count + MIN_TOKENS - 1)
    assert padded == sorted(padded)
    assert len(set(padded)) <= 60
