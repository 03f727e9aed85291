"""Paged attention by stock MLX operations: correct on every device, and the kernels' measure.

A layer's pool is ``[K, num_blocks * block_size, D]``: with heads first, a gather by block table is
what ``mx.fast.scaled_dot_product_attention`` takes, without a transposed copy. A write is one
indexed assignment, which MLX does in place only while nothing else holds the array. So a step must
be evaluated before the next is built, or the whole pool is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import BLOCK_LAYOUT, LayerPool, LayerShape, Scores
from mlx_parallm.worker.attention.chunk_plan import output_order
from mlx_parallm.worker.attention.decode_groups import (
    BiasedMask,
    DecodeGroup,
    is_of,
    make_decode_groups,
    seen_keys,
)
from mlx_parallm.worker.attention.dense import (
    biased_mask,
    composes_softmax,
    dense_attention,
    shared_prefix_attention,
)
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.device.properties import backend_name

# GROUP_TOKENS: most tokens that a CPU gathers at once, for more than one row. glibc maps arrays of
# more than 32 MB anew each time, and their page faults take longer than the attention itself.
GROUP_TOKENS = 4096
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
            if not is_of(self._biased.get((window, first)), table):
                distances = self._distances(first, last)[None]
                mask = biased_mask(table, distances, seen_keys(distances, window))
                self._biased[window, first] = (table, mask)
            return self._biased[window, first][1]
        if window is None or window >= self.start + last:
            return "causal"
        if (window, first) not in self._masks:
            self._masks[window, first] = mx.array(seen_keys(self._distances(first, last), window))
        return self._masks[window, first]

    def _distances(self, first: int, last: int) -> np.ndarray:
        """Return how far some rows are after the keys up to the last of them."""
        end = self.start + last
        return np.arange(self.start + first, end)[:, None] - np.arange(end)


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
        most = GROUP_TOKENS if backend_name() == "cpu" else math.inf
        groups = make_decode_groups(
            [sequences[i] for i in singles], firsts[singles], self._block_size, most
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
            own = group.take(queries)
            if outputs:
                # One group after the other, so that later ones reuse the memory of earlier ones.
                (own,) = mx.depends([own], outputs[-1:])
            outputs.append(self._attend_group(pool, group, own, scores))
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
