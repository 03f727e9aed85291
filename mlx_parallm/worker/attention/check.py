"""Compares an attention backend with plain softmax attention, on the device it will run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend, LayerShape, Scores
from mlx_parallm.worker.attention.quantisation import KVQuantisation

#: What is tested when no model says otherwise.
SHAPE = LayerShape(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
HEADS = 4
WINDOW = 5
#: Tokens that the last sequence has from the beginning: so many that kernels cut a chunk's keys.
WRITTEN = 1600
#: Sequences with blocks out of order, so that a wrong block table shows.
TABLES = ((7, 2, 5, 9, 8, 10), (1, 6), (4, 3, 0), tuple(range(112, 10, -1)))
#: Per step and sequence: position of the first token, number of tokens. The second and third decode
#: two rows beside a prefill chunk.
STEPS = (
    ((0, 0, 70), (1, 0, 9)),
    ((0, 70, 1), (1, 9, 1), (2, 0, 20)),
    ((1, 10, 1), (2, 20, 1), (0, 71, 18)),
    ((3, WRITTEN, 18),),
)
#: Blocks in the tables hold this many tokens; smaller ones are made by cutting these.
BLOCK_SIZE = 16
#: Largest absolute error by dtype, for inputs of unit variance; float32 has room for TF32.
MAX_ERROR = {mx.float32: 2e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}

#: Of one rounding to a dtype, per unit.
ROUNDING = {mx.float32: 1e-6, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
#: A division rounded otherwise chooses the next level once in a while.
MAX_MISREAD = 0.01


def attention_error(
    backend: AttentionBackend,
    shape: LayerShape = SHAPE,
    heads: int = HEADS,
    block_size: int = BLOCK_SIZE,
) -> float:
    """Largest absolute difference from float32 softmax attention.

    For a backend of quantised pools, from attention over keys and values quantised by NumPy. Full,
    windowed and sink attention are tried on ragged sequences over shuffled blocks. With inputs
    of unit variance a right backend stays below ``MAX_ERROR``.
    """
    tables = [_cut(table, block_size) for table in TABLES]
    errors = []
    for scores in checked_scores(shape, heads):
        trial = _Trial(backend, shape, tables)
        trial.write(((len(tables) - 1, 0, WRITTEN),))
        errors += [trial.error(step, heads, scores) for step in STEPS]
    return float(np.max(errors))


def checked_scores(shape: LayerShape, heads: int) -> list[Scores]:
    """Return the kinds of attention that are tried."""
    scale = shape.key_dim**-0.5
    sinks = (mx.arange(heads) * 0.5).astype(shape.dtype)
    return [Scores(scale), Scores(scale, window=WINDOW), Scores(scale, sinks=sinks)]


def misread_share(
    backend: AttentionBackend, shape: LayerShape = SHAPE, block_size: int = BLOCK_SIZE
) -> float:
    """Share of keys and values that a quantised pool gives back otherwise than it should.

    Attention in a 16-bit type is too coarse to tell a level from the next; this is not. 0 for a
    backend that does not quantise.
    """
    one = backend.quantisation
    if one is None:
        return 0.0
    source = np.random.default_rng(0)
    table, length = _cut(TABLES[0], block_size), STEPS[0][0][2]
    pool = backend.new_pool(shape, 1 + max(table))
    rows = _keys_and_values(source, shape, length)
    plan = backend.plan(_sequences(((0, 0, length),), [table]))
    backend.write(pool, plan, *(_as_rows(one, shape.dtype) for one in rows))
    wrong = []
    for found, given in zip(backend.gather(pool, mx.array([table])), rows, strict=True):
        wanted = quantised(given, one).swapaxes(0, 1)
        apart = np.abs(np.array(found[0, :, :length].astype(mx.float32)) - wanted)
        wrong.append(apart > ROUNDING[shape.dtype] * np.abs(wanted) + 1e-5)
    return float(np.concatenate(wrong, axis=-1).mean())


def _cut(table: Sequence[int], block_size: int) -> tuple[int, ...]:
    """The same places in a pool of blocks of another size."""
    if block_size >= BLOCK_SIZE:
        return tuple(table)
    parts = -(-BLOCK_SIZE // block_size)
    return tuple(block * parts + part for block in table for part in range(parts))


_Step = Sequence[tuple[int, int, int]]


class _Trial:
    """A pool, and what was written to it, as float32 arrays."""

    def __init__(
        self, backend: AttentionBackend, shape: LayerShape, tables: Sequence[tuple[int, ...]]
    ) -> None:
        self._source = np.random.default_rng(0)
        self._backend, self._shape, self._tables = backend, shape, tables
        self._pool = backend.new_pool(shape, 1 + max(max(table) for table in tables))
        dims = (shape.key_dim, shape.value_dim)
        self._written = [
            [np.zeros((0, shape.num_kv_heads, dim), np.float32) for dim in dims] for _ in tables
        ]

    def write(self, step: _Step) -> Any:
        """Write a step's keys and values; gives its plan."""
        backend, shape, one = self._backend, self._shape, self._backend.quantisation
        total = sum(count for _, _, count in step)
        rows = _keys_and_values(self._source, shape, total)
        if one is not None:
            rows = [_rounded(quantised(each, one, decided=True), shape.dtype) for each in rows]
        plan = backend.plan(_sequences(step, self._tables))
        backend.write(self._pool, plan, *(_as_rows(each, shape.dtype) for each in rows))
        mx.eval(self._pool.arrays())
        if one is not None:
            rows = [quantised(each, one) for each in rows]
        row = 0
        for sequence, _, count in step:
            written = self._written[sequence]
            written[:] = [
                np.concatenate([before, each[row : row + count]])
                for before, each in zip(written, rows, strict=True)
            ]
            row += count
        return plan

    def error(self, step: _Step, heads: int, scores: Scores) -> float:
        """Write and attend; the largest difference from what is right."""
        shape, scale, window, sinks = self._shape, scores.scale, scores.window, scores.sinks
        total = sum(count for _, _, count in step)
        queries = _normal(self._source, shape.dtype, total, heads, shape.key_dim)
        plan = self.write(step)
        rows = _as_rows(queries, shape.dtype)
        output = self._backend.attend(
            self._pool, plan, rows, scale=scale, window=window, sinks=sinks
        )
        found = np.array(output.astype(mx.float32))[:, :, 0]
        row, worst = 0, 0.0
        for sequence, _, count in step:
            part = slice(row, row + count)
            keys, values = self._written[sequence]
            wanted = dense_attention(queries[part], keys, values, scale, window, sinks)
            # Not max(), which would forget NaN.
            worst = np.maximum(worst, np.abs(found[part] - wanted).max())
            row += count
        return float(worst)


def _keys_and_values(
    source: np.random.Generator, shape: LayerShape, count: int
) -> list[np.ndarray]:
    """Of so many tokens, float32 ``[count, K, D]`` and ``[count, K, V]``."""
    dims = (shape.key_dim, shape.value_dim)
    return [_normal(source, shape.dtype, count, shape.num_kv_heads, dim) for dim in dims]


def _as_rows(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """As layers give them, ``[count, heads, 1, dim]``."""
    return mx.array(values)[:, :, None].astype(dtype)


def _normal(source: np.random.Generator, dtype: mx.Dtype, *shape: int) -> np.ndarray:
    """Values of unit variance that the dtype holds exactly, float32."""
    return _rounded(source.standard_normal(shape, dtype=np.float32), dtype)


def _rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """What a dtype holds of values, float32."""
    return np.array(mx.array(values).astype(dtype).astype(mx.float32))


def quantised(values: np.ndarray, one: KVQuantisation, *, decided: bool = False) -> np.ndarray:
    """What is read back of values ``[..., dim]`` once they were written to a quantised pool.

    With ``decided`` a value stays where it was between two levels, but is moved away from the
    middle, where backends that divide differently would choose differently.
    """
    groups = []
    for first in range(0, values.shape[-1], one.group_size):
        group = values[..., first : first + one.group_size].astype(np.float32)
        least = _rounded(group.min(axis=-1, keepdims=True), one.scale_dtype)
        span = group.max(axis=-1, keepdims=True) - least
        step = _rounded(span / np.float32(one.levels), one.scale_dtype)
        inverse = np.float32(1) / np.where(step > 0, step, np.float32(np.inf))
        exact = (group - least) * inverse
        level = np.rint(exact)
        if decided:
            level += (exact - level) / 2
        groups.append(level.clip(0, one.levels) * step + least)
    return np.concatenate(groups, axis=-1, dtype=np.float32)


def dense_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> np.ndarray:
    """Softmax attention of the last L positions: ``[L, H, D]`` over ``[S, K, D]``."""
    length, heads, _ = queries.shape
    total = len(keys)
    groups = heads // keys.shape[1]
    by_head = keys.repeat(groups, axis=1).transpose(1, 2, 0)
    scores = queries.swapaxes(0, 1) @ by_head * scale
    position = np.arange(total - length, total)[:, None]
    column = np.arange(total)
    seen = column <= position
    if window is not None:
        seen &= column > position - window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(
            np.array(sinks.astype(mx.float32))[:, None, None], (heads, length, 1)
        )
        scores = np.concatenate([scores, extra], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    summed = weights[..., :total] @ values.repeat(groups, axis=1).swapaxes(0, 1)
    return summed.swapaxes(0, 1)


def _sequences(
    step: Sequence[tuple[int, int, int]], tables: Sequence[tuple[int, ...]]
) -> list[ScheduledSequence]:
    return [
        ScheduledSequence(
            seq_id=sequence,
            slot=sequence,
            start=start,
            token_ids=(1,) * count,
            block_table=tables[sequence],
        )
        for sequence, start, count in step
    ]
