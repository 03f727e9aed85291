"""How many rows the forward of a step of decode rows has."""

from __future__ import annotations

#: A step is padded to the next of these; a larger one to the next multiple of the last.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def padded_rows(count: int) -> int:
    """The number of rows that a step of ``count`` sequences is given."""
    largest = ROW_COUNTS[-1]
    if count > largest:
        return -(-count // largest) * largest
    return next(rows for rows in ROW_COUNTS if rows >= count)
