"""Pools the hidden states of an input into one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_parallm.models.checkpoints.sentence_transformers import Pooling

# _LEAST is below any hidden state, and finite in every dtype.
_LEAST = -6e4


def pooled(
    hidden: mx.array,
    mask: mx.array,
    poolings: Sequence[Pooling],
    first: mx.array | None = None,
) -> mx.array:
    """Return vectors ``[B, len(poolings) * D]`` of hidden states.

    Args:
        hidden: float32 ``[B, L, D]``.
        mask: bool ``[B, L]``: True for tokens, which are at the beginning of each row.
        poolings: at least one; their vectors are concatenated.
        first: int ``[B]``: index of the first token that is pooled; None: all are.
    """
    if first is not None:
        mask = mask & (mx.arange(mask.shape[1]) >= first[:, None])
    return mx.concatenate([_POOLINGS[pooling](hidden, mask) for pooling in poolings], axis=-1)


def _cls(hidden: mx.array, mask: mx.array) -> mx.array:
    places = mx.argmax(mask, axis=1)
    return mx.take_along_axis(hidden, places[:, None, None], axis=1)[:, 0]


def _mean(hidden: mx.array, mask: mx.array) -> mx.array:
    return _weighted(hidden, mask.astype(hidden.dtype))


def _mean_sqrt_len(hidden: mx.array, mask: mx.array) -> mx.array:
    """Return the sum divided by the root of the number of tokens."""
    return _mean(hidden, mask) * mx.sqrt(mx.sum(mask, axis=1, keepdims=True).astype(hidden.dtype))


def _weighted_mean(hidden: mx.array, mask: mx.array) -> mx.array:
    """Return the mean with weights 1 to L (SGPT, https://arxiv.org/abs/2202.08904)."""
    return _weighted(hidden, mask * mx.arange(1, mask.shape[1] + 1).astype(hidden.dtype))


def _weighted(hidden: mx.array, weights: mx.array) -> mx.array:
    total = mx.sum(hidden * weights[..., None], axis=1)
    return total / mx.sum(weights, axis=1, keepdims=True)


def _max(hidden: mx.array, mask: mx.array) -> mx.array:
    return mx.max(mx.where(mask[..., None], hidden, _LEAST), axis=1)


def last_of(hidden: mx.array, mask: mx.array) -> mx.array:
    """Return the hidden state of each row's last token, ``[B, D]``; see ``pooled``."""
    places = mx.max(mx.where(mask, mx.arange(mask.shape[1]), 0), axis=1)
    return mx.take_along_axis(hidden, places[:, None, None], axis=1)[:, 0]


_POOLINGS: dict[Pooling, Callable[[mx.array, mx.array], mx.array]] = {
    "cls": _cls,
    "mean": _mean,
    "mean_sqrt_len": _mean_sqrt_len,
    "max": _max,
    "last": last_of,
    "weightedmean": _weighted_mean,
}
