"""Rows of one token that attend together: by common prefix, by length, and by their number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import Scores
from mlx_parallm.worker.attention.dense import biased_mask

# MIN_SAVED_TOKENS: rows are split into groups if that saves at least this many gathered tokens;
# otherwise the extra operations cost more.
MIN_SAVED_TOKENS = 1024
#: ``BiasedMask``: a bias by distance, and the mask that was made of it.
BiasedMask = tuple[mx.array, mx.array]


@dataclass(slots=True)
class DecodeGroup:
    """Rows that attend together, padded to the longest.

    Attributes:
        rows: their indices among the step's T rows.
        block_table: int32 ``[rows, blocks]``, padded with block 0; it starts after the prefix.
        positions: positions of the rows, ``[rows]``.
        start: position of the first token in ``block_table``.
        prefix: blocks of the ``start`` tokens that all rows share, int32; None if ``start`` is 0.
        block_size: tokens per block.
    """

    rows: np.ndarray
    block_table: mx.array
    positions: np.ndarray
    block_size: int
    start: int = 0
    prefix: mx.array | None = None
    _masks: dict[int | None, mx.array] = field(default_factory=dict)
    _biased: dict[int | None, BiasedMask] = field(default_factory=dict)
    _unshared: DecodeGroup | None = None

    def take(self, queries: mx.array) -> mx.array:
        """Return this group's queries, ``[rows, H, 1, D]``."""
        first, last = int(self.rows[0]), int(self.rows[-1])
        if last - first + 1 == len(self.rows) and (np.diff(self.rows) == 1).all():
            return queries[first : last + 1]
        return queries[mx.array(self.rows.astype(np.int32))]

    def mask(self, scores: Scores) -> mx.array:
        """Return a mask of ``dense_attention`` for the rows; cached by window.

        It is bool ``[rows, 1, 1, tokens]``, or with a bias by distance float32 ``[rows, H, 1,
        tokens]``.
        """
        window, table = scores.window, scores.distance_bias
        if table is not None:
            if not is_of(self._biased.get(window), table):
                distances = self._distances()
                mask = biased_mask(table, distances[:, None], seen_keys(distances, window)[:, None])
                self._biased[window] = (table, mask)
            return self._biased[window][1]
        if window not in self._masks:
            self._masks[window] = mx.array(seen_keys(self._distances(), window)[:, None, None])
        return self._masks[window]

    def _distances(self) -> np.ndarray:
        """Return how far the rows are after the keys, int ``[rows, tokens]``."""
        end = self.start + self.block_table.shape[1] * self.block_size
        return self.positions[:, None] - np.arange(self.start, end)

    def unshared(self) -> DecodeGroup:
        """Return the same rows with whole block tables, for attention that cannot share; cached."""
        if self._unshared is None:
            assert self.prefix is not None, "only a group with a prefix shares"
            shape = (len(self.rows), self.prefix.shape[0])
            table = mx.concatenate([mx.broadcast_to(self.prefix, shape), self.block_table], axis=1)
            self._unshared = DecodeGroup(self.rows, table, self.positions, self.block_size)
        return self._unshared


def make_decode_groups(
    sequences: Sequence[ScheduledSequence],
    rows: np.ndarray,
    block_size: int,
    most_tokens: float = math.inf,
) -> list[DecodeGroup]:
    """Group rows of one token, by common prefix and then by length.

    Args:
        sequences: sequences with one token each.
        rows: their indices among the step's rows.
        block_size: tokens per block.
        most_tokens: of a group with several rows, padding included.
    """
    groups = []
    most_blocks = most_tokens / block_size
    for members, num_shared in _by_prefix(sequences, block_size):
        lengths = np.array([sequences[i].start // block_size + 1 - num_shared for i in members])
        parts = split_by_length(lengths, MIN_SAVED_TOKENS // block_size)
        for part in chain.from_iterable(_parts(each, lengths, most_blocks) for each in parts):
            chosen = [members[i] for i in part]
            group = _make_group(
                [sequences[i] for i in chosen], rows[chosen], num_shared, block_size
            )
            groups.append(group)
    return groups


def _parts(rows: np.ndarray, lengths: np.ndarray, most: float) -> list[np.ndarray]:
    """Return rows in parts, each with no more blocks than ``most`` if it has several rows."""
    at_once = max(1, int(min(len(rows), most / lengths[rows].max())))
    return np.array_split(rows, math.ceil(len(rows) / at_once))


def _make_group(
    sequences: Sequence[ScheduledSequence], rows: np.ndarray, num_shared: int, block_size: int
) -> DecodeGroup:
    tables = [
        sequence.block_table[num_shared : sequence.start // block_size + 1]
        for sequence in sequences
    ]
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    prefix = sequences[0].block_table[:num_shared]
    return DecodeGroup(
        rows,
        mx.array(table),
        np.array([sequence.start for sequence in sequences]),
        block_size,
        start=num_shared * block_size,
        prefix=mx.array(np.array(prefix, dtype=np.int32)) if prefix else None,
    )


def _by_prefix(
    sequences: Sequence[ScheduledSequence], block_size: int
) -> list[tuple[list[int], int]]:
    """Return groups of rows that share leading blocks, with their number, and the other rows.

    The others come last, with 0 shared blocks.
    """
    by_first: dict[int, list[int]] = defaultdict(list)
    for i, sequence in enumerate(sequences):
        by_first[sequence.block_table[0]].append(i)
    parts: list[tuple[list[int], int]] = []
    rest: list[int] = []
    for members in by_first.values():
        num_shared = _num_shared([sequences[i] for i in members], block_size)
        if (len(members) - 1) * num_shared * block_size >= MIN_SAVED_TOKENS:
            parts.append((members, num_shared))
        else:
            rest += members
    if rest:
        parts.append((sorted(rest), 0))
    return parts


def _num_shared(sequences: Sequence[ScheduledSequence], block_size: int) -> int:
    """Return how many leading blocks all tables share, among those that every row sees whole."""
    if len(sequences) == 1:
        return 0
    # A row's last block is its own, so it is never shared.
    most = min(sequence.start for sequence in sequences) // block_size
    first = sequences[0].block_table
    for i in range(most):
        if any(sequence.block_table[i] != first[i] for sequence in sequences):
            return i
    return most


def split_by_length(lengths: np.ndarray, min_saved: int) -> list[np.ndarray]:
    """Partition indices so that padding each part to its longest wastes little.

    A part is split in two at the place that saves most, as long as that saves ``min_saved`` or
    more. A single part keeps the order of ``lengths``.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    counts = np.arange(1, len(order))
    if len(order) == 1:
        return [np.arange(1)]
    # A cut after the i longest saves (longest - next) tokens in each remaining row.
    saved = (len(order) - counts) * (descending[0] - descending[1:])
    cut = int(saved.argmax()) + 1
    if saved[cut - 1] < min_saved:
        return [np.arange(len(order))]
    head = [order[:cut][part] for part in split_by_length(descending[:cut], min_saved)]
    tail = [order[cut:][part] for part in split_by_length(descending[cut:], min_saved)]
    return head + tail


def seen_keys(distances: np.ndarray, window: int | None) -> np.ndarray:
    """Return which keys rows see that are so far after them, bool."""
    is_seen = distances >= 0
    return is_seen if window is None else is_seen & (distances < window)


def is_of(biased: BiasedMask | None, table: mx.array) -> bool:
    """True if a mask was made of this very bias."""
    return biased is not None and biased[0] is table
