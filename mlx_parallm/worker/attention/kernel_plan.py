"""Index arrays of one step, for the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.chunk_plan import (
    LARGE_WORK,
    LONG_CHUNK,
    ChunkWork,
    LongChunk,
    chunk_work,
    int32,
    output_order,
    slots_of,
)
from mlx_parallm.worker.attention.key_spans import MIN_SPAN, cut_items, decode_span, offsets

MIN_TABLE = 8


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an attention kernel's threadgroups.

    Attributes:
        items: int32 ``[W, 4]``: query row, row of the block table, first key, end of keys; with
            positions ``[W, 5]``, the last of which is the row's, wherever its keys are cut.
        spans: each row's first item and number of items, int32 ``[R, 2]``; None if row i has item
            i.
    """

    items: mx.array
    spans: mx.array | None


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a step's keys among threadgroups.

    Attributes:
        heads: threadgroups per item.
        threadgroups: how many shall run at once.
        least_keys: of an item, if the row has as many.
    """

    heads: int
    threadgroups: int
    least_keys: int = MIN_SPAN


#: ``WorkKind``: the arguments of ``KernelPlan.work``.
WorkKind = tuple[int | None, Division, bool]


def row_work(
    rows: np.ndarray, tables: np.ndarray, ends: np.ndarray, kind: WorkKind
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return items and spans of ``Work`` for rows that see the keys before ``ends``.

    If rows are cut, the items are padded to a number that does not depend on their keys, so that
    there are few shapes: their share of the threadgroups and, per row, what is left at both ends.
    Padding items have no keys.
    """
    window, division, has_positions = kind
    starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    share = division.heads / division.threadgroups
    span = decode_span(starts, ends, share, division.least_keys)
    items, firsts, counts = cut_items(rows, tables, starts, ends, span)
    if has_positions:
        items = np.column_stack([items, (ends - 1).repeat(counts)])
    if len(items) == len(rows):
        return items, None
    num_shares = division.threadgroups // division.heads
    size = (num_shares + 2 * len(rows), items.shape[1])
    padded = np.zeros(size, dtype=items.dtype)
    padded[: len(items)] = items
    return padded, np.stack([firsts, counts], axis=1)


class KernelPlan:
    """The rows of one step: where they are written, and what they attend to.

    Attributes:
        slots: flat pool positions of the rows, int32 ``[T]``.
        tables: int32 ``[N, M]``: block tables of the sequences with the R rows of the decode
            kernel; entries after a table are ids of arbitrary blocks.
        num_rows: R.
        chunks: the sequences of the other rows, large ones last.
        num_small: how many chunks are not large.
        order: indices that put the kernel's outputs, then the chunks', into row order; None if they
            are in order.
        padding: rows after all others, which are not written and attend to nothing.
    """

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        block_size: int,
        multiple: int = 1,
        tables: HeldTables | None = None,
        *,
        padding: int = 0,
        large_work: float = LARGE_WORK,
        long_chunk: float = LONG_CHUNK,
    ) -> None:
        """Plan a step.

        ``multiple`` is that of long chunks; ``tables`` keeps the tables of the last step; chunks
        with more than ``large_work`` are large; those of fewer rows than ``long_chunk`` are short.
        """
        self.padding = padding
        self._step = (sequences, block_size)
        self._by_rows: KernelPlan | None = None
        counts = np.array([len(sequence.token_ids) for sequence in sequences])
        firsts = offsets(counts)
        is_short = counts < long_chunk
        chunks = [
            LongChunk(
                int(firsts[i]), int(counts[i]), sequence.start, sequence.block_table, multiple
            )
            for i, sequence in enumerate(sequences)
            if not is_short[i]
        ]
        self.chunks = sorted(chunks, key=lambda chunk: chunk.work > large_work)
        self.num_small = sum(chunk.work <= large_work for chunk in chunks)
        short = [sequence for i, sequence in enumerate(sequences) if is_short[i]]
        held = (tables or HeldTables()).rows([row.block_table for row in short], len(short))
        self.tables = mx.array(held)
        self._add_short_rows(short, firsts[is_short], counts[is_short])
        slots = np.full(counts.sum() + padding, -1, dtype=np.int32)
        slots[self._rows] = slots_of(held, self._sequences, self._ends - 1, block_size)
        for chunk in chunks:
            slots[chunk.first : chunk.first + chunk.length] = chunk.slots(block_size)
        self.slots = mx.array(slots)
        rows = [
            self._rows,
            *(np.arange(chunk.first, chunk.first + chunk.length) for chunk in self.chunks),
        ]
        self.order = output_order(np.concatenate(rows))
        self._work: dict[WorkKind, Work] = {}
        self._chunk_work: dict[tuple[int, int, int | None, int], ChunkWork] = {}
        self._zeros: dict[tuple[int, int, mx.Dtype], mx.array] = {}

    def _add_short_rows(
        self, short: Sequence[ScheduledSequence], firsts: np.ndarray, counts: np.ndarray
    ) -> None:
        """Set the rows of the decode kernel, their sequences, and the ends of their keys."""
        within = np.arange(counts.sum()) - offsets(counts).repeat(counts)
        self._rows = firsts.repeat(counts) + within
        self._sequences = np.arange(len(short)).repeat(counts)
        starts = np.array([sequence.start for sequence in short], dtype=int)
        self._ends = starts.repeat(counts) + within + 1
        self.num_rows = len(self._rows)

    def work(self, window: int | None, division: Division, has_positions: bool = False) -> Work:
        """Return the items of attention within ``window``; cached for the layers of a step.

        Args:
            window: as in ``AttentionBackend.attend``.
            division: how keys are divided.
            has_positions: True if items have the positions of their rows.
        """
        key = (window, division, has_positions)
        if key not in self._work:
            items, spans = row_work(self._rows, self._sequences, self._ends, key)
            self._work[key] = Work(int32(items), None if spans is None else int32(spans))
        return self._work[key]

    def by_rows(self) -> KernelPlan:
        """Return this step with its long chunks as rows of the decode kernel; cached.

        Only that kernel has a bias by distance.
        """
        if not self.chunks:
            return self
        if self._by_rows is None:
            self._by_rows = KernelPlan(*self._step, padding=self.padding, long_chunk=math.inf)
        return self._by_rows

    def chunk_work(
        self, tokens: int, count: int, window: int | None, threadgroups: int
    ) -> ChunkWork:
        """Return the first ``count`` long chunks in pieces of up to ``tokens``; cached.

        If the pieces are too few to keep ``threadgroups`` busy, keys within ``window`` are cut; see
        ``prefill_span``.
        """
        key = (tokens, count, window, threadgroups)
        if key not in self._chunk_work:
            self._chunk_work[key] = chunk_work(self.chunks[:count], tokens, window, threadgroups)
        return self._chunk_work[key]

    def padding_rows(self, heads: int, value_dim: int, dtype: mx.Dtype) -> mx.array:
        """Return the attention output of padding, ``[padding, H, 1, V]``; cached."""
        key = (heads, value_dim, dtype)
        if key not in self._zeros:
            self._zeros[key] = mx.zeros((self.padding, heads, 1, value_dim), dtype)
        return self._zeros[key]

    @property
    def kinds(self) -> tuple[WorkKind, ...]:
        """Return the arguments of all calls of ``work`` so far."""
        return tuple(self._work)


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
