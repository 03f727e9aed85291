"""min-p, top-k and top-p as one threshold per row.

All three keep the likeliest tokens, so together they amount to the smallest logit that is kept.
Tokens that tie with it are kept too: what a row may sample does not depend on the order in which
equal logits happen to be sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import SamplingParams

# A row with top-k up to this looks only at its candidates. The choice depends on the row alone:
# what a row samples must not depend on which others are in the batch.
_MAX_CANDIDATES = 1024


def truncate(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Set to ``-inf`` what min-p, then top-k, then top-p leave out.

    min-p is arXiv:2407.01082, top-p arXiv:1904.09751. The order and the renormalisation between
    the steps are vLLM's.

    Args:
        logits: float32 ``[rows, vocab]``, already divided by the temperature.
        params: one per row.

    Returns:
        A new array, or ``logits`` when no row asks for anything.
    """
    vocab = logits.shape[-1]
    if any(row.min_p > 0 for row in params):
        logits = _min_p(logits, params)
    few = [i for i, row in enumerate(params) if 0 < row.top_k <= min(_MAX_CANDIDATES, vocab - 1)]
    chosen = set(few)
    many = [
        i
        for i, row in enumerate(params)
        if i not in chosen and (row.top_p < 1 or 0 < row.top_k < vocab)
    ]
    if few:
        logits = _apply(logits, few, params, _largest(max(params[i].top_k for i in few)))
    if many:
        logits = _apply(logits, many, params, _all_sorted)
    return logits


def _min_p(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    with np.errstate(divide="ignore"):
        logs = np.log(np.array([row.min_p for row in params], dtype=np.float32))
    floor = mx.max(logits, axis=-1, keepdims=True) + mx.array(logs)[:, None]
    return mx.where(logits >= floor, logits, -mx.inf)


def _largest(count: int) -> Callable[[mx.array], mx.array]:
    """Sorted descending: the ``count`` largest of each row."""

    def select(logits: mx.array) -> mx.array:
        split = logits.shape[-1] - count
        return mx.sort(mx.partition(logits, split, axis=-1)[:, split:], axis=-1)[:, ::-1]

    return select


def _all_sorted(logits: mx.array) -> mx.array:
    # Sorting integers of the same order is a third faster on the CPU than sorting floats.
    return _swap_order(mx.sort(_swap_order(logits.view(mx.int32)), axis=-1)).view(mx.float32)[
        :, ::-1
    ]


def _swap_order(bits: mx.array) -> mx.array:
    """From float bits to integers of the same order, and back."""
    return mx.bitwise_xor(bits, mx.bitwise_and(mx.right_shift(bits, 31), 0x7FFFFFFF))


def _apply(
    logits: mx.array,
    rows: list[int],
    params: Sequence[SamplingParams],
    select: Callable[[mx.array], mx.array],
) -> mx.array:
    """Truncate the given rows; ``select`` gives their candidates, sorted descending."""
    everything = len(rows) == logits.shape[0]
    subset = logits if everything else logits[mx.array(rows)]
    floor = _threshold(select(subset), [params[i] for i in rows])
    subset = mx.where(subset >= floor, subset, -mx.inf)
    if everything:
        return subset
    logits = logits[:]
    logits[mx.array(rows)] = subset
    return logits


def _threshold(ordered: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """The smallest logit kept, ``[rows, 1]``.

    Args:
        ordered: candidates ``[rows, candidates]``, sorted descending.
        params: one per row.
    """
    width = ordered.shape[-1]
    ks = [min(row.top_k, width) if row.top_k > 0 else width for row in params]
    last = mx.array(np.array(ks, dtype=np.int32) - 1)[:, None]
    if all(row.top_p >= 1 for row in params):
        return mx.take_along_axis(ordered, last, axis=-1)
    # Tokens that tie with the k-th are kept by top-k, but only k of them count for top-p: the
    # candidates hold no more of them.
    inside = mx.arange(width)[None] <= last
    weights = mx.where(inside, mx.exp(ordered - ordered[:, :1]), 0.0)
    # The running sum is also the total: its value does not depend on how many zeros follow.
    mass = mx.cumsum(weights, axis=-1)
    top_p = mx.array(np.array([row.top_p for row in params], dtype=np.float32))[:, None]
    kept = mx.sum((mass - weights < top_p * mass[:, -1:]) & inside, axis=-1, keepdims=True)
    unlimited = mx.array(np.array([row.top_p >= 1 for row in params]))[:, None]
    return mx.take_along_axis(ordered, mx.where(unlimited, last, mx.maximum(kept, 1) - 1), axis=-1)
