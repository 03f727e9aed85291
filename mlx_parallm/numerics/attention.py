"""Softmax attention by powers of two, for encoders."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.numerics.exp2 import LOG2_E, MIN_EXPONENT, exp2, is_exp_slow

# Fewer scores than this are done sooner by the one fused operation.
MIN_SCORES = 4096
# Added to scores that are masked: they end far below any other, and finite.
_MASKED = -1e30


def softmax_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
) -> mx.array:
    """As ``mx.fast.scaled_dot_product_attention``, by whichever operations are fastest here.

    Args:
        queries: ``[B, H, L, D]``.
        keys: ``[B, H, S, D]``.
        values: ``[B, H, S, V]``.
        scale: of the scores.
        mask: None, bool (true: attended to) or added to the scores; it broadcasts to
            ``[B, H, L, S]``. Each query attends to something.

    Returns:
        ``[B, H, L, V]``.
    """
    batch, heads, length, _ = queries.shape
    num_scores = batch * heads * length * keys.shape[2]
    if queries.dtype != mx.float32 or num_scores < MIN_SCORES or not is_exp_slow():
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    scores = (queries * (scale * LOG2_E)) @ keys.swapaxes(-1, -2)
    if mask is not None:
        # Adding costs a fifth of choosing, and the mask is small.
        added = mx.where(mask, 0.0, _MASKED) if mask.dtype == mx.bool_ else mask * LOG2_E
        scores = scores + added
    weights = exp2(mx.maximum(scores - scores.max(axis=-1, keepdims=True), MIN_EXPONENT))
    return (weights @ values) / weights.sum(axis=-1, keepdims=True)
