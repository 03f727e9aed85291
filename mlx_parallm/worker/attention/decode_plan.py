"""Index arrays of a step in which each sequence decodes one token, padded to a bucket of rows.

They are arguments of a compiled forward: their shapes depend on the number of rows and on the
bucket of the longest block table, but on no other length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.chunk_plan import LongChunk
from mlx_parallm.worker.attention.kernel_plan import (
    Division,
    HeldTables,
    Work,
    WorkKind,
    row_work,
)


@dataclass(slots=True)
class DecodePlan:
    """A ``KernelPlan`` of single rows; rows after the last sequence are padding.

    Padding is not written, and attends to one key of the first block in its table.
    """

    slots: mx.array
    tables: mx.array
    num_rows: int
    works: dict[WorkKind, Work]
    chunks: list[LongChunk] = field(default_factory=list)
    order: None = None

    def work(self, window: int | None, division: Division, has_positions: bool = False) -> Work:
        """See ``KernelPlan.work``; raise KeyError for a kind that was not planned."""
        return self.works[window, division, has_positions]

    def by_rows(self) -> DecodePlan:
        """See ``KernelPlan.by_rows``."""
        return self

    @classmethod
    def of(cls, arrays: Sequence[mx.array], kinds: Sequence[WorkKind]) -> DecodePlan:
        """Return the plan of what ``DecodeRows.arrays`` made, as arrays or their placeholders."""
        slots, tables, *others = arrays
        pairs = zip(others[::2], others[1::2], strict=True)
        works = {
            kind: Work(items, spans if spans.size else None)
            for kind, (items, spans) in zip(kinds, pairs, strict=True)
        }
        return cls(slots, tables, slots.shape[0], works)


class DecodeRows:
    """Makes the arrays of successive steps; unchanged block tables are not copied again."""

    def __init__(self, block_size: int, tables: HeldTables) -> None:
        self._block_size = block_size
        self._tables = tables

    def arrays(
        self,
        sequences: Sequence[ScheduledSequence],
        positions: np.ndarray,
        kinds: Sequence[WorkKind],
    ) -> list[np.ndarray]:
        """Return slots ``[T]``, tables ``[T, M]``, then items and spans of each kind, all int32.

        Spans have no rows if row i has item i.
        """
        num_rows = len(positions)
        tables = self._tables.rows([sequence.block_table for sequence in sequences], num_rows)
        rows = np.arange(num_rows)
        blocks = tables[rows, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        slots[len(sequences) :] = -1
        arrays = [slots, tables]
        for kind in kinds:
            items, spans = row_work(rows, rows, positions + 1, kind)
            arrays += [items, np.zeros((0, 2)) if spans is None else spans]
        return [array.astype(np.int32) for array in arrays]
