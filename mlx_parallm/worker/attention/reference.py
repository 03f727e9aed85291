"""Paged attention by stock MLX operations: correct on every device, and the kernels' measure.

A layer's pool is ``[K, num_blocks * block_size, D]``: with heads first, a gather by block table is
what ``mx.fast.scaled_dot_product_attention`` takes, without a transposed copy. A write is one
indexed assignment, which MLX does in place only while nothing else holds the array. So a step must
be evaluated before the next is built, or the whole pool is copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import BLOCK_LAYOUT, LayerPool, LayerShape, Scores
from mlx_parallm.worker.attention.chunk_plan import output_order
from mlx_parallm.worker.attention.dense import (
    biased_mask,
    composes_softmax,
    dense_attention,
    shared_prefix_attention,
)
from mlx_parallm.worker.attention.quantisation import KVQuantisation

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
            if not _has(self._biased.get(window), table):
                distances = self._distances()
                mask = biased_mask(table, distances[:, None], _seen(distances, window)[:, None])
                self._biased[window] = (table, mask)
            return self._biased[window][1]
        if window not in self._masks:
            self._masks[window] = mx.array(_seen(self._distances(), window)[:, None, None])
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
    sequences: Sequence[ScheduledSequence], rows: np.ndarray, block_size: int
) -> list[DecodeGroup]:
    """Group rows of one token, by common prefix and then by length.

    Args:
        sequences: sequences with one token each.
        rows: their indices among the step's rows.
        block_size: tokens per block.
    """
    groups = []
    for members, num_shared in _by_prefix(sequences, block_size):
        lengths = np.array([sequences[i].start // block_size + 1 - num_shared for i in members])
        for part in split_by_length(lengths, MIN_SAVED_TOKENS // block_size):
            chosen = [members[i] for i in part]
            group = _make_group(
                [sequences[i] for i in chosen], rows[chosen], num_shared, block_size
            )
            groups.append(group)
    return groups


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


# QUERY_TILE: a chunk's queries attend in tiles, each over no more keys than its last row sees. That
# skips the causal half which stock attention computes and masks (1.7x faster at 512 tokens, CPU).
QUERY_TILE = 64


@dataclass(slots=True)
class Chunk:
    """A prefill chunk: rows ``first .. first + length - 1`` at positions from ``start``."""

    first: int
    length: int
    start: int
    blocks: mx.array
    _masks: dict[tuple[int, int], mx.array] = field(default_factory=dict)
    _biased: dict[tuple[int | None, int], BiasedMask] = field(default_factory=dict)

    def mask(self, scores: Scores, first: int, last: int) -> mx.array | str:
        """Return a mask of ``dense_attention`` for rows ``first .. last - 1`` of the chunk.

        It covers the keys up to the last row's position: ``"causal"``; bool ``[last - first,
        start + last]``; or with a bias by distance float32 ``[1, H, last - first, start + last]``.
        """
        window, table = scores.window, scores.distance_bias
        if table is not None:
            if not _has(self._biased.get((window, first)), table):
                distances = self._distances(first, last)[None]
                mask = biased_mask(table, distances, _seen(distances, window))
                self._biased[window, first] = (table, mask)
            return self._biased[window, first][1]
        if window is None or window >= self.start + last:
            return "causal"
        if (window, first) not in self._masks:
            self._masks[window, first] = mx.array(_seen(self._distances(first, last), window))
        return self._masks[window, first]

    def _distances(self, first: int, last: int) -> np.ndarray:
        """Return how far some rows are after the keys up to the last of them."""
        end = self.start + last
        return np.arange(self.start + first, end)[:, None] - np.arange(end)


def _seen(distances: np.ndarray, window: int | None) -> np.ndarray:
    """Return which keys rows see that are so far after them, bool."""
    seen = distances >= 0
    return seen if window is None else seen & (distances < window)


def _has(biased: BiasedMask | None, table: mx.array) -> bool:
    """True if a mask was made of this very bias."""
    return biased is not None and biased[0] is table


@dataclass(slots=True)
class ReferencePlan:
    """Index arrays of one step.

    ``slots`` are the flat pool positions of the T rows. ``order`` puts the concatenated outputs of
    groups and chunks into row order; None if they are in order.
    """

    slots: mx.array
    groups: list[DecodeGroup]
    chunks: list[Chunk]
    order: mx.array | None


class ReferenceAttention:
    """The backend that uses stock operations. Implements ``AttentionBackend``."""

    name = "reference"
    runs_ahead = False
    block_layout = BLOCK_LAYOUT

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    @property
    def block_size(self) -> int:
        """See ``AttentionBackend.block_size``."""
        return self._block_size

    @property
    def quantisation(self) -> KVQuantisation | None:
        """See ``AttentionBackend.quantisation``."""
        return None

    def unquantised(self) -> ReferenceAttention:
        """See ``AttentionBackend.unquantised``."""
        return self

    def with_own_tables(self) -> Self:
        """See ``AttentionBackend.with_own_tables``. No tables are kept."""
        return self

    def bytes_per_token(self, shape: LayerShape) -> int:
        """See ``AttentionBackend.bytes_per_token``."""
        return shape.bytes_per_token(None)

    def new_pool(self, shape: LayerShape, num_blocks: int) -> LayerPool:
        """Return a pool of zeros: gathered padding is masked, but must be finite."""
        rows = num_blocks * self._block_size
        return LayerPool(
            mx.zeros((shape.num_kv_heads, rows, shape.key_dim), shape.dtype),
            mx.zeros((shape.num_kv_heads, rows, shape.value_dim), shape.dtype),
        )

    def plan(self, sequences: Sequence[ScheduledSequence]) -> ReferencePlan:
        """Return a step's index arrays, for all layers."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        firsts = np.cumsum([0, *lengths])
        slots = np.concatenate([self._slots(sequence) for sequence in sequences])
        singles = [i for i, length in enumerate(lengths) if length == 1]
        groups = make_decode_groups(
            [sequences[i] for i in singles], firsts[singles], self._block_size
        )
        chunks = [
            Chunk(
                first=int(firsts[i]),
                length=lengths[i],
                start=sequence.start,
                blocks=mx.array(np.array(sequence.block_table, dtype=np.int32)),
            )
            for i, sequence in enumerate(sequences)
            if lengths[i] > 1
        ]
        rows = [group.rows for group in groups]
        rows += [np.arange(chunk.first, chunk.first + chunk.length) for chunk in chunks]
        return ReferencePlan(mx.array(slots), groups, chunks, output_order(np.concatenate(rows)))

    def write(self, pool: LayerPool, plan: ReferencePlan, keys: mx.array, values: mx.array) -> None:
        """See ``AttentionBackend.write``."""
        pool.keys[:, plan.slots] = keys[:, :, 0].swapaxes(0, 1)
        # The keys of an index have no values, and MLX's CPU backend divides by the width.
        if values.shape[-1]:
            pool.values[:, plan.slots] = values[:, :, 0].swapaxes(0, 1)

    def attend(
        self,
        pool: LayerPool,
        plan: ReferencePlan,
        queries: mx.array,
        *,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        soft_cap: float | None = None,
        distance_bias: mx.array | None = None,
    ) -> mx.array:
        """See ``AttentionBackend.attend``."""
        scores = Scores(scale, window, sinks, soft_cap, distance_bias)
        outputs: list[mx.array] = []
        for group in plan.groups:
            outputs.append(self._attend_group(pool, group, group.take(queries), scores))
        for chunk in plan.chunks:
            outputs.append(self._attend_chunk(pool, chunk, queries, scores))
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)
        return joined if plan.order is None else joined[plan.order]

    def gather(self, pool: LayerPool, table: mx.array) -> tuple[mx.array, mx.array]:
        """See ``AttentionBackend.gather``."""
        keys, values = self._gather(pool, table)
        return keys.swapaxes(0, 1), values.swapaxes(0, 1)

    def forget_writes(self, pool: LayerPool) -> None:
        """Do nothing: a step that MLX cannot compute on the CPU ends the process."""
        del pool

    def copy_blocks(self, pool: LayerPool, sources: mx.array, targets: mx.array) -> None:
        """See ``AttentionBackend.copy_blocks``."""
        source_rows, target_rows = self._rows(sources), self._rows(targets)
        copies = [array[:, source_rows] for array in pool.arrays()]
        # The copies are evaluated first: MLX would copy a whole pool that a pending read holds.
        mx.eval(copies)
        for array, copy in zip(pool.arrays(), copies, strict=True):
            if copy.shape[-1]:
                array[:, target_rows] = copy

    def take_blocks(self, pool: LayerPool, blocks: mx.array) -> mx.array:
        """See ``AttentionBackend.take_blocks``. It is to be evaluated before the next write."""
        table = blocks[:, None]
        taken = [
            self._gather_array(array, table).swapaxes(0, 1).flatten(1).view(mx.uint8)
            for array in pool.arrays()
            if array.shape[-1]
        ]
        return mx.concatenate(taken, axis=1)

    def put_blocks(self, pool: LayerPool, blocks: mx.array, contents: mx.array) -> None:
        """See ``AttentionBackend.put_blocks``."""
        rows, first = self._rows(blocks), 0
        for array in pool.arrays():
            heads, _, dim = array.shape
            if not dim:
                continue
            end = first + heads * self._block_size * dim * array.dtype.size
            part = contents[:, first:end].view(array.dtype)
            part = part.reshape(len(contents), heads, self._block_size, dim)
            array[:, rows] = part.swapaxes(0, 1).reshape(heads, -1, dim)
            first = end

    def _rows(self, blocks: mx.array) -> mx.array:
        """Return flat pool positions of whole blocks."""
        offsets = mx.arange(self._block_size)
        return (blocks[:, None] * self._block_size + offsets).reshape(-1)

    def _attend_group(
        self, pool: LayerPool, group: DecodeGroup, queries: mx.array, scores: Scores
    ) -> mx.array:
        prefix = group.prefix
        shares = (
            scores.window is None
            and scores.soft_cap is None
            and scores.distance_bias is None
            and composes_softmax(queries)
        )
        if prefix is not None and not shares:
            group, prefix = group.unshared(), None
        keys, values = self.gather(pool, group.block_table)
        mask = group.mask(scores)
        if prefix is None:
            return _attend(queries, keys, values, mask, scores)
        shared = self._gather(pool, prefix)
        return shared_prefix_attention(
            queries, shared, (keys, values), scale=scores.scale, mask=mask, sinks=scores.sinks
        )

    def _attend_chunk(
        self,
        pool: LayerPool,
        chunk: Chunk,
        queries: mx.array,
        scores: Scores,
    ) -> mx.array:
        keys, values = self._gather(pool, chunk.blocks)
        own = queries[chunk.first : chunk.first + chunk.length, :, 0]  # [L, H, D]
        own = own.swapaxes(0, 1)[None]
        tiles = []
        for first in range(0, chunk.length, QUERY_TILE):
            last = min(first + QUERY_TILE, chunk.length)
            seen = chunk.start + last
            output = _attend(
                own[:, :, first:last],
                keys[None, :, :seen],
                values[None, :, :seen],
                chunk.mask(scores, first, last),
                scores,
            )
            tiles.append(output)
        output = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)
        return output[0].swapaxes(0, 1)[:, :, None]

    def _gather(self, pool: LayerPool, table: mx.array) -> tuple[mx.array, mx.array]:
        """Return blocks by table: ``[K, *table.shape[:-1], blocks * block_size, D]``."""
        return self._gather_array(pool.keys, table), self._gather_array(pool.values, table)

    def _gather_array(self, array: mx.array, table: mx.array) -> mx.array:
        """Return blocks of ``[K, num_blocks * block_size, dim]`` by table, as ``_gather`` does."""
        heads, rows, dim = array.shape
        blocks = array.reshape(heads, rows // self._block_size, self._block_size * dim)[:, table]
        length = table.shape[-1] * self._block_size
        return blocks.reshape(heads, *table.shape[:-1], length, dim)

    def _slots(self, sequence: ScheduledSequence) -> np.ndarray:
        """Return flat pool positions of a sequence's tokens, int32 ``[tokens]``."""
        if len(sequence.token_ids) == 1:
            block, offset = divmod(sequence.start, self._block_size)
            return np.array(
                [sequence.block_table[block] * self._block_size + offset], dtype=np.int32
            )
        positions = np.arange(sequence.start, sequence.start + len(sequence.token_ids))
        table = np.array(sequence.block_table, dtype=np.int32)
        return table[positions // self._block_size] * self._block_size + (
            positions % self._block_size
        ).astype(np.int32)


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str, scores: Scores
) -> mx.array:
    return dense_attention(
        queries,
        keys,
        values,
        scale=scores.scale,
        mask=mask,
        sinks=scores.sinks,
        soft_cap=scores.soft_cap,
    )
