"""Softmax attention over dense keys and values, by whichever operations are fastest here."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.numerics.exp2 import LOG2_E, MIN_EXPONENT, exp2, is_exp_slow

# Fewer scores than this are done sooner by the one fused operation.
MIN_SCORES = 4096
# Of scores that are masked: far below any other, and finite.
_MASKED = -1e30


def dense_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str,
    sinks: mx.array | None,
) -> mx.array:
    """As ``mx.fast.scaled_dot_product_attention``, the mask a bool array or "causal".

    Args:
        queries: ``[B, H, L, D]``.
        keys: ``[B, K, S, D]``.
        values: ``[B, K, S, V]``.
        scale: of the scores.
        mask: bool, ``[B, 1, L, S]`` or ``[L, S]``, true where a query sees a key.
        sinks: ``[H]`` logits that join the softmax without a value.

    Returns:
        ``[B, H, L, V]``.
    """
    batch, heads, length, _ = queries.shape
    num_scores = batch * heads * length * keys.shape[2]
    if queries.dtype == mx.float32 and num_scores >= MIN_SCORES and is_exp_slow():
        return _softmax_attention(queries, keys, values, scale, mask, sinks)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def _softmax_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str,
    sinks: mx.array | None,
) -> mx.array:
    """Softmax by powers of two; query heads of one key head are rows of one product."""
    batch, heads, length, _ = queries.shape
    kv_heads, span = keys.shape[1], keys.shape[2]
    per_kv = heads // kv_heads
    rows = (queries * (scale * LOG2_E)).reshape(batch, kv_heads, per_kv * length, -1)
    scores = rows @ keys.swapaxes(-1, -2)
    split = (batch, kv_heads, per_kv, length, span)
    seen = _causal(length, span) if isinstance(mask, str) else mask
    if seen.ndim == 4:
        seen = seen[:, :, None]
    scores = mx.where(seen, scores.reshape(split), _MASKED)
    sink = None
    if sinks is not None:
        sink = (sinks.astype(mx.float32) * LOG2_E).reshape(1, kv_heads, per_kv, 1, 1)
    weights, total = _softmax(scores, sink)
    outputs = weights.reshape(batch, kv_heads, per_kv * length, span) @ values
    return (outputs.reshape(*split[:4], -1) / total).reshape(batch, heads, length, -1)


def _softmax(scores: mx.array, sink: mx.array | None) -> tuple[mx.array, mx.array]:
    """Weights that are yet to be divided by their sum, and the sum; scores are in powers of two."""
    most = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        most = mx.maximum(most, sink)
    weights = exp2(mx.maximum(scores - most, MIN_EXPONENT))
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + exp2(mx.maximum(sink - most, MIN_EXPONENT))
    return weights, total


def _causal(length: int, span: int) -> mx.array:
    """What the last ``length`` of ``span`` positions see."""
    return mx.arange(span) <= mx.arange(span - length, span)[:, None]
