"""Shapes that paged attention must get right, and how far a backend is from softmax attention.

They run on a GPU (check_kernels.py); small ones also run on the CPU over shims (tests/kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend, LayerPool, LayerShape
from mlx_parallm.worker.attention.check import quantised
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernel_pool import KernelPool
from mlx_parallm.worker.attention.quantisation import KVQuantisation

#: A few roundings of the dtype.
TOLERANCES = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer and one step.

    Attributes:
        sequences: positions already in the pool and tokens of the step, per sequence.
        heads: query heads.
        kv_heads: key/value heads.
        key_dim: size of queries and keys.
        value_dim: size of values; None for ``key_dim``.
        dtype: of queries, keys and values.
        block_size: tokens per block.
        window: latest positions that a row sees; None for all.
        sinks: whether there are sinks.
        soft_cap: of the scores.
        distances: distances of a bias by distance; None for none.
        quantisation: of the pool; a backend must be made with it.
    """

    sequences: tuple[tuple[int, int], ...] = ((70, 1), (3, 1), (16, 3), (0, 1))
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int | None = None
    dtype: mx.Dtype = mx.float32
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    distances: int | None = None
    quantisation: KVQuantisation | None = None

    @property
    def tolerance(self) -> float:
        """Largest error, per unit of the largest true value."""
        # A division rounded otherwise may choose the next level once in a while.
        return max(TOLERANCES[self.dtype], 1e-3 if self.quantisation else 0)

    @property
    def shape(self) -> LayerShape:
        """The layer."""
        value_dim = self.value_dim or self.key_dim
        return LayerShape(
            num_kv_heads=self.kv_heads, key_dim=self.key_dim, value_dim=value_dim, dtype=self.dtype
        )

    @property
    def scale(self) -> float:
        """Scale of the scores: a little off the usual one, so that a forgotten scale shows."""
        return 1.1 * self.key_dim**-0.5

    def __str__(self) -> str:
        """Everything that differs from the default."""
        dims = f"{self.key_dim}" + (f"/{self.value_dim}" if self.value_dim else "")
        parts = [
            str(self.dtype).rpartition(".")[2],
            f"dim {dims}",
            f"heads {self.heads}/{self.kv_heads}",
            f"block {self.block_size}",
            " ".join(f"{start}+{count}" for start, count in self.sequences[:4]),
        ]
        if len(self.sequences) > 4:
            parts[-1] += f" … ({len(self.sequences)})"
        parts += [f"window {self.window}"] if self.window else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"cap {self.soft_cap:g}"] if self.soft_cap else []
        parts += [f"bias of {self.distances}"] if self.distances else []
        if self.quantisation:
            parts.append(f"KV {self.quantisation.bits} bits by {self.quantisation.group_size}")
        return ", ".join(parts)


class Trial:
    """A case's random data, what it should give, and what a backend gives."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        source = np.random.default_rng(seed)
        totals = [start + count for start, count in case.sequences]
        blocks = [-(-total // case.block_size) for total in totals]
        self.num_blocks = sum(blocks) + 3
        order = source.permutation(self.num_blocks).tolist()
        self.tables = [tuple(order.pop() for _ in range(count)) for count in blocks]
        shape = case.shape
        self.keys = [_rounded(source, case, total, shape.key_dim) for total in totals]
        self.values = [_rounded(source, case, total, shape.value_dim) for total in totals]
        rows = sum(count for _, count in case.sequences)
        self.queries = _rounded(source, case, rows, shape.key_dim, heads=case.heads)
        self.sinks = None
        if case.sinks:
            self.sinks = source.standard_normal(case.heads).astype(np.float32)
        self.bias = None
        if case.distances:
            random = source.standard_normal((case.heads, case.distances), dtype=np.float32)
            self.bias = mx.array(random * 2)

    def fill(self, backend: AttentionBackend, *, poison: bool = False) -> LayerPool:
        """Return a pool with the tokens before the step, written at once.

        With ``poison``, everything else in it is NaN.
        """
        pool = backend.new_pool(self.case.shape, self.num_blocks)
        if poison:
            pool.keys, pool.values = _poisoned(pool.keys), _poisoned(pool.values)
            mx.eval(pool.keys, pool.values)
            if isinstance(pool, KernelPool):
                assert isinstance(backend, KernelAttention)
                pool.scales = tuple(map(_poisoned, pool.scales))
                pool.bind(backend._language.bound)
        before = [(i, 0, start) for i, (start, _) in enumerate(self.case.sequences) if start]
        if before:
            self._write(backend, pool, before)
        return pool

    def run(self, backend: AttentionBackend, pool: LayerPool) -> mx.array:
        """Return the step's attention, ``[T, H, 1, V]``."""
        step = [(i, start, count) for i, (start, count) in enumerate(self.case.sequences)]
        return self.attend(backend, pool, self._write(backend, pool, step))

    def attend(
        self, backend: AttentionBackend, pool: LayerPool, plan: Any, rows: int | None = None
    ) -> mx.array:
        """Return the step's attention, ``[T, H, 1, V]``, of a pool that has its keys and values.

        ``rows`` are those of the plan; None for the step's.
        """
        options: dict[str, Any] = {"soft_cap": self.case.soft_cap} if self.case.soft_cap else {}
        if self.bias is not None:
            options["distance_bias"] = self.bias
        return backend.attend(
            pool,
            plan,
            _array(self.queries[:rows], self.case.dtype),
            scale=self.case.scale,
            window=self.case.window,
            sinks=None if self.sinks is None else mx.array(self.sinks).astype(self.case.dtype),
            **options,
        )

    def error(self, actual: mx.array) -> float:
        """Largest difference from softmax attention in float64, per unit of the largest value."""
        return self._error(actual, self.wanted())

    def scheduled(self, step: Sequence[tuple[int, int, int]]) -> list[ScheduledSequence]:
        """Sequences of a step: index, position of the first token and number of tokens of each."""
        return [
            ScheduledSequence(
                seq_id=i,
                slot=i,
                start=start,
                token_ids=(1,) * count,
                block_table=self.tables[i][: -(-(start + count) // self.case.block_size)],
            )
            for i, start, count in step
        ]

    def source_rows(self, rows: Sequence[int]) -> list[ScheduledSequence]:
        """Rows of cross-attention: each sees all of the sequence with its index."""
        totals = [start + count for start, count in self.case.sequences]
        return self.scheduled([(i, totals[i] - 1, 1) for i in rows])

    def source_error(self, actual: mx.array, rows: Sequence[int]) -> float:
        """Like ``error``, for rows of cross-attention."""
        wanted = [
            self._dense(self.queries[row : row + 1], *self._kv(i), len(self.keys[i]) - 1)
            for row, i in enumerate(rows)
        ]
        return self._error(actual, np.concatenate(wanted))

    def _error(self, actual: mx.array, wanted: np.ndarray) -> float:
        difference = np.abs(np.array(actual.astype(mx.float32))[:, :, 0] - wanted)
        return float(difference.max() / max(np.abs(wanted).max(), 1))

    def _kv(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a sequence as the pool returns them."""
        keys, values, scheme = self.keys[sequence], self.values[sequence], self.case.quantisation
        return (quantised(keys, scheme), quantised(values, scheme)) if scheme else (keys, values)

    def wanted(self) -> np.ndarray:
        """Softmax attention of the step's rows, ``[T, H, V]``."""
        outputs, row = [], 0
        for i, (start, count) in enumerate(self.case.sequences):
            queries = self.queries[row : row + count]
            outputs.append(self._dense(queries, *self._kv(i), start))
            row += count
        return np.concatenate(outputs)

    def _dense(
        self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int
    ) -> np.ndarray:
        case = self.case
        share = case.heads // case.kv_heads
        scores = np.einsum("lhd,shd->hls", queries, keys.repeat(share, axis=1)) * case.scale
        if case.soft_cap:
            scores = np.tanh(scores / case.soft_cap) * case.soft_cap
        rows = np.arange(start, start + len(queries))[:, None]
        columns = np.arange(len(keys))
        seen = columns <= rows
        if case.window:
            seen &= columns > rows - case.window
        if self.bias is not None:
            table = np.array(self.bias).astype(np.float64)
            scores += table[:, (rows - columns).clip(0, table.shape[1] - 1)]
        weights = np.exp(np.where(seen, scores, -np.inf))
        total = weights.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            rounded = np.array(mx.array(self.sinks).astype(case.dtype).astype(mx.float32))
            total += np.exp(rounded.astype(np.float64))[:, None, None]
        return np.einsum("hls,shd->lhd", weights / total, values.repeat(share, axis=1))

    def _write(
        self, backend: AttentionBackend, pool: LayerPool, step: Sequence[tuple[int, int, int]]
    ) -> Any:
        plan = backend.plan(self.scheduled(step))
        keys = np.concatenate([self.keys[i][start : start + n] for i, start, n in step])
        values = np.concatenate([self.values[i][start : start + n] for i, start, n in step])
        dtype = self.case.dtype
        backend.write(pool, plan, _array(keys, dtype), _array(values, dtype))
        return plan


def _poisoned(array: mx.array) -> mx.array:
    """Return an array like this one with all bytes set, which is NaN in float dtypes."""
    if array.dtype == mx.uint32:
        return mx.full(array.shape, 0xFFFFFFFF, array.dtype)
    return mx.full(array.shape, mx.nan, array.dtype)


def _rounded(
    source: np.random.Generator, case: Case, rows: int, dim: int, heads: int | None = None
) -> np.ndarray:
    """Random numbers that the case's dtype can hold, float64 ``[rows, heads, dim]``."""
    size = (rows, heads or case.kv_heads, dim)
    random = mx.array(source.standard_normal(size, dtype=np.float32)).astype(case.dtype)
    return np.array(random.astype(mx.float32)).astype(np.float64)


def _array(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """``[rows, heads, 1, dim]``."""
    return mx.array(values.astype(np.float32)).astype(dtype)[:, :, None]
