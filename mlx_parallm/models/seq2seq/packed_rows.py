"""Attention of an encoder over packed rows: those of several sources, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mlx_parallm.numerics.attention import softmax_attention

#: ``TILE``: most queries that attend at once where scores have a bias, so that the bias of long
#: sources is ``[H, TILE, keys]`` and not ``[H, S, S]``.
TILE = 512
#: ``TILE_SCORES``: most scores of a tile, which has fewer queries if there are many keys or heads.
TILE_SCORES = 1 << 26


class RelativeBias:
    """A bias of the scores that depends on how far a key is behind its query.

    Tiles of all sources are slices of one array ``[H, rows, width]``, whose rows are the same
    numbers, each row moved by one. A source that fits in a tile needs as many columns as it has
    keys, a longer one twice as many.

    Args:
        bias_of: returns the bias ``[H, n]`` of n distances: a key's position minus its query's.
        longest: the rows of the longest source.
        num_heads: H.
        dtype: of the scores.

    Attributes:
        rows: the queries of a tile.
    """

    def __init__(
        self,
        bias_of: Callable[[np.ndarray], mx.array],
        longest: int,
        num_heads: int,
        dtype: mx.Dtype,
    ) -> None:
        rows = min(TILE, longest, max(1, TILE_SCORES // (num_heads * longest)))
        self.rows = rows
        # The column of a key at the place of the last tile's first query.
        self._origin = (longest - 1) // rows * rows
        columns = mx.arange(-self._origin, longest)
        by_distance = bias_of(np.arange(-self._origin - rows + 1, longest)).astype(dtype)
        self._bias = by_distance[:, columns - mx.arange(rows)[:, None] + self._origin + rows - 1]

    def tile(self, first: int, rows: int, keys: int) -> mx.array:
        """Return the bias ``[H, rows, keys]`` of the queries from ``first`` on."""
        column = self._origin - first
        return self._bias[:, :rows, column : column + keys]


def split_heads(rows: mx.array, num_heads: int) -> mx.array:
    """Return ``[B, H, L, D]`` of ``[B, L, H * D]``."""
    return rows.reshape(*rows.shape[:2], num_heads, -1).swapaxes(1, 2)


def join_heads(rows: mx.array) -> mx.array:
    """Return ``[B, L, H * D]`` of ``[B, H, L, D]``."""
    return rows.swapaxes(1, 2).flatten(2)


def source_kv(keys: mx.array, values: mx.array, num_heads: int) -> tuple[mx.array, mx.array]:
    """Return keys and values ``[1, T, K * D]`` of packed rows as ``[T, K, 1, D]``."""
    shape = (keys.shape[1], num_heads, 1, -1)
    return keys.reshape(shape), values.reshape(shape)


def attend_each(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: Sequence[int],
    *,
    scale: float,
    bias: RelativeBias | None = None,
    is_one_length: bool = False,
) -> mx.array:
    """Return attention in which each source's rows attend to all rows of that source.

    Args:
        queries: of packed rows, ``[1, H, T, D]``.
        keys: like ``queries``.
        values: like ``queries``.
        lengths: the rows of each source, which add up to T.
        scale: what scores are multiplied by.
        bias: what is added to scores then.
        is_one_length: True if the sources of all calls are equally long.
    """
    outputs: list[mx.array] = []
    for start, stop in pairwise([0, *np.cumsum(lengths).tolist()]):
        step = stop - start if bias is None else bias.rows
        for first in range(start, stop, step):
            end = min(first + step, stop)
            outputs.append(
                softmax_attention(
                    queries[:, :, first:end],
                    keys[:, :, start:stop],
                    values[:, :, start:stop],
                    scale=scale,
                    mask=bias and bias.tile(first - start, end - first, stop - start),
                    is_one_shape=is_one_length,
                )
            )
    return mx.concatenate(outputs, axis=2)
