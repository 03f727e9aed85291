"""Paged attention by this project's kernels, alike in CUDA and Metal.

The layout and the algorithm are in ``docs/decisions/004-paged-attention-kernels.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np

from mlx_parallm.kernels.build import KernelBuilder
from mlx_parallm.kernels.language import CudaLanguage, KernelLanguage, MetalLanguage, Tuning
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import BLOCK_LAYOUT, LayerPool, LayerShape, Scores
from mlx_parallm.worker.attention.chunk_plan import LARGE_WORK, LongChunk
from mlx_parallm.worker.attention.decode_plan import DecodePlan, DecodeRows
from mlx_parallm.worker.attention.heads import HeadInputs, HeadSettings
from mlx_parallm.worker.attention.kernel_attend import AttendKernels, AttendKind
from mlx_parallm.worker.attention.kernel_heads import HeadKernels
from mlx_parallm.worker.attention.kernel_moves import MoveKernels
from mlx_parallm.worker.attention.kernel_plan import HeldTables, KernelPlan, WorkKind
from mlx_parallm.worker.attention.kernel_pool import (
    KernelPool,
    PoolLayout,
    argument_dtype,
    new_kernel_pool,
)
from mlx_parallm.worker.attention.kernel_prefill import PrefillKernels, PrefillKind, attend_chunk
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.attention.quantisation import KVQuantisation

Plan = KernelPlan | DecodePlan


@dataclass(frozen=True, slots=True)
class _LayerKernels:
    """A layer's kernels: for single rows, and for long chunks (None: stock attention)."""

    rows: AttendKernels
    chunks: PrefillKernels | None


class KernelAttention:
    """The backend that uses kernels. Implements ``CompilableAttention``."""

    #: Kernels write pools in place, in the order of their tokens.
    runs_ahead = True
    block_layout = BLOCK_LAYOUT

    def __init__(
        self,
        block_size: int,
        language: KernelLanguage,
        *,
        quantisation: KVQuantisation | None = None,
        tuning: Tuning | None = None,
        large_work: float = LARGE_WORK,
    ) -> None:
        """Chunks with more than ``large_work`` (see ``LongChunk.work``) use stock operations."""
        self._block_size = block_size
        self._language = language
        self._quantisation = quantisation
        self._tuning = tuning or language.tuning
        self._large_work = large_work
        self._builder = KernelBuilder(language, TEXTS, "paged", argument_dtype)
        self._moves: dict[PoolLayout, MoveKernels] = {}
        self._heads: dict[PoolLayout, HeadKernels] = {}
        self._attend: dict[AttendKind, AttendKernels] = {}
        self._prefill: dict[PrefillKind, PrefillKernels] = {}
        self._forget_tables()

    @property
    def name(self) -> str:
        """See ``AttentionBackend.name``."""
        return self._language.name

    @property
    def block_size(self) -> int:
        """See ``AttentionBackend.block_size``."""
        return self._block_size

    @property
    def quantisation(self) -> KVQuantisation | None:
        """See ``AttentionBackend.quantisation``."""
        return self._quantisation

    def unquantised(self) -> KernelAttention:
        """See ``AttentionBackend.unquantised``."""
        if self._quantisation is None:
            return self
        return KernelAttention(
            self._block_size, self._language, tuning=self._tuning, large_work=self._large_work
        )

    def with_own_tables(self) -> Self:
        """See ``AttentionBackend.with_own_tables``."""
        other = copy.copy(self)
        other._forget_tables()
        return other

    def bytes_per_token(self, shape: LayerShape) -> int:
        """See ``AttentionBackend.bytes_per_token``."""
        return self.layout(shape).bytes_per_token

    def layout(self, shape: LayerShape) -> PoolLayout:
        """Return the layout of a layer's pool; see also ``kernel_pool.why_unsupported``."""
        return PoolLayout(shape=shape, block_size=self._block_size, quantisation=self._quantisation)

    def new_pool(self, shape: LayerShape, num_blocks: int) -> KernelPool:
        """See ``AttentionBackend.new_pool``."""
        # Cached tables may name blocks that the new pool does not have.
        self._forget_tables()
        return new_kernel_pool(self.layout(shape), num_blocks, self._language.bound)

    def plan(self, sequences: Sequence[ScheduledSequence]) -> KernelPlan:
        """See ``AttentionBackend.plan``."""
        return self._plan(sequences)

    @property
    def pads_rows(self) -> bool:
        """See ``CompilableAttention.pads_rows``."""
        return self._tuning.pads_rows

    def padded_plan(self, sequences: Sequence[ScheduledSequence], num_rows: int) -> KernelPlan:
        """See ``CompilableAttention.padded_plan``."""
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        return self._plan(sequences, num_rows - num_tokens)

    def _forget_tables(self) -> None:
        self._tables = HeldTables()
        self._decode_rows = DecodeRows(self._block_size, self._tables)

    def _plan(self, sequences: Sequence[ScheduledSequence], padding: int = 0) -> KernelPlan:
        return KernelPlan(
            sequences,
            self._block_size,
            self._tuning.chunk_multiple,
            self._tables,
            padding=padding,
            large_work=self._large_work,
        )

    def begin(self, shape: LayerShape, heads: int, kinds: Iterable[Scores]) -> None:
        """Start to compile the kernels of layers of these kinds, all at once."""
        layout = self.layout(shape)
        self._moves_of(layout).begin()
        for scores in kinds:
            kernels = self._kernels_of(layout, heads, scores)
            kernels.rows.begin()
            if kernels.chunks is not None:
                kernels.chunks.begin()

    def prepare(self, shape: LayerShape, heads: int) -> None:
        """Run stock attention of large chunks once: its first use takes 2 s on an H100."""
        if not self._language.has_tensor_cores:
            return
        multiple = self._tuning.chunk_multiple
        blocks = -(-2 * multiple // self._block_size)
        pool = self.new_pool(shape, blocks)
        # The chunk is padded on both sides.
        chunk = LongChunk(0, multiple // 2, multiple + 1, tuple(range(blocks)), multiple)
        queries = mx.zeros((chunk.length, heads, 1, shape.key_dim), shape.dtype)
        keys, values = self.gather(pool, chunk.table)
        mx.eval(attend_chunk(chunk, queries, keys, values, Scores(scale=1.0)))

    def decode_kinds(self, plan: KernelPlan) -> tuple[WorkKind, ...]:
        """See ``CompilableAttention.decode_kinds``."""
        return plan.kinds

    def decode_arrays(
        self,
        sequences: Sequence[ScheduledSequence],
        positions: np.ndarray,
        kinds: Sequence[WorkKind],
    ) -> list[np.ndarray]:
        """See ``CompilableAttention.decode_arrays``."""
        return self._decode_rows.arrays(sequences, positions, kinds)

    def decode_plan(self, arrays: Sequence[mx.array], kinds: Sequence[WorkKind]) -> DecodePlan:
        """See ``CompilableAttention.decode_plan``."""
        return DecodePlan.of(arrays, kinds)

    def decode_tables(self, plan: DecodePlan) -> mx.array:
        """See ``CompilableAttention.decode_tables``."""
        return plan.tables

    def chain(self, pool: LayerPool) -> list[mx.array]:
        """See ``CompilableAttention.chain``."""
        return [_kernel_pool(pool).token]

    def set_chain(self, pool: LayerPool, arrays: Sequence[mx.array]) -> None:
        """See ``CompilableAttention.set_chain``."""
        (_kernel_pool(pool).token,) = arrays

    @property
    def runs_in_order(self) -> bool:
        """See ``CompilableAttention.runs_in_order``: a model's graphs are on one stream."""
        return self._language.name == "cuda"

    def settle(self, pool: LayerPool) -> None:
        """See ``CompilableAttention.settle``."""
        kernel_pool = _kernel_pool(pool)
        kernel_pool.token = kernel_pool.settled

    def write(self, pool: LayerPool, plan: Plan, keys: mx.array, values: mx.array) -> None:
        """See ``AttentionBackend.write``."""
        kernel_pool = _kernel_pool(pool)
        self._move_kernels(kernel_pool).write(kernel_pool, plan.slots, keys, values)

    def makes_heads(self, pool: LayerPool, dtype: mx.Dtype) -> bool:
        """See ``HeadMaker.makes_heads``."""
        kernel_pool = _kernel_pool(pool)
        kernels = self._head_kernels(kernel_pool)
        return kernels.is_supported and kernel_pool.layout.shape.dtype == dtype

    def make_heads(
        self, pool: LayerPool, plan: Plan, settings: HeadSettings, inputs: HeadInputs
    ) -> mx.array:
        """See ``HeadMaker.make_heads``."""
        kernel_pool = _kernel_pool(pool)
        return self._head_kernels(kernel_pool).run(kernel_pool, plan.slots, settings, inputs)

    def attend(
        self,
        pool: LayerPool,
        plan: Plan,
        queries: mx.array,
        *,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        soft_cap: float | None = None,
        distance_bias: mx.array | None = None,
    ) -> mx.array:
        """See ``AttentionBackend.attend``."""
        kernel_pool = _kernel_pool(pool)
        scores = Scores(scale, window, sinks, soft_cap, distance_bias)
        if distance_bias is not None:
            plan = plan.by_rows()
        dtype = queries.dtype
        queries = queries.astype(kernel_pool.layout.shape.dtype)
        kernels = self._layer_kernels(kernel_pool, queries.shape[1], scores)
        outputs = []
        if plan.num_rows:
            outputs.append(kernels.rows.run(kernel_pool, plan, queries, scores))
        if isinstance(plan, KernelPlan) and plan.chunks:
            outputs += self._attend_chunks(kernel_pool, plan, kernels.chunks, queries, scores)
        if plan.order is not None:
            outputs = [_joined(outputs)[plan.order]]
        if isinstance(plan, KernelPlan) and plan.padding:
            shape = kernel_pool.layout.shape
            outputs.append(plan.padding_rows(queries.shape[1], shape.value_dim, outputs[0].dtype))
        return _joined(outputs).astype(dtype)

    def _attend_chunks(
        self,
        pool: KernelPool,
        plan: KernelPlan,
        kernels: PrefillKernels | None,
        queries: mx.array,
        scores: Scores,
    ) -> list[mx.array]:
        outputs, count = [], 0
        if kernels is not None:
            # Within a window there is little work, and stock attention would need a mask.
            count = len(plan.chunks) if scores.window is not None else plan.num_small
            if count:
                outputs.append(kernels.run(pool, plan, count, queries, scores))
        for chunk in plan.chunks[count:]:
            keys, values = self.gather(pool, chunk.table)
            outputs.append(attend_chunk(chunk, queries, keys, values, scores))
        return outputs

    def gather(self, pool: LayerPool, table: mx.array) -> tuple[mx.array, mx.array]:
        """See ``AttentionBackend.gather``."""
        kernel_pool = _kernel_pool(pool)
        return self._move_kernels(kernel_pool).gather(kernel_pool, table)

    def copy_blocks(self, pool: LayerPool, sources: mx.array, targets: mx.array) -> None:
        """See ``AttentionBackend.copy_blocks``. No target may be a source of the same call."""
        kernel_pool = _kernel_pool(pool)
        self._move_kernels(kernel_pool).copy(kernel_pool, sources, targets)

    def take_blocks(self, pool: LayerPool, blocks: mx.array) -> mx.array:
        """See ``AttentionBackend.take_blocks``."""
        kernel_pool = _kernel_pool(pool)
        return self._move_kernels(kernel_pool).take(kernel_pool, blocks)

    def put_blocks(self, pool: LayerPool, blocks: mx.array, contents: mx.array) -> None:
        """See ``AttentionBackend.put_blocks``."""
        kernel_pool = _kernel_pool(pool)
        self._move_kernels(kernel_pool).put(kernel_pool, blocks, contents)

    def forget_writes(self, pool: LayerPool) -> None:
        """See ``AttentionBackend.forget_writes``."""
        self.settle(pool)

    def _move_kernels(self, pool: KernelPool) -> MoveKernels:
        moves = pool.kernels.get("moves")
        if moves is None:
            moves = pool.kernels["moves"] = self._moves_of(pool.layout)
        return moves

    def _head_kernels(self, pool: KernelPool) -> HeadKernels:
        kernels = pool.kernels.get("heads")
        if kernels is None:
            layout = pool.layout
            made = self._heads.setdefault(layout, HeadKernels(layout, self._builder))
            kernels = pool.kernels["heads"] = made
        return kernels

    def _layer_kernels(self, pool: KernelPool, heads: int, scores: Scores) -> _LayerKernels:
        has_sinks, has_bias = scores.sinks is not None, scores.distance_bias is not None
        key = (heads, scores.scale, scores.window, scores.soft_cap, has_sinks, has_bias)
        kernels = pool.kernels.get(key)
        if kernels is None:
            kernels = pool.kernels[key] = self._kernels_of(pool.layout, heads, scores)
            kernels.rows.prepare(pool)
            if kernels.chunks is not None:
                kernels.chunks.prepare(pool)
        return kernels

    def _moves_of(self, layout: PoolLayout) -> MoveKernels:
        return self._moves.setdefault(layout, MoveKernels(layout, self._builder))

    def _kernels_of(self, layout: PoolLayout, heads: int, scores: Scores) -> _LayerKernels:
        rows = self._attend_kernels(layout, heads, scores)
        return _LayerKernels(rows, self._prefill_kernels(layout, heads, scores, rows))

    def _attend_kernels(self, layout: PoolLayout, heads: int, scores: Scores) -> AttendKernels:
        kind = AttendKind(
            layout=layout,
            heads=heads,
            scale=scores.scale,
            soft_cap=scores.soft_cap,
            has_sinks=scores.sinks is not None,
            has_bias=scores.distance_bias is not None,
            tuning=self._tuning,
        )
        kernels = self._attend.get(kind)
        if kernels is None:
            kernels = self._attend[kind] = AttendKernels(
                kind, self._builder, has_tensor_cores=self._language.has_tensor_cores
            )
        return kernels

    def _prefill_kernels(
        self, layout: PoolLayout, heads: int, scores: Scores, rows: AttendKernels
    ) -> PrefillKernels | None:
        kind = PrefillKind(
            layout=layout,
            heads=heads,
            scale=scores.scale,
            window=scores.window,
            soft_cap=scores.soft_cap,
            has_sinks=scores.sinks is not None,
        )
        has_kernel = self._language.has_tensor_cores and kind.is_supported
        if scores.distance_bias is not None or not has_kernel:
            return None
        kernels = self._prefill.get(kind)
        if kernels is None:
            kernels = self._prefill[kind] = PrefillKernels(kind, rows.merge, self._builder)
        return kernels


class CudaAttention(KernelAttention):
    """The backend on NVIDIA GPUs."""

    def __init__(
        self,
        block_size: int,
        quantisation: KVQuantisation | None = None,
        large_work: float = LARGE_WORK,
    ) -> None:
        super().__init__(
            block_size, CudaLanguage(), quantisation=quantisation, large_work=large_work
        )


class MetalAttention(KernelAttention):
    """The backend on Apple GPUs. It has not run on Apple hardware yet."""

    def __init__(self, block_size: int, quantisation: KVQuantisation | None = None) -> None:
        super().__init__(block_size, MetalLanguage(), quantisation=quantisation)


def _joined(parts: list[mx.array]) -> mx.array:
    """Return parts concatenated along the first axis."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def _kernel_pool(pool: LayerPool) -> KernelPool:
    if not isinstance(pool, KernelPool):
        raise TypeError("the pool belongs to another attention backend")
    return pool
