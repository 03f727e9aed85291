"""Index arrays of one step for the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.attention.held_tables import HeldTables
from mlx_parallm.batch import ScheduledSequence

# A sequence's rows from this many on attend by stock attention over gathered keys and values;
# fewer attend by the decode kernel, which reads keys and values once per row.
LONG_CHUNK = 16
# Attention is not split into fewer keys than this per threadgroup: merging would cost more.
MIN_SPAN = 64
# Query rows times keys from which on a chunk is large: at 8B shape on an H100, stock attention then
# saves 0.3 ms a layer, and 40 ms go into a shape it has not seen.
LARGE_WORK = 1 << 22


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """What the threadgroups of the prefill kernel do.

    Attributes:
        items: int32, ``[W, 8]``: first query row, number of tokens, position of the first, row of
            the block table, first key, end of keys, first part, and parts of a token. Part i is
            output row i if no keys are cut.
        tables: int32, ``[N, M]``: block tables of the long chunks.
        spans: int32, ``[rows, 2]``: each row's first part and their number; None if one each.
        num_rows: of all long chunks.
        num_parts: of all rows.
    """

    items: mx.array
    tables: mx.array
    spans: mx.array | None
    num_rows: int
    num_parts: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the threadgroups of one attention kernel do.

    Attributes:
        items: int32, ``[W, 4]``: query row, row of the block table, first key, end of keys.
        spans: int32, ``[R, 2]``: each row's first item and their number; None if row i has item i.
    """

    items: mx.array
    spans: mx.array | None


@dataclass
class LongChunk:
    """Rows ``first .. first + length - 1`` of one sequence, at positions from ``start``.

    Stock attention gets ``num_rows`` queries from position ``begin`` on: with a ``multiple`` beyond
    1 there are others around the chunk's own, so that there are few different shapes.
    """

    first: int
    length: int
    start: int
    blocks: tuple[int, ...]
    multiple: int = 1
    masks: dict[int, mx.array] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Positions that the last row sees."""
        return self.start + self.length

    @property
    def is_large(self) -> bool:
        """Whether stock attention is faster than the kernel by more than its shape may cost."""
        return self.length * (self.start + self.length / 2) > LARGE_WORK

    def slots(self, block_size: int) -> np.ndarray:
        """Flat pool positions of its tokens, ``[length]``."""
        tables = np.array([self.blocks], dtype=np.int32)
        return _slots(tables, np.array(0), np.arange(self.start, self.end), block_size)

    @property
    def begin(self) -> int:
        """Position of the first query."""
        return self.start - self.start % self.multiple

    @property
    def num_rows(self) -> int:
        """Queries."""
        return -(-(self.end - self.begin) // self.multiple) * self.multiple

    @property
    def num_keys(self) -> int:
        """Keys: up to the last query's own."""
        return self.begin + self.num_rows

    @functools.cached_property
    def table(self) -> mx.array:
        """A block table of one row."""
        return mx.array(np.array([self.blocks], dtype=np.int32))

    def mask(self, window: int | None) -> mx.array | str:
        """``"causal"``, or bool ``[num_rows, num_keys]``."""
        if window is None or window >= self.num_keys:
            return "causal"
        if window not in self.masks:
            rows = np.arange(self.begin, self.num_keys)[:, None]
            columns = np.arange(self.num_keys)
            seen: Any = (columns <= rows) & (columns > rows - window)
            self.masks[window] = mx.array(seen)
        return self.masks[window]


class KernelPlan:
    """One step's rows: where they are written and what they attend to.

    Attributes:
        slots: int32, ``[T]``: flat pool positions of the rows.
        tables: int32, ``[N, M]``: block tables of the sequences whose R rows the kernel attends
            for, and ids of any blocks behind them.
        num_rows: R.
        chunks: the sequences of the other rows, large ones last.
        order: puts the kernel's outputs and then the chunks' into row order; None where they are.
        padding: rows behind all others, which are not written and attend to nothing.
    """

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        block_size: int,
        multiple: int = 1,
        tables: HeldTables | None = None,
        *,
        padding: int = 0,
    ) -> None:
        """``multiple`` is that of long chunks; ``tables`` holds those of the step before."""
        self.padding = padding
        counts = np.array([len(one.token_ids) for one in sequences])
        firsts = offsets(counts)
        is_short = counts < LONG_CHUNK
        chunks = [
            LongChunk(int(firsts[i]), int(counts[i]), one.start, one.block_table, multiple)
            for i, one in enumerate(sequences)
            if not is_short[i]
        ]
        self.chunks = sorted(chunks, key=lambda chunk: chunk.is_large)
        short = [one for i, one in enumerate(sequences) if is_short[i]]
        held = (tables or HeldTables()).rows([one.block_table for one in short], len(short))
        self.tables = mx.array(held)
        self._add_short_rows(short, firsts[is_short], counts[is_short])
        slots = np.full(counts.sum() + padding, -1, dtype=np.int32)
        slots[self._rows] = _slots(held, self._sequences, self._ends - 1, block_size)
        for chunk in chunks:
            slots[chunk.first : chunk.first + chunk.length] = chunk.slots(block_size)
        self.slots = mx.array(slots)
        rows = [self._rows, *(np.arange(one.first, one.first + one.length) for one in self.chunks)]
        self.order = _inverse(np.concatenate(rows))
        self._work: dict[tuple[int | None, int, int], Work] = {}
        self._chunk_work: dict[tuple[int, int, int | None, int], ChunkWork] = {}
        self._zeros: dict[tuple[int, int, mx.Dtype], mx.array] = {}

    def _add_short_rows(
        self, short: Sequence[ScheduledSequence], firsts: np.ndarray, counts: np.ndarray
    ) -> None:
        """Rows of the step that the kernel attends for, their sequences, and ends of their keys."""
        within = np.arange(counts.sum()) - offsets(counts).repeat(counts)
        self._rows = firsts.repeat(counts) + within
        self._sequences = np.arange(len(short)).repeat(counts)
        starts = np.array([one.start for one in short], dtype=int)
        self._ends = starts.repeat(counts) + within + 1
        self.num_rows = len(self._rows)

    def work(self, window: int | None, heads: int, threadgroups: int) -> Work:
        """Items of attention within ``window``; made once per step for each kind of layer.

        Args:
            window: as in ``AttentionBackend.attend``.
            heads: threadgroups per item.
            threadgroups: how many are wanted.
        """
        key = (window, heads, threadgroups)
        if key not in self._work:
            starts = np.zeros_like(self._ends)
            if window is not None:
                starts = np.maximum(self._ends - window, 0)
            self._work[key] = self._split(starts, heads / threadgroups)
        return self._work[key]

    def chunk_work(
        self, tokens: int, count: int, window: int | None, threadgroups: int
    ) -> ChunkWork:
        """The first ``count`` long chunks in pieces of so many tokens; made once per step.

        Keys within ``window`` are cut so that there is an item for each of ``threadgroups``.
        """
        key = (tokens, count, window, threadgroups)
        if key not in self._chunk_work:
            self._chunk_work[key] = _chunk_work(self.chunks[:count], tokens, window, threadgroups)
        return self._chunk_work[key]

    def padding_rows(self, heads: int, value_dim: int, dtype: mx.Dtype) -> mx.array:
        """What attention gives for padding, ``[padding, H, 1, V]``; made once per step."""
        key = (heads, value_dim, dtype)
        if key not in self._zeros:
            self._zeros[key] = mx.zeros((self.padding, heads, 1, value_dim), dtype)
        return self._zeros[key]

    @property
    def kinds(self) -> tuple[tuple[int | None, int, int], ...]:
        """What ``work`` was asked for so far."""
        return tuple(self._work)

    def _split(self, starts: np.ndarray, share: float) -> Work:
        items, firsts, counts = cut_items(self._rows, self._sequences, starts, self._ends, share)
        if len(items) == self.num_rows:
            return Work(_int32(items), None)
        return Work(_int32(items), _int32(np.stack([firsts, counts], axis=1)))


def _chunk_work(
    chunks: Sequence[LongChunk], tokens: int, window: int | None, threadgroups: int
) -> ChunkWork:
    begins = [np.arange(0, chunk.length, tokens) for chunk in chunks]
    index = np.arange(len(chunks)).repeat([len(one) for one in begins])
    within = np.concatenate(begins)
    lengths, firsts, starts = (
        np.array([getattr(chunk, name) for chunk in chunks])[index]
        for name in ("length", "first", "start")
    )
    counts = np.minimum(lengths - within, tokens)
    position = starts + within
    first_key = np.zeros_like(position)
    if window is not None:
        first_key = np.maximum(position - window + 1, 0)
    ends, pieces = position + counts, np.arange(len(index))
    # Pieces are cut as rows of the decode kernel are.
    items, first_items, parts = cut_items(pieces, pieces, first_key, ends, 1 / threadgroups)
    piece, nth = items[:, 0], np.arange(len(items)) - first_items[items[:, 0]]
    before = offsets(counts * parts)
    columns = (firsts + within, counts, position, index)
    made = [column[piece] for column in columns]
    made += [items[:, 2], items[:, 3], before[piece] + nth, parts[piece]]
    row_parts = parts.repeat(counts)
    order = np.argsort(items[:, 2] - items[:, 3], kind="stable")
    spans = None
    if len(items) > len(index):
        spans = _int32(np.stack([offsets(row_parts), row_parts], axis=1))
    return ChunkWork(
        items=_int32(np.stack(made, axis=1)[order]),
        tables=mx.array(_padded([chunk.blocks for chunk in chunks])),
        spans=spans,
        num_rows=int(counts.sum()),
        num_parts=int(row_parts.sum()),
    )


def cut_items(
    rows: np.ndarray, tables: np.ndarray, starts: np.ndarray, ends: np.ndarray, share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each row's keys ``starts .. ends - 1`` where their position is a multiple of a span.

    The span is a power of two, the share of all keys that keeps every threadgroup equally busy or
    more: a batch of many rows is not cut, one long row among short ones is.

    Returns:
        Items ``[W, 4]`` as in ``Work``, each row's first item, and each row's number of items. W is
        at most ``1 / share`` and two per row.
    """
    wanted = max(math.ceil((ends - starts).sum() * share), MIN_SPAN)
    span = 1 << (wanted - 1).bit_length()
    counts = (ends - 1) // span - starts // span + 1
    firsts = offsets(counts)
    cut = (starts // span - firsts).repeat(counts) + np.arange(counts.sum())
    items = np.stack(
        [
            rows.repeat(counts),
            tables.repeat(counts),
            np.maximum(starts.repeat(counts), cut * span),
            np.minimum(ends.repeat(counts), (cut + 1) * span),
        ],
        axis=1,
    )
    return items, firsts, counts


def offsets(counts: np.ndarray) -> np.ndarray:
    """How many come before each of these counts."""
    return counts.cumsum() - counts


def _slots(
    tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Flat pool positions of tokens, each by its row of the block tables and its position."""
    return tables[rows, positions // block_size] * block_size + positions % block_size


def _padded(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Block tables as rows of one array, padded by block 0."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _inverse(rows: np.ndarray) -> mx.array | None:
    """Where each row's output is among the concatenated ones; None if in order."""
    if (rows[:-1] < rows[1:]).all():
        return None
    return _int32(np.argsort(rows))


def _int32(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.int32))
