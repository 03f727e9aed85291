"""How many rows the forward of a step of decode rows has, and how many blocks it gathers."""

from __future__ import annotations

from mlx_parallm.types.shape_buckets import rounded_up

#: A step is padded to the next of these; a larger one to the next multiple of the last.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def padded_rows(count: int) -> int:
    """The number of rows that a step of ``count`` sequences is given."""
    largest = ROW_COUNTS[-1]
    if count > largest:
        return -(-count // largest) * largest
    return next(rows for rows in ROW_COUNTS if rows >= count)


#: The tokens of a step with prompts are padded to a multiple of this, or of a sixteenth of the next
#: power of two; fewer, such as proposals that are verified, as decode rows are.
MIN_TOKENS = 16


def padded_tokens(count: int) -> int:
    """The number of rows that a step with so many tokens of prompts and decode rows is given."""
    if count < MIN_TOKENS:
        return padded_rows(count)
    return rounded_up(count, MIN_TOKENS, 16)


#: Block tables are padded to multiples of this, longer ones to an eighth of what they may grow to.
MIN_BLOCKS = 8


def padded_blocks(count: int) -> int:
    """The length that block tables are given of which the longest has ``count`` blocks."""
    return rounded_up(count, MIN_BLOCKS, 8)
