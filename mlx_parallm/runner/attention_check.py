"""Compares an attention backend with plain softmax attention, on the device it will run on."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.attention.base import AttentionBackend, LayerShape
from mlx_parallm.batch import ScheduledSequence

#: What is tested when no model says otherwise.
SHAPE = LayerShape(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
HEADS = 4
WINDOW = 5
#: Three sequences with blocks out of order, so that a wrong block table shows.
TABLES = ((7, 2, 5), (1, 6), (4, 3, 0))
#: Per step and sequence: position of the first token, number of tokens. The last step decodes two
#: rows beside a prefill chunk.
STEPS = (((0, 0, 33), (1, 0, 9)), ((0, 33, 1), (1, 9, 1), (2, 0, 20)))
NUM_BLOCKS = 8
#: Blocks in the tables hold this many tokens; smaller ones are made by cutting these.
BLOCK_SIZE = 16
#: Largest absolute error by dtype, for inputs of unit variance; float32 has room for TF32.
MAX_ERROR = {mx.float32: 2e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}


def attention_error(
    backend: AttentionBackend,
    shape: LayerShape = SHAPE,
    heads: int = HEADS,
    block_size: int = BLOCK_SIZE,
) -> float:
    """Largest absolute difference from float32 softmax attention.

    Full, windowed and sink attention are tried on ragged sequences over shuffled blocks. With
    inputs of unit variance a right backend stays below ``MAX_ERROR``.
    """
    tables = [_cut(table, block_size) for table in TABLES]
    errors = []
    for window, sinks in (
        (None, None),
        (WINDOW, None),
        (None, (mx.arange(heads) * 0.5).astype(shape.dtype)),
    ):
        errors.append(_run_case(backend, shape, heads, tables, window, sinks))
    return max(errors)


def _cut(table: Sequence[int], block_size: int) -> tuple[int, ...]:
    """The same places in a pool of blocks of another size."""
    if block_size >= BLOCK_SIZE:
        return tuple(table)
    parts = BLOCK_SIZE // block_size
    return tuple(block * parts + part for block in table for part in range(parts))


def _run_case(
    backend: AttentionBackend,
    shape: LayerShape,
    heads: int,
    tables: Sequence[tuple[int, ...]],
    window: int | None,
    sinks: mx.array | None,
) -> float:
    source = np.random.default_rng(0)
    kv_heads, dtype, scale = shape.num_kv_heads, shape.dtype, shape.key_dim**-0.5
    pool = backend.new_pool(shape, 1 + max(max(table) for table in tables))
    keys = [np.zeros((0, kv_heads, shape.key_dim), np.float32) for _ in tables]
    values = [np.zeros((0, kv_heads, shape.value_dim), np.float32) for _ in tables]
    error = 0.0
    for step in STEPS:
        total = sum(count for _, _, count in step)
        query = _normal(source, dtype, total, heads, shape.key_dim)
        key = _normal(source, dtype, total, kv_heads, shape.key_dim)
        value = _normal(source, dtype, total, kv_heads, shape.value_dim)
        plan = backend.plan(_sequences(step, tables))
        rows = [mx.array(one)[:, :, None].astype(dtype) for one in (query, key, value)]
        backend.write(pool, plan, rows[1], rows[2])
        output = backend.attend(pool, plan, rows[0], scale=scale, window=window, sinks=sinks)
        mx.eval(output, pool.arrays())
        found = np.array(output.astype(mx.float32))[:, :, 0]
        row = 0
        for sequence, _, count in step:
            part = slice(row, row + count)
            keys[sequence] = np.concatenate([keys[sequence], key[part]])
            values[sequence] = np.concatenate([values[sequence], value[part]])
            wanted = dense_attention(
                query[part], keys[sequence], values[sequence], scale, window, sinks
            )
            error = max(error, float(np.abs(found[part] - wanted).max()))
            row += count
    return error


def _normal(source: np.random.Generator, dtype: mx.Dtype, *shape: int) -> np.ndarray:
    """Values of unit variance that the dtype holds exactly, float32."""
    values = mx.array(source.standard_normal(shape, dtype=np.float32))
    return np.array(values.astype(dtype).astype(mx.float32))


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
    scores = np.einsum("lhd,shd->hls", queries, keys.repeat(groups, axis=1)) * scale
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
    return np.einsum("hls,shd->lhd", weights[..., :total], values.repeat(groups, axis=1))


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
