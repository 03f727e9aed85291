"""Sets of characters as ranges of code points."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

#: ``Ranges``: sorted, apart, both ends included.
Ranges = tuple[tuple[int, int], ...]

MAX_CODE = 0x10FFFF
EVERY: Ranges = ((0, MAX_CODE),)
NO_LINE_BREAK: Ranges = ((0, 9), (11, MAX_CODE))
DIGITS: Ranges = ((48, 57),)
WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
BEYOND_ASCII: Ranges = ((128, MAX_CODE),)
SPACES: Ranges = ((9, 13), (32, 32))


def union(parts: Iterable[Ranges]) -> Ranges:
    """Return the characters in any of several sets."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(each for part in parts for each in part):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def others(ranges: Ranges) -> Ranges:
    """Return the characters that are not in a set."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    return (*gaps, (start, MAX_CODE)) if start <= MAX_CODE else tuple(gaps)


def has(ranges: Ranges, code: int) -> bool:
    """True if a character is in a set."""
    place = bisect.bisect_right(ranges, (code, MAX_CODE)) - 1
    return place >= 0 and code <= ranges[place][1]


def either_case(ranges: Ranges) -> Ranges:
    """Return a set with the other case of its ASCII letters."""
    more: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last, shift in ((65, 90, 32), (97, 122, -32)):
            if max(low, first) <= min(high, last):
                more.append((max(low, first) + shift, min(high, last) + shift))
    return union([ranges, tuple(more)])
