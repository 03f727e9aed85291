"""Paddings hold what they are for, grow with it, and are few."""

from __future__ import annotations

from mlx_parallm.types.shape_buckets import (
    MIN_BLOCKS,
    padded_blocks,
    padded_rows,
    padded_tokens,
    unpadded_tokens,
)


def test_rows_are_padded_to_few_numbers() -> None:
    padded = [padded_rows(count) for count in range(1, 1025)]
    assert all(rows >= count for count, rows in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert len(set(padded)) < 20


def test_tables_are_padded_by_a_quarter_at_most() -> None:
    padded = [padded_blocks(count) for count in range(1, 4097)]
    for count, length in enumerate(padded, 1):
        assert count <= length <= max(count * 5 / 4, count + MIN_BLOCKS - 1)
    assert padded == sorted(padded)
    assert len(set(padded)) <= 40


def test_steps_with_prompts_have_numbers_that_the_kernels_of_decode_rows_serve() -> None:
    padded = [padded_tokens(count) for count in range(1, 16_385)]
    for count, rows in enumerate(padded, 1):
        assert count <= rows <= max(count * 9 / 8, padded_rows(count))
        assert padded_rows(rows) == rows
    assert padded == sorted(padded)
    assert len(set(padded)) <= 50


def test_the_most_tokens_without_padding_are_found() -> None:
    padded = {padded_tokens(count) for count in range(1, 16_385)}
    fewer = 0
    for count in range(1, 16_385):
        fewer = count if count in padded else fewer
        assert unpadded_tokens(count) == fewer
