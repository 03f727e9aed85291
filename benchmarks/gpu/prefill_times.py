"""Attention of prefill chunks on this GPU: the kernel and stock attention, one layer of 8B shape.

    python -m benchmarks.gpu.prefill_times

Chunks are ``tokens after`` so many that the pool holds. Stock attention's first time is that with a
shape which the process has not met. Layers are chained as in a model.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape, Scores
from mlx_parallm.worker.attention.chunk_plan import LongChunk
from mlx_parallm.worker.attention.kernel_backend import CudaAttention, KernelAttention
from mlx_parallm.worker.attention.kernel_plan import KernelPlan
from mlx_parallm.worker.attention.kernel_pool import KernelPool
from mlx_parallm.worker.attention.kernel_prefill import attend_chunk

BLOCK_SIZE, HEADS, DIM = 16, 32, 128
SHAPE = LayerShape(num_kv_heads=8, key_dim=DIM, value_dim=DIM, dtype=mx.bfloat16)
SCORES = Scores(scale=DIM**-0.5)
#: ``CHUNKS``: number of prompts, tokens of each, and tokens before them.
CHUNKS = (
    (64, 100, 0),
    (1, 512, 0),
    (1, 2048, 0),
    (1, 128, 5000),
    (1, 256, 13_000),
    (1, 448, 13_000),
    (1, 1024, 8000),
    (1, 2048, 8000),
    (1, 4096, 12_000),
)
LAYERS, REPEATS = 12, 7

Attention = Callable[[mx.array], mx.array]


class Prompts:
    """Some prompts' chunks in a pool of random numbers."""

    def __init__(self, backend: KernelAttention, count: int, tokens: int, before: int) -> None:
        blocks = -(-(before + tokens) // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(count * blocks).reshape(count, blocks)
        self._backend = backend
        self.pool: KernelPool = backend.new_pool(SHAPE, count * blocks)
        for name in ("keys", "values"):
            random = mx.random.normal(getattr(self.pool, name).shape).astype(SHAPE.dtype)
            setattr(self.pool, name, random)
        self.plan: KernelPlan = backend.plan(
            [
                ScheduledSequence(
                    seq_id=i,
                    slot=i,
                    start=before,
                    token_ids=(1,) * tokens,
                    block_table=tuple(table),
                )
                for i, table in enumerate(order.tolist())
            ]
        )
        self.queries = mx.random.normal((count * tokens, HEADS, 1, DIM)).astype(SHAPE.dtype)
        self.operations = 4 * count * tokens * (before + tokens / 2) * HEADS * DIM
        mx.eval(self.pool.arrays(), self.queries)

    def stock(self, queries: mx.array) -> mx.array:
        """Return stock attention of each chunk over its gathered keys and values."""
        return mx.concatenate([self._alone(chunk, queries) for chunk in self.plan.chunks])

    def _alone(self, chunk: LongChunk, queries: mx.array) -> mx.array:
        keys, values = self._backend.gather(self.pool, chunk.table)
        return attend_chunk(chunk, queries, keys, values, SCORES)

    def kernel(self, queries: mx.array) -> mx.array:
        """Return the backend's attention of the chunks."""
        scale, window, sinks = SCORES.scale, SCORES.window, SCORES.sinks
        return self._backend.attend(
            self.pool, self.plan, queries, scale=scale, window=window, sinks=sinks
        )


def micros(attend: Attention, queries: mx.array) -> tuple[float, float]:
    """Return one layer's least time in microseconds, and its first."""
    times: list[float] = []
    for layers in (1, *[LAYERS] * REPEATS):
        started = time.perf_counter()
        hidden = queries
        for _ in range(layers):
            # Each output is the next layer's query, so that layers do not overlap.
            hidden = attend(hidden)
        mx.eval(hidden)
        times.append((time.perf_counter() - started) / layers * 1e6)
    return min(times[1:]), times[0]


def main() -> int:
    """Print a line a chunk."""
    # The kernel gets chunks of any size.
    backend = CudaAttention(BLOCK_SIZE, large_work=math.inf)
    for count, tokens, before in CHUNKS:
        prompts = Prompts(backend, count, tokens, before)
        kernel, _ = micros(prompts.kernel, prompts.queries)
        stock, first = micros(prompts.stock, prompts.queries)
        speeds = (prompts.operations / time_us / 1e6 for time_us in (kernel, stock))
        rates = " and ".join(f"{speed:.0f}" for speed in speeds)
        print(
            f"{count:2} x {tokens:4} after {before:5}: kernel {kernel:6.0f} us, stock {stock:6.0f},"
            f" first {first / 1e3:5.0f} ms; {rates} TFLOP/s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
