"""Long prefill chunks: stock attention over the keys and values gathered from the pool."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.attention.kernel_attend import Scores
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
    if scores.soft_cap is None:
        output = mx.fast.scaled_dot_product_attention(
            mine, keys, values, scale=scores.scale, mask=mask, sinks=scores.sinks
        )
    else:
        output = _soft_capped(mine, keys, values, mask, scores, scores.soft_cap)
    return output[0].swapaxes(0, 1)[:, :, None]


def _soft_capped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str,
    scores: Scores,
    soft_cap: float,
) -> mx.array:
    """Softmax attention by single operations: stock attention has no soft cap."""
    _, heads, length, _ = queries.shape
    kv_heads, span = keys.shape[1], keys.shape[2]
    grouped = (queries * scores.scale).reshape(1, kv_heads, heads // kv_heads, length, -1)
    logits = (grouped @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32)
    logits = mx.tanh(logits / soft_cap) * soft_cap
    if isinstance(mask, str):
        mask = mx.arange(span) <= mx.arange(span - length, span)[:, None]
    logits = mx.where(mask, logits, -mx.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1, 1)
        sinks = mx.broadcast_to(sinks, (*logits.shape[:-1], 1))
        logits = mx.concatenate([sinks, logits], axis=-1)
    weights = mx.softmax(logits, axis=-1, precise=True)[..., -span:]
    output = weights.astype(values.dtype) @ values[:, :, None]
    return output.reshape(1, heads, length, -1)
