"""A Bloom filter of the blocks that a server has: the others ask only for what it may have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

#: ``UID_BYTES``: of the name of a server's run, which is sent before its filter.
UID_BYTES: Final = 16
#: ``FILTER_BYTES``: with 100,000 blocks, one of 12 that are not there seems to be there.
FILTER_BYTES: Final = 64 * 1024
# POSITION_BITS, NUM_POSITIONS: of the number of a bit, and bits of a content. Contents are digests,
# so their own bits are as good as those of another hash.
POSITION_BITS, NUM_POSITIONS = 19, 4
MASK = (1 << POSITION_BITS) - 1
HALF = 16
#: ``MAX_CONTENTS``: a filter of more says little: of four times as many, four of five that are not
#: there seem to be there.
MAX_CONTENTS: Final = 100_000
# MOST_GONE: share of contents that may be gone.
MOST_GONE = 0.1

assert FILTER_BYTES * 8 == 1 << POSITION_BITS, "a position is the number of a bit"


class ContentFilter:
    """Contents of which some that are asked for are there, and all others are not."""

    def __init__(self, bits: bytes = b"") -> None:
        """``bits``: what ``filter_bytes`` returned; nothing for a filter without contents."""
        self._bits = bits

    @property
    def size(self) -> int:
        """Return about how many contents there are, by the bits that are set."""
        num_free = FILTER_BYTES * 8 - int.from_bytes(self._bits).bit_count()
        return round(
            -math.log(max(1, num_free) / (FILTER_BYTES * 8)) * FILTER_BYTES * 8 / NUM_POSITIONS
        )

    def __contains__(self, content: bytes) -> bool:
        """True if a content may be there."""
        bits = self._bits
        if not bits:
            return False
        return all(bits[place >> 3] >> (place & 7) & 1 for place in _positions(content))


class FilterMaker:
    """Makes a filter of contents again and again, of which only new ones take time.

    Contents that are gone stay in it until they are a tenth: they are asked for in vain.
    """

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._bits = bytearray(FILTER_BYTES)

    def make(self, contents: Iterable[bytes]) -> bytes:
        """Return the filter of contents."""
        now = set(contents)
        if len(self._known - now) > MOST_GONE * len(now):
            self._known.clear()
            self._bits = bytearray(FILTER_BYTES)
        bits = self._bits
        for content in now - self._known:
            for place in _positions(content):
                bits[place >> 3] |= 1 << (place & 7)
        self._known |= now
        return bytes(bits)


def filter_bytes(contents: Iterable[bytes]) -> bytes:
    """Return the filter of contents."""
    return FilterMaker().make(contents)


def union_of(filters: Sequence[bytes]) -> bytes:
    """Return the filter of all contents of filters."""
    bits = 0
    for each in filters:
        bits |= int.from_bytes(each)
    return bits.to_bytes(FILTER_BYTES)


def _positions(content: bytes) -> Iterator[int]:
    # Chains of equal tokens have equal second halves, whatever computed them.
    number = int.from_bytes(content[:HALF]) ^ int.from_bytes(content[HALF:])
    for index in range(NUM_POSITIONS):
        yield number >> (index * POSITION_BITS) & MASK
