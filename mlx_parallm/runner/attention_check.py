"""Compares an attention backend with plain softmax attention, on the device it will run on."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.attention.base import AttentionBackend, LayerShape
from mlx_parallm.attention.quantisation import KVQuantisation
from mlx_parallm.batch import ScheduledSequence

#: What is tested when no model says otherwise.
SHAPE = LayerShape(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
HEADS = 4
WINDOW = 5
#: Three sequences with blocks out of order, so that a wrong block table shows.
TABLES = ((7, 2, 5, 9, 8, 10), (1, 6), (4, 3, 0))
#: Per step and sequence: position of the first token, number of tokens. The second step decodes two
#: rows beside a prefill chunk; in the last, a chunk follows so many keys that kernels cut them.
STEPS = (
    ((0, 0, 70), (1, 0, 9)),
    ((0, 70, 1), (1, 9, 1), (2, 0, 20)),
    ((1, 10, 1), (2, 20, 1), (0, 71, 18)),
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
    for window, sinks in (
        (None, None),
        (WINDOW, None),
        (None, (mx.arange(heads) * 0.5).astype(shape.dtype)),
    ):
        errors.append(_run_case(backend, shape, heads, tables, window, sinks))
    return max(errors)


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
    rows = [
        _normal(source, shape.dtype, length, shape.num_kv_heads, dim)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    plan = backend.plan(_sequences(((0, 0, length),), [table]))
    backend.write(pool, plan, *(mx.array(one)[:, :, None].astype(shape.dtype) for one in rows))
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
    source, quantisation = np.random.default_rng(0), backend.quantisation
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
        if quantisation is not None:
            key, value = (
                _rounded(quantised(one, quantisation, decided=True), dtype) for one in (key, value)
            )
        plan = backend.plan(_sequences(step, tables))
        rows = [mx.array(one)[:, :, None].astype(dtype) for one in (query, key, value)]
        backend.write(pool, plan, rows[1], rows[2])
        output = backend.attend(pool, plan, rows[0], scale=scale, window=window, sinks=sinks)
        mx.eval(output, pool.arrays())
        found = np.array(output.astype(mx.float32))[:, :, 0]
        if quantisation is not None:
            key, value = (quantised(one, quantisation) for one in (key, value))
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
