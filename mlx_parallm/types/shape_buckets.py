"""Shape bucketing: CUDA pays once per new shape, so sizes are rounded to few buckets."""

from __future__ import annotations

# COUNTS_PER_OCTAVE: buckets of ``coarse`` from one power of two to the next; a bucket is at most a
# quarter below the size.
COUNTS_PER_OCTAVE = 4
#: A step of decode rows is padded to the next of these counts, or to a multiple of the last.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def rounded_up(count: int, least: int, parts: int) -> int:
    """Return ``count`` rounded up to a multiple of ``max(least, next power of two // parts)``."""
    multiple = max(least, (1 << (count - 1).bit_length()) // parts)
    return -(-count // multiple) * multiple


def coarse(count: int) -> int:
    """Return ``count`` rounded down to a bucket."""
    step = max(1, (1 << count.bit_length()) // (2 * COUNTS_PER_OCTAVE))
    return count // step * step


# Buckets for the shapes of a step: its rows, its tokens and the length of its block tables.
#
# CUDA pays once for every new shape, so sizes are rounded up to a few.


def padded_rows(count: int) -> int:
    """Return to how many rows a step of ``count`` decode rows is padded."""
    largest = ROW_COUNTS[-1]
    if count > largest:
        return -(-count // largest) * largest
    return next(rows for rows in ROW_COUNTS if rows >= count)


#: TOKEN_PARTS: a step with prompts is padded as decode rows are, so that the same kernels serve it,
#: or to a multiple of this part of the next power of two.
TOKEN_PARTS = 16


def padded_tokens(count: int) -> int:
    """Return to how many rows a step with ``count`` tokens of prompts and decode rows is padded."""
    largest = ROW_COUNTS[-1]
    return padded_rows(count) if count <= largest else rounded_up(count, largest, TOKEN_PARTS)


def unpadded_tokens(count: int) -> int:
    """Return the most tokens, up to ``count``, of a step with prompts that needs no padding."""
    largest = ROW_COUNTS[-1]
    if count <= largest:
        return max((rows for rows in ROW_COUNTS if rows <= count), default=0)
    multiple = max(largest, (1 << (count - 1).bit_length()) // TOKEN_PARTS)
    return count // multiple * multiple


#: Block tables are padded to a multiple of this number, or of an eighth of the next power of two.
MIN_BLOCKS = 8


def padded_blocks(count: int) -> int:
    """Return to what length block tables are padded if the longest has ``count`` blocks."""
    return rounded_up(count, MIN_BLOCKS, 8)
