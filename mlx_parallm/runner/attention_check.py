"""Compares an attention backend with plain softmax attention, on the device it will run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.attention.base import AttentionBackend, LayerShape
from mlx_parallm.attention.reference import ReferenceAttention
from mlx_parallm.batch import ScheduledSequence

HEADS, KV_HEADS, DIM = 4, 2, 64
SCALE = DIM**-0.5
WINDOW = 5
#: Three sequences with blocks out of order, so that a wrong block table shows.
TABLES = ((7, 2, 5), (1, 6), (4, 3, 0))
#: Per step and sequence: position of the first token, number of tokens. The last step decodes two
#: rows beside a prefill chunk.
STEPS = (((0, 0, 33), (1, 0, 9)), ((0, 33, 1), (1, 9, 1), (2, 0, 20)))
NUM_BLOCKS = 8
BLOCK_SIZE = 16
MAX_ERROR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport:
    """The backend in use and how far it is from softmax attention (absolute, float32)."""

    backend: str
    max_error: float
    passed: bool


def make_backend(block_size: int) -> AttentionBackend:
    """The backend that models use on the default device."""
    return ReferenceAttention(block_size)


def attention_report() -> AttentionReport:
    """Test the backend that models use on the default device."""
    backend = make_backend(BLOCK_SIZE)
    error = attention_error(backend)
    return AttentionReport(backend=backend.name, max_error=error, passed=error <= MAX_ERROR)


def attention_error(backend: AttentionBackend) -> float:
    """Largest absolute difference from float32 softmax attention; blocks of 16 tokens.

    Full, windowed and sink attention are tried on ragged sequences over shuffled blocks. With
    float32 inputs of unit variance a right backend stays below 1e-3, also under TF32.
    """
    errors = []
    for window, sinks in ((None, None), (WINDOW, None), (None, mx.arange(HEADS) * 0.5)):
        errors.append(_run_case(backend, window, sinks))
    return max(errors)


def _run_case(backend: AttentionBackend, window: int | None, sinks: mx.array | None) -> float:
    source = np.random.default_rng(0)
    shape = LayerShape(num_kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, dtype=mx.float32)
    pool = backend.new_pool(shape, NUM_BLOCKS)
    keys = [np.zeros((0, KV_HEADS, DIM), np.float32) for _ in TABLES]
    values = list(keys)
    error = 0.0
    for step in STEPS:
        total = sum(count for _, _, count in step)
        query = source.standard_normal((total, HEADS, DIM), dtype=np.float32)
        key = source.standard_normal((total, KV_HEADS, DIM), dtype=np.float32)
        value = source.standard_normal((total, KV_HEADS, DIM), dtype=np.float32)
        plan = backend.plan(_sequences(step))
        backend.write(pool, plan, mx.array(key)[:, :, None], mx.array(value)[:, :, None])
        output = backend.attend(
            pool, plan, mx.array(query)[:, :, None], scale=SCALE, window=window, sinks=sinks
        )
        mx.eval(output, pool.keys, pool.values)
        found = np.array(output)[:, :, 0]
        row = 0
        for sequence, _, count in step:
            part = slice(row, row + count)
            keys[sequence] = np.concatenate([keys[sequence], key[part]])
            values[sequence] = np.concatenate([values[sequence], value[part]])
            wanted = dense_attention(query[part], keys[sequence], values[sequence], window, sinks)
            error = max(error, float(np.abs(found[part] - wanted).max()))
            row += count
    return error


def dense_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    window: int | None,
    sinks: mx.array | None,
) -> np.ndarray:
    """Softmax attention of the last L positions: ``[L, H, D]`` over ``[S, K, D]``."""
    length, heads, _ = queries.shape
    total = len(keys)
    groups = heads // keys.shape[1]
    scores = np.einsum("lhd,shd->hls", queries, keys.repeat(groups, axis=1)) * SCALE
    position = np.arange(total - length, total)[:, None]
    column = np.arange(total)
    seen = column <= position
    if window is not None:
        seen &= column > position - window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(np.array(sinks)[:, None, None], (heads, length, 1))
        scores = np.concatenate([scores, extra], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hls,shd->lhd", weights[..., :total], values.repeat(groups, axis=1))


def _sequences(step: Sequence[tuple[int, int, int]]) -> list[ScheduledSequence]:
    return [
        ScheduledSequence(
            seq_id=sequence,
            slot=sequence,
            start=start,
            token_ids=(1,) * count,
            block_table=TABLES[sequence],
        )
        for sequence, start, count in step
    ]
