"""Sizes of which there are few, for devices that prepare something for each."""

from __future__ import annotations

# Numbers that ``coarse`` gives, between a power of two and the next.
COUNTS_PER_OCTAVE = 4


def rounded_up(count: int, least: int, parts: int) -> int:
    """The next multiple of ``least``, or of so many parts of the next power of two."""
    multiple = max(least, (1 << (count - 1).bit_length()) // parts)
    return -(-count // multiple) * multiple


def coarse(count: int) -> int:
    """The largest of few numbers that is not above ``count``."""
    step = max(1, (1 << count.bit_length()) // (2 * COUNTS_PER_OCTAVE))
    return count // step * step
