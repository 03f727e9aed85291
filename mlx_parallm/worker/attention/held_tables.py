"""Block tables of one step after the other, as rows of one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_TABLE = 8


def table_length(longest: int) -> int:
    """How long the tables of a step are, of which the longest has so many blocks."""
    return max(MIN_TABLE, 1 << (longest - 1).bit_length())


class HeldTables:
    """Keeps the rows that stay the same from step to step, as most do."""

    def __init__(self) -> None:
        self._tables = np.zeros((0, 0), dtype=np.int32)
        self._held: list[tuple[int, ...]] = []

    def rows(self, tables: Sequence[tuple[int, ...]], num_rows: int) -> np.ndarray:
        """The tables and rows behind them, int32 ``[num_rows, M]``; a view until the next call.

        M is a power of two. What is behind a table has no meaning, but is the id of some block.
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
