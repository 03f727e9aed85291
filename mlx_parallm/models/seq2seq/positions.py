"""Two kinds of sinusoids for absolute positions.

They are those of "Attention Is All You Need" (arXiv:1706.03762) but for the order of their columns:
sines first, then cosines. They are computed in the precision that models were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np

BASE = 10000


class SinusoidalPositions:
    """Sinusoids, which are no parameters.

    Args:
        sinusoids: returns a table ``[count, E]`` of positions from 0 on, float32.
        count: positions that are computed at once; a longer source has a table of its own.
        padding_id: tokens of this id have zeros in place of a position; None: there is none.
    """

    def __init__(
        self, sinusoids: Callable[[int], np.ndarray], count: int, padding_id: int | None = None
    ) -> None:
        self._sinusoids = sinusoids
        self._padding_id = padding_id
        self._table = mx.array(sinusoids(count))

    def rows(self, positions: mx.array, tokens: mx.array, end: int = 0) -> mx.array:
        """Return what is added to the embeddings of tokens ``[B, L]``: float32 ``[B, L, E]``.

        Args:
            positions: of the tokens.
            tokens: their ids.
            end: larger than any position; 0 if none is behind the table.
        """
        is_short = end > len(self._table)
        rows = (mx.array(self._sinusoids(end)) if is_short else self._table)[positions]
        if self._padding_id is None:
            return rows
        return mx.where((tokens == self._padding_id)[..., None], 0, rows)


def marian_sinusoids(count: int, size: int) -> np.ndarray:
    """Return the table of Marian and Pegasus, which is computed in float64."""
    exponents = 2 * np.arange((size + 1) // 2) / size
    angles = np.arange(count)[:, None] / BASE**exponents
    table = np.concatenate([np.sin(angles), np.cos(angles[:, : size // 2])], axis=1)
    return table.astype(np.float32)


def m2m_sinusoids(count: int, size: int, padding_id: int) -> np.ndarray:
    """Return the table of M2M-100, whose first position is the one behind the padding id."""
    half = size // 2
    step = np.float32(-math.log(BASE) / (half - 1))
    frequencies = np.exp(np.arange(half, dtype=np.float32) * step)
    first = padding_id + 1
    angles = np.arange(first, first + count, dtype=np.float32)[:, None] * frequencies
    zeros = np.zeros((count, size % 2), np.float32)
    return np.concatenate([np.sin(angles), np.cos(angles), zeros], axis=1)
