"""Shape bucketing: CUDA pays once per new shape, so sizes are rounded to few buckets."""

from __future__ import annotations

# COUNTS_PER_OCTAVE: buckets of ``coarse`` from one power of two to the next; a bucket is at most a
# quarter below the size.
COUNTS_PER_OCTAVE = 4


def rounded_up(count: int, least: int, parts: int) -> int:
    """Return ``count`` rounded up to a multiple of ``max(least, next power of two // parts)``."""
    multiple = max(least, (1 << (count - 1).bit_length()) // parts)
    return -(-count // multiple) * multiple


def coarse(count: int) -> int:
    """Return ``count`` rounded down to a bucket."""
    step = max(1, (1 << count.bit_length()) // (2 * COUNTS_PER_OCTAVE))
    return count // step * step
