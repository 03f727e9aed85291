"""Block tables of successive steps, as rows of one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_TABLE = 8


def table_length(longest: int) -> int:
    """Return the bucket for tables of up to ``longest`` blocks, a power of two."""
    return max(MIN_TABLE, 1 << (longest - 1).bit_length())


class HeldTables:
    """Copies only the block tables that changed since the last step; most do not."""

    def __init__(self) -> None:
        self._tables = np.zeros((0, 0), dtype=np.int32)
        self._held: list[tuple[int, ...]] = []

    def rows(self, tables: Sequence[tuple[int, ...]], num_rows: int) -> np.ndarray:
        """Return the tables, int32 ``[num_rows, M]``; a view that is valid until the next call.

        M is a power of two. Entries after a table are ids of arbitrary blocks.
        """
        width = table_length(max(map(len, tables), default=1))
        if num_rows > self._tables.shape[0] or width > self._tables.shape[1]:
            shape = (max(num_rows, len(self._held)), max(width, self._tables.shape[1]))
            self._tables = np.zeros(shape, dtype=np.int32)
            self._held = [()] * shape[0]
        for row, table in enumerate(tables):
            # A sequence's table is the same object until it changes.
            if table is not self._held[row]:
                self._tables[row, : len(table)] = table
                self._held[row] = table
        return self._tables[:num_rows, :width]
