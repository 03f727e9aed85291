"""Paged attention by kernels of our own, the same in CUDA and in Metal.

``docs/decisions/004-paged-attention-kernels.md`` tells the layout and the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.attention.base import LayerPool, LayerShape
from mlx_parallm.attention.kernel_attend import AttendKernels, AttendKind, Scores
from mlx_parallm.attention.kernel_plan import KernelPlan
from mlx_parallm.attention.kernel_pool import VECTOR, KernelPool, new_kernel_pool
from mlx_parallm.attention.kernel_prefill import attend_chunk
from mlx_parallm.attention.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.attention.kernels.dialect import CudaDialect, Dialect, MetalDialect, Tuning
from mlx_parallm.batch import ScheduledSequence

# Threads of a threadgroup of the kernels that only move data.
THREADS = 128
COPY_BYTES = 16

_POOLS = ("key_pool", "value_pool")
WRITE = KernelSpec("write", ("keys", "values", "slots", *_POOLS, "previous"), ("token",))
COPY = KernelSpec("copy", ("sources", "targets", *_POOLS, "previous"), ("token",))
GATHER = KernelSpec("gather", (*_POOLS, "table", "previous"), ("keys", "values"))


class KernelAttention:
    """The backend of kernels. Implements ``AttentionBackend``."""

    #: Pools are written in place, by kernels in the order of their tokens.
    runs_ahead = True

    def __init__(self, block_size: int, dialect: Dialect, tuning: Tuning | None = None) -> None:
        self._block_size = block_size
        self._dialect = dialect
        self._tuning = tuning or dialect.tuning
        self._builder = KernelBuilder(dialect)
        self._attend: dict[AttendKind, AttendKernels] = {}

    @property
    def name(self) -> str:
        """See ``AttentionBackend.name``."""
        return self._dialect.name

    def new_pool(self, shape: LayerShape, num_blocks: int) -> KernelPool:
        """See ``AttentionBackend.new_pool``."""
        return new_kernel_pool(shape, num_blocks, self._block_size)

    def plan(self, sequences: Sequence[ScheduledSequence]) -> KernelPlan:
        """See ``AttentionBackend.plan``."""
        return KernelPlan(sequences, self._block_size)

    def write(self, pool: LayerPool, plan: KernelPlan, keys: mx.array, values: mx.array) -> None:
        """See ``AttentionBackend.write``."""
        mine = _kernel_pool(pool)
        dtype = mine.shape.dtype
        (mine.token,) = self._builder.kernel(WRITE, self._constants(mine.shape))(
            inputs=[
                keys.astype(dtype),
                values.astype(dtype),
                plan.slots,
                mine.keys,
                mine.values,
                mine.token,
            ],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=_grid(plan.slots.size * mine.shape.num_kv_heads * _vectors(mine.shape)),
            threadgroup=(THREADS, 1, 1),
        )

    def attend(
        self,
        pool: LayerPool,
        plan: KernelPlan,
        queries: mx.array,
        *,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """See ``AttentionBackend.attend``; ``soft_cap`` c makes scores s ``c * tanh(s / c)``."""
        mine = _kernel_pool(pool)
        scores = Scores(scale, window, sinks, soft_cap)
        outputs = []
        if plan.num_rows:
            kernels = self._attend_kernels(mine, queries, scores)
            outputs.append(kernels.run(mine, plan, queries, scores))
        for chunk in plan.chunks:
            keys, values = self.gather(mine, chunk.table)
            outputs.append(attend_chunk(chunk, queries, keys, values, scores))
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)
        return joined if plan.order is None else joined[plan.order]

    def gather(self, pool: LayerPool, table: mx.array) -> tuple[mx.array, mx.array]:
        """See ``AttentionBackend.gather``."""
        mine = _kernel_pool(pool)
        shape = mine.shape
        outer = (table.shape[0], shape.num_kv_heads, table.shape[1] * self._block_size)
        keys, values = self._builder.kernel(GATHER, self._constants(shape))(
            inputs=[mine.keys, mine.values, table.astype(mx.int32), mine.token],
            output_shapes=[(*outer, shape.key_dim), (*outer, shape.value_dim)],
            output_dtypes=[shape.dtype, shape.dtype],
            grid=_grid(math.prod(outer) * _vectors(shape)),
            threadgroup=(THREADS, 1, 1),
        )
        return keys, values

    def copy_blocks(self, pool: LayerPool, sources: mx.array, targets: mx.array) -> None:
        """See ``AttentionBackend.copy_blocks``. No target may be a source of the same call."""
        mine = _kernel_pool(pool)
        key_bytes = mine.keys.nbytes // mine.keys.shape[0]
        value_bytes = mine.values.nbytes // mine.values.shape[0]
        constants: dict[str, Constant] = {
            "KEY_BYTES": key_bytes,
            "VALUE_BYTES": value_bytes,
            "THREADS": THREADS,
        }
        pairs = [sources.astype(mx.int32), targets.astype(mx.int32)]
        (mine.token,) = self._builder.kernel(COPY, constants)(
            inputs=[*pairs, mine.keys, mine.values, mine.token],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=_grid(sources.size * (key_bytes + value_bytes) // COPY_BYTES),
            threadgroup=(THREADS, 1, 1),
        )

    def _attend_kernels(self, pool: KernelPool, queries: mx.array, scores: Scores) -> AttendKernels:
        kind = AttendKind(
            shape=pool.shape,
            block_size=self._block_size,
            dtype=queries.dtype,
            heads=queries.shape[1],
            scale=scores.scale,
            soft_cap=scores.soft_cap,
            has_sinks=scores.sinks is not None,
            tuning=self._tuning,
        )
        found = self._attend.get(kind)
        if found is None:
            found = AttendKernels(kind, self._builder)
            self._attend[kind] = found
        return found

    def _constants(self, shape: LayerShape) -> dict[str, Constant]:
        return {
            "T": shape.dtype,
            "KV_HEADS": shape.num_kv_heads,
            "D": shape.key_dim,
            "V": shape.value_dim,
            "BLOCK_SIZE": self._block_size,
            "VEC": VECTOR,
            "THREADS": THREADS,
        }


class CudaAttention(KernelAttention):
    """The backend on NVIDIA GPUs."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, CudaDialect())


class MetalAttention(KernelAttention):
    """The backend on Apple GPUs. Not yet run on Apple hardware."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, MetalDialect())


def _kernel_pool(pool: LayerPool) -> KernelPool:
    if not isinstance(pool, KernelPool):
        raise TypeError("the pool belongs to another attention backend")
    return pool


def _vectors(shape: LayerShape) -> int:
    """Vectors of one token's key and value in one head."""
    return (shape.key_dim + shape.value_dim) // VECTOR


def _grid(threads: int) -> tuple[int, int, int]:
    """Whole threadgroups: the kernels skip what is beyond."""
    return (-(-threads // THREADS) * THREADS, 1, 1)
