"""Attention of stock operations whose decode steps can be compiled, as the kernels' can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.dense import dense_attention
from mlx_parallm.worker.attention.reference import ReferenceAttention


class AheadAttention(ReferenceAttention):
    """Lets steps run ahead, as kernels do; MLX then copies the pools that steps in flight hold."""

    runs_ahead = True


@dataclass
class Rows:
    """Decode rows: slots and ends ``[T]``, tables ``[T, M]``."""

    slots: mx.array
    ends: mx.array
    tables: mx.array


@dataclass
class Padded:
    """A plan with rows behind it, which nothing is done for."""

    plan: Any
    count: int


class CompiledAttention(AheadAttention):
    """Implements ``CompilableAttention``; counts the steps that were calls of a compiled function.

    The pool has one block more than is handed out: padding writes to its last position.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.num_decodes = 0

    def new_pool(self, shape: LayerShape, num_blocks: int) -> LayerPool:
        return super().new_pool(shape, num_blocks + 1)

    pads_rows = True
    runs_in_order = False

    def padded_plan(self, sequences: Sequence[ScheduledSequence], num_rows: int) -> Padded:
        count = num_rows - sum(len(sequence.token_ids) for sequence in sequences)
        return Padded(self.plan(sequences), count)

    def decode_kinds(self, plan: Any) -> str:
        return "rows"

    def decode_arrays(
        self, sequences: Sequence[ScheduledSequence], positions: np.ndarray, kinds: Any
    ) -> list[np.ndarray]:
        assert kinds == "rows"
        self.num_decodes += 1
        num_rows = len(positions)
        slots, ends = np.full(num_rows, -1, np.int32), positions + 1
        longest = max(len(sequence.block_table) for sequence in sequences)
        # Few lengths, since each is traced for itself.
        tables = np.zeros((num_rows, max(8, 1 << (longest - 1).bit_length())), np.int32)
        for row, sequence in enumerate(sequences):
            block, offset = divmod(sequence.start, self._block_size)
            slots[row] = sequence.block_table[block] * self._block_size + offset
            tables[row, : len(sequence.block_table)] = sequence.block_table
        return [slots, ends, tables]

    def decode_plan(self, arrays: Sequence[mx.array], kinds: Any) -> Rows:
        return Rows(*arrays)

    def decode_tables(self, plan: Rows) -> mx.array:
        return plan.tables

    def chain(self, pool: LayerPool) -> list[mx.array]:
        return pool.arrays()

    def set_chain(self, pool: LayerPool, arrays: Sequence[mx.array]) -> None:
        pool.keys, pool.values = arrays

    def settle(self, pool: LayerPool) -> None:
        raise AssertionError("the next step takes the pool that the last one made")

    def write(self, pool: LayerPool, plan: Any, keys: mx.array, values: mx.array) -> None:
        if isinstance(plan, Padded):
            keys, values = keys[: -plan.count], values[: -plan.count]
            plan = plan.plan
        if not isinstance(plan, Rows):
            return super().write(pool, plan, keys, values)
        # Assignment would change the array that a caller of a compiled function holds.
        new = [pool.keys[:], pool.values[:]]
        new[0][:, plan.slots] = keys[:, :, 0].swapaxes(0, 1)
        if values.size:  # minimax_m3_vl keeps keys alone
            new[1][:, plan.slots] = values[:, :, 0].swapaxes(0, 1)
        pool.keys, pool.values = new
        return None

    def attend(self, pool: LayerPool, plan: Any, queries: mx.array, **options: Any) -> mx.array:
        if isinstance(plan, Padded):
            output = super().attend(pool, plan.plan, queries[: -plan.count], **options)
            # What comes of padding must not matter.
            return mx.concatenate([output, mx.full((plan.count, *output.shape[1:]), mx.nan)])
        if not isinstance(plan, Rows):
            return super().attend(pool, plan, queries, **options)
        keys, values = self.gather(pool, plan.tables)
        distances = plan.ends[:, None] - 1 - mx.arange(keys.shape[2])
        mask = distances >= 0
        if options["window"] is not None:
            mask &= distances < options["window"]
        mask = mask[:, None, None]
        bias = options.get("distance_bias")
        if bias is not None:
            added = bias[:, mx.clip(distances, 0, bias.shape[1] - 1)].swapaxes(0, 1)[:, :, None]
            mask = mx.where(mask, added, -1e30)
        return dense_attention(
            queries,
            keys,
            values,
            scale=options["scale"],
            mask=mask,
            sinks=options["sinks"],
            soft_cap=options.get("soft_cap"),
        )


class OrderedAttention(CompiledAttention):
    """Lets steps be built while the one before is submitted, as kernels on CUDA do.

    Here a step takes the pool that the one before makes, which MLX finds in the graph.
    """

    runs_in_order = True

    def settle(self, pool: LayerPool) -> None:
        pass
