"""Index arrays of a step's long chunks, for the prefill kernel and stock attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.worker.attention.key_spans import cut_items, offsets, prefill_span

# LONG_CHUNK: from this many rows on, a sequence attends by the prefill kernel or by stock attention
# over gathered keys and values; below, by the decode kernel, which reads KV once per row.
LONG_CHUNK = 16
# LARGE_WORK: a chunk with more work is large. At 8B shape on an H100, stock attention then saves
# 0.45 ms per layer, 16 ms per step; a new shape costs it 50 to 80 ms.
LARGE_WORK = 1 << 24


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """The work of the prefill kernel's threadgroups.

    Attributes:
        items: int32 ``[W, 8]``: first query row, number of tokens, position of the first, row of
            the block table, first key, end of keys, first part, and parts per token. Part i is
            output row i if no keys are cut.
        tables: block tables of the long chunks, int32 ``[N, M]``.
        spans: each row's first part and number of parts, int32 ``[rows, 2]``; None if each has one.
        num_rows: rows of all long chunks.
        num_parts: parts of all rows.
    """

    items: mx.array
    tables: mx.array
    spans: mx.array | None
    num_rows: int
    num_parts: int

    def in_parts(self) -> ChunkWork:
        """Return the same work, for keys that are not cut, with a span of one part per row."""
        spans = np.stack([np.arange(self.num_rows), np.ones(self.num_rows)], axis=1)
        return replace(self, spans=int32(spans))


@dataclass
class LongChunk:
    """Rows ``first .. first + length - 1`` of one sequence, at positions from ``start``.

    Stock attention computes ``num_rows`` queries from position ``begin``: a ``multiple`` above 1
    pads the chunk on both sides, so that it has few different shapes.
    """

    first: int
    length: int
    start: int
    blocks: tuple[int, ...]
    multiple: int = 1
    masks: dict[int, mx.array] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Return how many positions the last row attends to."""
        return self.start + self.length

    @property
    def work(self) -> float:
        """Return query rows times the keys that they attend to."""
        return self.length * (self.start + self.length / 2)

    def slots(self, block_size: int) -> np.ndarray:
        """Return the flat pool positions of its tokens, ``[length]``."""
        tables = np.array([self.blocks], dtype=np.int32)
        return slots_of(tables, np.array(0), np.arange(self.start, self.end), block_size)

    @property
    def begin(self) -> int:
        """Return the position of the first query, padding included."""
        return self.start - self.start % self.multiple

    @property
    def num_rows(self) -> int:
        """Return the number of queries, padding included."""
        return -(-(self.end - self.begin) // self.multiple) * self.multiple

    @property
    def num_keys(self) -> int:
        """Return the number of keys, up to the last query's own."""
        return self.begin + self.num_rows

    @functools.cached_property
    def table(self) -> mx.array:
        """Return its block table, int32 ``[1, blocks]``."""
        return mx.array(np.array([self.blocks], dtype=np.int32))

    def mask(self, window: int | None) -> mx.array | str:
        """Return ``"causal"``, or a mask, bool ``[num_rows, num_keys]``; cached by window."""
        if window is None or window >= self.num_keys:
            return "causal"
        if window not in self.masks:
            rows = np.arange(self.begin, self.num_keys)[:, None]
            columns = np.arange(self.num_keys)
            seen: Any = (columns <= rows) & (columns > rows - window)
            self.masks[window] = mx.array(seen)
        return self.masks[window]


def chunk_work(
    chunks: Sequence[LongChunk], tokens: int, window: int | None, threadgroups: int
) -> ChunkWork:
    """Return the work of chunks in pieces of up to ``tokens`` tokens.

    If there are too few pieces to keep ``threadgroups`` busy, their keys are cut as well.
    """
    index, rows, counts, position = _pieces(chunks, tokens)
    first_key = np.zeros_like(position)
    if window is not None:
        first_key = np.maximum(position - window + 1, 0)
    ends, pieces = position + counts, np.arange(len(index))
    span = prefill_span(first_key, ends, threadgroups)
    items, first_items, parts = cut_items(pieces, pieces, first_key, ends, span)
    piece, nth = items[:, 0], np.arange(len(items)) - first_items[items[:, 0]]
    before = offsets(counts * parts)
    item_columns = [column[piece] for column in (rows, counts, position, index)]
    item_columns += [items[:, 2], items[:, 3], before[piece] + nth, parts[piece]]
    row_parts = parts.repeat(counts)
    order = np.argsort(items[:, 2] - items[:, 3], kind="stable")
    spans = None
    if len(items) > len(index):
        spans = int32(np.stack([offsets(row_parts), row_parts], axis=1))
    return ChunkWork(
        items=int32(np.stack(item_columns, axis=1)[order]),
        tables=mx.array(_padded([chunk.blocks for chunk in chunks])),
        spans=spans,
        num_rows=int(counts.sum()),
        num_parts=int(row_parts.sum()),
    )


def _pieces(
    chunks: Sequence[LongChunk], tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut chunks into pieces of up to ``tokens`` tokens.

    Returns:
        Of each piece: the index of its chunk, its first row, its tokens, and its first position.
    """
    begins = [np.arange(0, chunk.length, tokens) for chunk in chunks]
    index = np.arange(len(chunks)).repeat([len(piece_begins) for piece_begins in begins])
    within = np.concatenate(begins)
    lengths, firsts, starts = (
        np.array([getattr(chunk, name) for chunk in chunks])[index]
        for name in ("length", "first", "start")
    )
    return index, firsts + within, np.minimum(lengths - within, tokens), starts + within


def slots_of(
    tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Return flat pool positions of tokens, from their rows of the block tables and positions."""
    return tables[rows, positions // block_size] * block_size + positions % block_size


def _padded(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Return block tables as rows of one array, padded with block 0."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def int32(values: np.ndarray) -> mx.array:
    """Return values in the dtype that kernels read."""
    return mx.array(values.astype(np.int32))


def output_order(rows: np.ndarray) -> mx.array | None:
    """Return the indices that sort concatenated outputs of ``rows``; None if they are sorted."""
    if (rows[:-1] < rows[1:]).all():
        return None
    return int32(np.argsort(rows))
