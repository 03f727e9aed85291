"""Softmax attention of encoders, by the fastest operations of a device."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.numerics.elementary import LOG2_E, MIN_EXPONENT, exp2, is_exp_slow

# MIN_SCORES: below this many scores, the one fused operation is faster.
MIN_SCORES = 4096
# MAX_SCORE_BYTES: above this size, scores are not stored (up to three times over); the fused
# operation computes them in passing.
MAX_SCORE_BYTES = 1 << 28
# TILE_SCORES: scores that a CPU computes at once. They fit in its cache, where the passes over them
# take half the time: 155 instead of 300 ms for the 13.5 million scores of 6 heads and 1,500
# positions, on an EPYC.
TILE_SCORES = 1 << 19
# _MASKED is added to masked scores, which end far below any other, and finite.
_MASKED = -1e30


def is_fused_compiled() -> bool:
    """True if the fused operation is compiled for every new shape.

    MLX's CUDA backend uses cuDNN, which takes 35 to 50 ms per shape on an H100:
    https://github.com/ml-explore/mlx/blob/main/mlx/backend/cuda/scaled_dot_product_attention.cpp.
    """
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()


def softmax_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | None,
    is_one_shape: bool = False,
) -> mx.array:
    """Return the result of ``mx.fast.scaled_dot_product_attention``, by the fastest operations.

    Args:
        queries: ``[B, H, L, D]``.
        keys: ``[B, H, S, D]``.
        values: ``[B, H, S, V]``.
        scale: factor of the scores.
        mask: None, bool (True: attended to), or added to the scores; it broadcasts to
            ``[B, H, L, S]``. Each query attends to at least one key.
        is_one_shape: True if all calls have these shapes, so that a fused operation is compiled
            once.

    Returns:
        ``[B, H, L, V]``.
    """
    batch, heads, length, _ = queries.shape
    num_scores = batch * heads * length * keys.shape[2]
    is_small = num_scores * queries.itemsize <= MAX_SCORE_BYTES
    if is_small and not is_one_shape and is_fused_compiled():
        return _by_products(queries, keys, values, scale, mask)
    if queries.dtype != mx.float32 or num_scores < MIN_SCORES or not is_exp_slow():
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    rows = max(1, TILE_SCORES * length // num_scores)
    if length <= rows:
        return _by_powers(queries, keys, values, scale, mask)
    outputs: list[mx.array] = []
    for first in range(0, length, rows):
        tile = queries[:, :, first : first + rows]
        if outputs:
            # One tile after the other, so that later ones reuse the memory of earlier ones.
            (tile,) = mx.depends([tile], outputs[-1:])
        own_mask = mask
        if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            own_mask = mask[..., first : first + rows, :]
        outputs.append(_by_powers(tile, keys, values, scale, own_mask))
    return mx.concatenate(outputs, axis=2)


def _by_powers(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Return attention from single operations, with powers of two in place of ``mx.exp``."""
    scores = (queries * (scale * LOG2_E)) @ keys.swapaxes(-1, -2)
    if mask is not None:
        # Adding costs a fifth of mx.where over the scores, and the mask itself is small.
        added = mx.where(mask, 0.0, _MASKED) if mask.dtype == mx.bool_ else mask * LOG2_E
        scores = scores + added
    weights = exp2(mx.maximum(scores - scores.max(axis=-1, keepdims=True), MIN_EXPONENT))
    return (weights @ values) / weights.sum(axis=-1, keepdims=True)


def _by_products(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Return attention from single operations, as a backend without the fused one computes it."""
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    if mask is not None and mask.dtype == mx.bool_:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return mx.softmax(scores, axis=-1, precise=True).astype(values.dtype) @ values
