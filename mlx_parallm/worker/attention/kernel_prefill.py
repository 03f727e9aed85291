"""Long prefill chunks: a kernel for tensor cores, or stock attention over gathered KV.

MLX's attention on CUDA compiles a cuDNN graph for every new pair of lengths, 50 to 80 ms each, but
is about twice as fast as the kernel for large chunks. The kernel takes any lengths, and all chunks
at once (``docs/decisions/012-prefill-on-tensor-cores.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import PROCESSORS, Kernel
from mlx_parallm.worker.attention.base import Scores
from mlx_parallm.worker.attention.chunk_plan import LONG_CHUNK, ChunkWork, LongChunk, chunk_work
from mlx_parallm.worker.attention.dense import dense_attention
from mlx_parallm.worker.attention.kernel_attend import score_constants
from mlx_parallm.worker.attention.kernel_plan import KernelPlan
from mlx_parallm.worker.attention.kernel_pool import VECTOR, WARP, KernelPool, PoolLayout
from mlx_parallm.worker.attention.key_spans import MERGE_KEYS, TILE

# WARPS of a threadgroup; each takes 16 query rows.
WARPS = 8
ROWS = WARPS * 16
# THREADGROUPS: one for each processor, which is as many as fit.
THREADGROUPS = PROCESSORS
MAX_DIM = 128

# Merge takes the inputs of a merge and the shape of its output.
Merge = Callable[[list[mx.array], tuple[int, ...]], mx.array]


@dataclass(frozen=True, slots=True)
class PrefillKind:
    """Everything that the prefill kernel is compiled for."""

    layout: PoolLayout
    heads: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool

    @property
    def share(self) -> int:
        """Return the query heads of one KV head."""
        return self.heads // self.layout.shape.num_kv_heads

    @property
    def is_supported(self) -> bool:
        """True if the kernel supports such layers."""
        shape = self.layout.shape
        return (
            self.layout.quantisation is None
            and shape.dtype in (mx.bfloat16, mx.float16)
            and shape.key_dim <= MAX_DIM
            and shape.value_dim <= MAX_DIM
            and shape.key_dim % VECTOR == 0
            # Neighbouring lanes take neighbouring groups of 8 columns.
            and shape.value_dim % (2 * VECTOR) == 0
            and self.share <= ROWS
            # The kernel takes the largest product for the largest score.
            and self.scale > 0
        )


class PrefillKernels:
    """The prefill kernels of one kind, ``tensor_cores/prefill.cu``.

    Parts are merged by decode's kernel.
    """

    def __init__(self, kind: PrefillKind, merge: Merge, builder: KernelBuilder) -> None:
        self._kind = kind
        self._merge = merge
        self._builder = builder
        self._made: dict[bool, Kernel] = {}
        self._is_prepared = False
        # Shorter windows are never cut.
        self._has_parts = kind.window is None or kind.window > MERGE_KEYS
        # These are needed by every layer of every step.
        self._tokens = ROWS // kind.share
        self._at_once = max(1, THREADGROUPS // kind.layout.shape.num_kv_heads)

    def begin(self) -> None:
        """Start to compile all kernels, in the background where the language allows it."""
        for is_split in (False, True) if self._has_parts else (False,):
            self._kernel(is_split=is_split)

    def prepare(self, pool: KernelPool) -> None:
        """Compile and run all kernels once; it takes seconds that streams would wait for later."""
        if self._is_prepared:
            return
        self._is_prepared = True
        self.begin()
        kind, shape = self._kind, self._kind.layout.shape
        blocks = (0,) * -(-LONG_CHUNK // kind.layout.block_size)
        chunk = LongChunk(first=0, length=LONG_CHUNK, start=0, blocks=blocks)
        queries = mx.zeros((chunk.length, kind.heads, 1, shape.key_dim), shape.dtype)
        sinks = mx.zeros((kind.heads,), shape.dtype) if kind.has_sinks else None
        whole = chunk_work([chunk], self._tokens, kind.window, 1)
        works = [whole, whole.in_parts()] if self._has_parts else [whole]
        mx.eval([self._attend(pool, work, queries, sinks) for work in works])

    def run(
        self, pool: KernelPool, plan: KernelPlan, count: int, queries: mx.array, scores: Scores
    ) -> mx.array:
        """Return the attention of the plan's first ``count`` long chunks, ``[rows, H, 1, V]``."""
        work = plan.chunk_work(self._tokens, count, scores.window, self._at_once)
        return self._attend(pool, work, queries, scores.sinks)

    def _attend(
        self, pool: KernelPool, work: ChunkWork, queries: mx.array, sink_logits: mx.array | None
    ) -> mx.array:
        kind, shape = self._kind, self._kind.layout.shape
        inputs = [queries, work.items, work.tables, pool.token, *pool.bound]
        sinks = [] if sink_logits is None else [sink_logits]
        output = (work.num_rows, kind.heads, 1, shape.value_dim)
        if work.spans is None:
            return self._launch(work, [*inputs, *sinks], [(output, shape.dtype)])[0]
        rows = work.num_parts * kind.heads
        parts = [((rows, shape.value_dim), mx.float32), ((rows, 2), mx.float32)]
        sums, stats = self._launch(work, inputs, parts)
        return self._merge([sums, stats, work.spans, *sinks], output)

    def _launch(
        self,
        work: ChunkWork,
        inputs: list[mx.array],
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        kind = self._kind
        return self._kernel(is_split=work.spans is not None)(
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=(work.items.shape[0] * kind.layout.shape.num_kv_heads * WARPS * WARP, 1, 1),
            threadgroup=(WARPS * WARP, 1, 1),
        )

    def _kernel(self, *, is_split: bool) -> Kernel:
        if is_split not in self._made:
            self._made[is_split] = self._make(is_split=is_split)
        return self._made[is_split]

    def _make(self, *, is_split: bool) -> Kernel:
        kind, layout = self._kind, self._kind.layout
        sinks = ("sinks",) if kind.has_sinks and not is_split else ()
        spec = KernelSpec(
            "tensor_cores/prefill.cu",
            ("queries", "items", "tables", "previous", *layout.pools, *sinks),
            ("part_sums", "part_stats") if is_split else ("output",),
            headers=("common.metal", "tensor_cores/tensor.cu"),
        )
        constants: dict[str, Constant] = {
            "T": layout.shape.dtype,
            **layout.constants(),
            "HEADS": kind.heads,
            "SHARE": kind.share,
            "WARPS": WARPS,
            "KEYS": TILE,
            "WINDOW": kind.window or 0,
            "SPLIT": is_split,
            "SINKS": kind.has_sinks,
            **score_constants(kind.scale, kind.soft_cap),
        }
        return self._builder.kernel(spec, constants)


def attend_chunk(
    chunk: LongChunk, queries: mx.array, keys: mx.array, values: mx.array, scores: Scores
) -> mx.array:
    """Return stock attention of one chunk's rows, ``[length, H, 1, V]``.

    Args:
        chunk: the chunk.
        queries: queries of the whole step, ``[T, H, 1, D]``.
        keys: ``[1, K, S, D]``, with S at least what the last row sees.
        values: ``[1, K, S, V]``.
        scores: how scores become weights.
    """
    own = queries[chunk.first : chunk.first + chunk.length, :, 0].swapaxes(0, 1)[None]
    before = chunk.start - chunk.begin
    after = chunk.num_keys - chunk.end
    # Beyond the chunk's end the pool may hold infinities of other sequences.
    keys, values = (_padded(array[:, :, : chunk.end], 0, after) for array in (keys, values))
    output = dense_attention(
        _padded(own, before, after),
        keys,
        values,
        scale=scores.scale,
        mask=chunk.mask(scores.window),
        sinks=scores.sinks,
        soft_cap=scores.soft_cap,
    )
    rows = output[0, :, before : before + chunk.length]
    return rows.swapaxes(0, 1)[:, :, None]


def _padded(array: mx.array, before: int, after: int) -> mx.array:
    """Return an array of four axes with zeros around the third."""
    if not (before or after):
        return array
    return mx.pad(array, [(0, 0), (0, 0), (before, after), (0, 0)])
