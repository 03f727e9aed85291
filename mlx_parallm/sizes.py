"""Sizes of which there are few, for devices that prepare something for each."""

from __future__ import annotations


def rounded_up(count: int, least: int, parts: int) -> int:
    """The next multiple of ``least``, or of so many parts of the next power of two."""
    multiple = max(least, (1 << (count - 1).bit_length()) // parts)
    return -(-count // multiple) * multiple
