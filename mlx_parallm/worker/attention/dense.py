"""Softmax attention over dense keys and values, by the fastest operations of this device.

Runs of image rows that see each other both ways have their masks here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.vision.features import TwoWay
from mlx_parallm.numerics.elementary import LOG2_E, MIN_EXPONENT, exp2, is_exp_slow
from mlx_parallm.worker.attention.base import AttentionBackend, LayerPool
from mlx_parallm.worker.device.properties import backend_name


@dataclass(frozen=True, slots=True)
class TwoWaySpan:
    """Rows of one sequence that attend to each other.

    Attributes:
        row: index of the first one among the step's rows.
        num_rows: how many there are.
        position: of the first one.
        start: position of the first row of the whole span, of which earlier rows may be computed.
        blocks: the KV blocks of all positions up to the last one's.
        two_way: in which layers they see later ones.
    """

    row: int
    num_rows: int
    position: int
    start: int
    blocks: tuple[int, ...]
    two_way: TwoWay = TwoWay.ALL_LAYERS

    def applies(self, window: int | None) -> bool:
        """True if the rows see later ones in layers with this window."""
        return self.two_way is TwoWay.ALL_LAYERS or window is not None

    def mask(self, window: int | None, num_keys: int) -> np.ndarray:
        """Return which keys the rows see, bool ``[num_rows, num_keys]``."""
        rows = np.arange(self.position, self.position + self.num_rows)[:, None]
        keys = np.arange(num_keys)
        seen = np.broadcast_to(keys < self.position + self.num_rows, (self.num_rows, num_keys))
        if window is not None:
            is_near = keys > rows - window
            if self.two_way is TwoWay.ALL_LAYERS:
                is_near = is_near | (keys >= self.start)
            seen = seen & is_near
        return seen


class TwoWayRows:
    """The spans of the step that is being built."""

    def __init__(self) -> None:
        self._spans: Sequence[TwoWaySpan] = ()

    @contextmanager
    def during(self, spans: Sequence[TwoWaySpan]) -> Iterator[None]:
        """Let these rows see each other for a while."""
        self._spans = spans
        try:
            yield
        finally:
            self._spans = ()

    def apply(
        self,
        output: mx.array,
        backend: AttentionBackend,
        pool: LayerPool,
        queries: mx.array,
        *,
        scale: float,
        window: int | None,
        **options: Any,
    ) -> mx.array:
        """Return a layer's attention ``[T, H, 1, V]`` with the rows of spans computed anew.

        The arguments are those of ``AttentionBackend.attend``, and its result.
        """
        for span in self._spans:
            if not span.applies(window):
                continue
            rows = slice(span.row, span.row + span.num_rows)
            keys, values = backend.gather(pool, mx.array([list(span.blocks)], mx.int32))
            own = dense_attention(
                queries[rows, :, 0].swapaxes(0, 1)[None].astype(keys.dtype),
                keys,
                values,
                scale=scale,
                mask=mx.array(span.mask(window, keys.shape[2])),
                **{"sinks": None, "soft_cap": None, **options},
            )
            output[rows] = own[0].swapaxes(0, 1)[:, :, None].astype(output.dtype)
        return output


# MIN_SCORES: below this many scores, the one fused operation is faster.
MIN_SCORES = 4096
# FUSED_DIMS: the sizes of heads for which MLX's attention on Metal keeps no scores in memory. For
# 192 and 256 it does, because that is faster there.
FUSED_DIMS = frozenset({64, 80, 128})
# SCORE_BYTES: most memory of the scores of some rows on Metal, which grows with the context: 16
# heads of 1,024 rows would take 1 GiB at 32,768 keys, in every layer.
SCORE_BYTES = 256_000_000
# MIN_TILE: fewer rows waste more time than memory.
MIN_TILE = 16
# _MASKED is the score of masked keys: far below any other, and finite.
_MASKED = -1e30


def composes_softmax(queries: mx.array) -> bool:
    """True if several operations compute a large softmax faster than the fused one."""
    return queries.dtype == mx.float32 and is_exp_slow()


def is_fused(key_dim: int, value_dim: int) -> bool:
    """True if MLX's attention on Metal keeps no scores of such heads in memory."""
    return key_dim == value_dim and key_dim in FUSED_DIMS


def rows_within(start: int, max_scores: float) -> int:
    """Return how many rows from position ``start`` on have at most so many scores.

    Each row counts as many as the last one has. There are at least ``MIN_TILE`` rows.
    """
    if math.isinf(max_scores):
        return sys.maxsize
    rows = (math.sqrt(start * start + 4 * max_scores) - start) / 2
    return max(MIN_TILE, int(rows))


def dense_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str,
    sinks: mx.array | None,
    soft_cap: float | None = None,
) -> mx.array:
    """Return what ``mx.fast.scaled_dot_product_attention`` does, with an optional soft cap.

    Args:
        queries: ``[B, H, L, D]``.
        keys: ``[B, K, S, D]``.
        values: ``[B, K, S, V]``.
        scale: factor of the scores.
        mask: "causal"; or bool ``[B, 1, L, S]`` or ``[L, S]``, True where a query sees a key; or
            float32 ``[B or 1, H, L, S]``, added to the scores (after the soft cap).
        sinks: ``[H]`` logits that join the softmax without a value.
        soft_cap: c turns scores s into ``c * tanh(s / c)``.

    Returns:
        ``[B, H, L, V]``.
    """
    is_fusible = soft_cap is None and (queries.dtype == mx.float32 or not _is_added(mask))
    rows, length = _tile_rows(queries, keys, values, is_fusible), queries.shape[2]
    tiles: list[mx.array] = []
    for first in range(0, length, rows):
        own = queries[:, :, first : first + rows] if rows < length else queries
        if tiles:
            # MLX would compute the scores of all tiles first, since no tile needs another one.
            (own,) = mx.depends([own], tiles[-1:])
        seen = _seen(keys, values, mask, length, slice(first, min(first + rows, length)))
        tiles.append(_attention(own, *seen, scale, sinks, soft_cap))
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)


def _tile_rows(queries: mx.array, keys: mx.array, values: mx.array, is_fusible: bool) -> int:
    """Return how many rows attend at once: all of them, unless their scores take too much."""
    batch, heads, length, dim = queries.shape
    if (is_fusible and is_fused(dim, values.shape[-1])) or backend_name() != "metal":
        return length
    size = queries.dtype.size if is_fusible else mx.float32.size
    most = SCORE_BYTES // (batch * heads * keys.shape[2] * size)
    return length if most >= length else max(MIN_TILE, most)


def _seen(
    keys: mx.array, values: mx.array, mask: mx.array | str, length: int, rows: slice
) -> tuple[mx.array, mx.array, mx.array | str]:
    """Return the keys, values and mask of some of ``length`` rows."""
    if not isinstance(mask, str):
        return keys, values, mask[..., rows, :]
    end = keys.shape[2] - length + rows.stop
    return keys[:, :, :end], values[:, :, :end], mask


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str,
    scale: float,
    sinks: mx.array | None,
    soft_cap: float | None,
) -> mx.array:
    if soft_cap is not None:
        return _unfused(queries * (scale / soft_cap), keys, values, mask, sinks, soft_cap)
    if queries.dtype != mx.float32 and _is_added(mask):
        # The fused operation would round the mask to 16 bits, and on CPU the scores too.
        wide = queries.astype(mx.float32) * scale
        return _unfused(wide, keys.astype(mx.float32), values, mask, sinks, None)
    batch, heads, length, _ = queries.shape
    if batch * heads * length * keys.shape[2] >= MIN_SCORES and composes_softmax(queries):
        return _softmax_attention(queries, keys, values, scale, mask, sinks)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def shared_prefix_attention(
    queries: mx.array,
    prefix: tuple[mx.array, mx.array],
    own: tuple[mx.array, mx.array],
    *,
    scale: float,
    mask: mx.array,
    sinks: mx.array | None,
) -> mx.array:
    """Return attention of B rows over a prefix that all see whole and over keys of their own.

    The prefix is read once for all rows, as in Juravsky et al., "Hydragen" (arXiv:2402.05099); the
    scores are few enough for one softmax over both parts.

    Args:
        queries: float32 ``[B, H, 1, D]``.
        prefix: keys ``[K, P, D]`` and values ``[K, P, V]``.
        own: keys ``[B, K, S, D]`` and values ``[B, K, S, V]``.
        scale: factor of the scores.
        mask: bool ``[B, 1, 1, S]``, True where a row sees an own key.
        sinks: ``[H]`` logits that join the softmax without a value.

    Returns:
        ``[B, H, 1, V]``.
    """
    batch, heads, _, dim = queries.shape
    kv_heads, span = prefix[0].shape[:2]
    per_kv = heads // kv_heads
    rows = (queries * (scale * LOG2_E)).reshape(batch, kv_heads, per_kv, dim)
    by_head = rows.swapaxes(0, 1).reshape(kv_heads, batch * per_kv, dim)
    common = (by_head @ prefix[0].swapaxes(-1, -2)).reshape(kv_heads, batch, per_kv, span)
    scores = mx.where(mask, rows @ own[0].swapaxes(-1, -2), _MASKED)
    scores = mx.concatenate([common.swapaxes(0, 1), scores], axis=-1)
    weights, total = _softmax(scores, _sink_scores(sinks, kv_heads, per_kv, 1))
    common = weights[..., :span].swapaxes(0, 1).reshape(kv_heads, batch * per_kv, span)
    weighted = (common @ prefix[1]).reshape(kv_heads, batch, per_kv, -1).swapaxes(0, 1)
    weighted = weighted + weights[..., span:] @ own[1]
    return (weighted / total).reshape(batch, heads, 1, -1)


def _softmax_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str,
    sinks: mx.array | None,
) -> mx.array:
    """Return attention with a softmax by powers of two.

    The query heads of a key head are rows of one matrix product.
    """
    batch, heads, length, _ = queries.shape
    kv_heads, span = keys.shape[1], keys.shape[2]
    per_kv = heads // kv_heads
    rows = (queries * (scale * LOG2_E)).reshape(batch, kv_heads, per_kv * length, -1)
    if rows.shape[2] == 1:
        # OpenBLAS takes a third of the time for this order of a product with one row.
        scores = (keys @ rows.swapaxes(-1, -2)).swapaxes(-1, -2)
    else:
        scores = rows @ keys.swapaxes(-1, -2)
    split = scores.reshape(batch, kv_heads, per_kv, length, span)
    scores = _masked(split, mask, _MASKED, unit=LOG2_E).reshape(scores.shape)
    weights, total = _softmax(scores, _sink_scores(sinks, kv_heads, per_kv, length))
    return ((weights @ values) / total).reshape(batch, heads, length, -1)


def _unfused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str,
    sinks: mx.array | None,
    soft_cap: float | None,
) -> mx.array:
    """Return attention with float32 scores and what the fused operation lacks.

    ``queries`` are already multiplied by ``scale``, or by ``scale / soft_cap``.
    """
    batch, heads, length, _ = queries.shape
    kv_heads, span = keys.shape[1], keys.shape[2]
    rows = queries.reshape(batch, kv_heads, heads // kv_heads, length, -1)
    scores = (rows @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32)
    if soft_cap is not None:
        scores = mx.tanh(scores) * soft_cap
    scores = _masked(scores, mask, -mx.inf)
    if sinks is not None:
        joined = sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1, 1)
        joined = mx.broadcast_to(joined, (*scores.shape[:-1], 1))
        scores = mx.concatenate([joined, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., -span:]
    output = weights.astype(values.dtype) @ values[:, :, None]
    return output.reshape(batch, heads, length, -1)


def _is_added(mask: mx.array | str) -> bool:
    return not isinstance(mask, str) and mask.dtype != mx.bool_


def _masked(scores: mx.array, mask: mx.array | str, unseen: float, unit: float = 1.0) -> mx.array:
    """Return scores ``[B, K, H / K, L, S]`` with ``unseen`` where a query sees no key.

    A mask that is added is multiplied by ``unit``, the unit of the scores, before.
    """
    length, span = scores.shape[-2:]
    if isinstance(mask, str):
        mask = _causal(length, span)
    if _is_added(mask):
        added = mask if unit == 1.0 else mask * unit
        return scores + added.reshape(-1, *scores.shape[1:])
    return mx.where(mask[:, :, None] if mask.ndim == 4 else mask, scores, unseen)


def _sink_scores(
    sinks: mx.array | None, kv_heads: int, per_kv: int, length: int
) -> mx.array | None:
    """Return sinks as exponents of two, ``[1, K, per_kv * length, 1]``."""
    if sinks is None:
        return None
    scores = (sinks.astype(mx.float32) * LOG2_E).reshape(1, kv_heads, per_kv, 1)
    return mx.repeat(scores, length, axis=2)


def _softmax(scores: mx.array, sink: mx.array | None) -> tuple[mx.array, mx.array]:
    """Return weights before division by their sum, and the sum; scores are exponents of two."""
    most = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        most = mx.maximum(most, sink)
    weights = exp2(mx.maximum(scores - most, MIN_EXPONENT))
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + exp2(mx.maximum(sink - most, MIN_EXPONENT))
    return weights, total


def biased_mask(table: mx.array, distances: np.ndarray, seen: np.ndarray) -> mx.array:
    """Return a bias by distance as a mask that is added to scores, float32 ``[B, H, L, S]``.

    Args:
        table: float32 ``[H, N]``; distances beyond the last one have its bias.
        distances: position of a query minus that of a key, int ``[B, L, S]``.
        seen: bool ``[B, L, S]``, True where a query sees a key.
    """
    num_distances = table.shape[1]
    columns = np.where(seen, np.minimum(distances, num_distances - 1), num_distances)
    padded = mx.pad(table, [(0, 0), (0, 1)], constant_values=_MASKED)
    return mx.moveaxis(padded[:, mx.array(columns.astype(np.int32))], 0, 1)


def _causal(length: int, span: int) -> mx.array:
    """Return which of ``span`` positions the last ``length`` of them see, bool."""
    return mx.arange(span) <= mx.arange(span - length, span)[:, None]
