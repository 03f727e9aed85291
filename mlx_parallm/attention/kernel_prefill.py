"""Long prefill chunks: stock attention over the keys and values gathered from the pool."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.attention.base import Scores
from mlx_parallm.attention.dense import dense_attention
from mlx_parallm.attention.kernel_plan import LongChunk


def attend_chunk(
    chunk: LongChunk, queries: mx.array, keys: mx.array, values: mx.array, scores: Scores
) -> mx.array:
    """Attention of one chunk's rows.

    Args:
        chunk: whose rows.
        queries: of the whole step, ``[T, H, 1, D]``.
        keys: ``[1, K, S, D]``, S at least what the last row sees.
        values: ``[1, K, S, V]``.
        scores: how they become weights.

    Returns:
        ``[length, H, 1, V]``.
    """
    mine = queries[chunk.first : chunk.first + chunk.length, :, 0].swapaxes(0, 1)[None]
    keys, values = keys[:, :, : chunk.end], values[:, :, : chunk.end]
    mask = chunk.mask(scores.window)
    output = dense_attention(
        mine,
        keys,
        values,
        scale=scores.scale,
        mask=mask,
        sinks=scores.sinks,
        soft_cap=scores.soft_cap,
    )
    return output[0].swapaxes(0, 1)[:, :, None]
