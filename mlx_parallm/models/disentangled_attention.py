"""Disentangled attention (He et al., 2021, arXiv:2006.03654), with separate position scores."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.bert_layers import AttentionMask
from mlx_parallm.numerics.attention import softmax_attention


def relative_buckets(length: int, buckets: int, max_position: int) -> np.ndarray:
    """Return the bucket of each distance ``0 .. length - 1`` from a key to a later query.

    Distances up to half of ``buckets`` have a bucket each; longer ones share buckets that grow with
    the logarithm. A negative distance has the negative bucket. Buckets are computed in float32 on
    the host, as in the reference, because a device's logarithm could round to another bucket.

    Returns:
        int32 ``[length]``; the distances themselves if ``buckets`` is not positive.
    """
    distance = np.arange(length, dtype=np.int32)
    if buckets <= 0:
        return distance
    half = buckets // 2
    far = np.maximum(distance, half).astype(np.float32) / np.float32(half)
    longest = np.log(np.float32((max_position - 1) / half))
    shared = np.ceil(np.log(far) / longest * np.float32(half - 1)) + half
    return np.where(distance <= half, distance, shared.astype(np.int32))


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """Embeddings of relative positions, for texts of one length.

    Attributes:
        table: ``[positions, dims]``, only the rows that this length needs.
        rows: int32 ``[length, length]``, the row of the table for a query and a key.
    """

    table: mx.array
    rows: mx.array


class DisentangledSelfAttention(nn.Module):
    """Attention whose scores add content to content, content to position, position to content.

    Args:
        dims: dimensions of a token.
        heads: number of heads.
        kinds: the position terms, ``c2p`` or ``p2c`` or both; the scale depends on their number.
        relative: True if the position terms are computed.
        shares_projections: True if positions are projected by the weights for tokens.
    """

    def __init__(
        self,
        dims: int,
        heads: int,
        *,
        kinds: Collection[str],
        relative: bool,
        shares_projections: bool,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dims // heads * (1 + ("c2p" in kinds) + ("p2c" in kinds))) ** -0.5
        self.content_to_position = relative and "c2p" in kinds
        self.position_to_content = relative and "p2c" in kinds
        self.shares_projections = shares_projections
        self.query_proj = nn.Linear(dims, dims)
        self.key_proj = nn.Linear(dims, dims)
        self.value_proj = nn.Linear(dims, dims)
        if self.content_to_position and not shares_projections:
            self.pos_key_proj = nn.Linear(dims, dims)
        if self.position_to_content and not shares_projections:
            self.pos_query_proj = nn.Linear(dims, dims)

    def __call__(
        self, hidden: mx.array, mask: AttentionMask, positions: RelativePositions | None
    ) -> mx.array:
        """Mix the tokens that the mask, boolean ``[B, 1, 1, L]``, allows."""
        queries = self._per_head(self.query_proj(hidden))
        keys = self._per_head(self.key_proj(hidden))
        values = self._per_head(self.value_proj(hidden))
        if positions is not None and (self.content_to_position or self.position_to_content):
            scores = self._position_scores(queries * self.scale, keys * self.scale, positions)
            lowest = mx.finfo(scores.dtype).min
            mask = scores if mask is None else mx.where(mask, scores, lowest)
        mixed = softmax_attention(queries, keys, values, scale=self.scale, mask=mask)
        return mixed.swapaxes(1, 2).reshape(hidden.shape)

    def _per_head(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)

    def _position_scores(
        self, queries: mx.array, keys: mx.array, positions: RelativePositions
    ) -> mx.array:
        """Return the position terms of the scores, ``[B, heads, queries, keys]``."""
        table, rows = positions.table[None], positions.rows[None, None]
        terms = []
        if self.content_to_position:
            project = self.key_proj if self.shares_projections else self.pos_key_proj
            to_rows = queries @ self._per_head(project(table)).swapaxes(-1, -2)
            terms.append(mx.take_along_axis(to_rows, rows, axis=-1))
        if self.position_to_content:
            project = self.query_proj if self.shares_projections else self.pos_query_proj
            to_rows = keys @ self._per_head(project(table)).swapaxes(-1, -2)
            of_keys = mx.take_along_axis(to_rows, rows.swapaxes(-1, -2), axis=-1)
            terms.append(of_keys.swapaxes(-1, -2))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]
