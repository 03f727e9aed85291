"""Lists of integers as bytes, in the byte order of this machine, and a reader of such a list."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# NARROW, WIDE: the codes of ``array`` for signed integers of 4 and of 8 bytes.
NARROW, WIDE = "i", "q"


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return the bytes of numbers below 2**63; the first byte says how wide they are."""
    try:
        # Trying costs less than looking for the largest number.
        return NARROW.encode() + array(NARROW, numbers).tobytes()
    except OverflowError:
        return WIDE.encode() + array(WIDE, numbers).tobytes()


class NumberReader:
    """Reads numbers one after the other."""

    def __init__(self, data: bytes | memoryview) -> None:
        numbers = array(WIDE if data[:1] == WIDE.encode() else NARROW)
        numbers.frombytes(data[1:])
        self._numbers = numbers.tolist()
        self._next = 0

    def number(self) -> int:
        """Return the next number."""
        self._next += 1
        return self._numbers[self._next - 1]

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` numbers."""
        start = self._next
        self._next += count
        return self._numbers[start : self._next]
