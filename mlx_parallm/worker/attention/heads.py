"""Settings and inputs of the heads that layers make of their products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The settings with which a layer makes heads of its products.

    Attributes:
        heads: query heads.
        base: the base of RoPE's frequencies; None if they are an array.
        scale: the factor of positions.
        epsilon: the epsilon of the norms of queries and keys; None if there are none.
    """

    heads: int
    base: float | None
    scale: float = 1.0
    epsilon: float | None = None


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """The inputs of a step of which a layer makes heads.

    Attributes:
        products: of queries, keys and values, ``[T, 1, N]`` each; they may be one array.
        firsts: of each, the first column that is theirs.
        positions: of the rows, int32 ``[T]``.
        weights: of the norms of queries and keys, ``[D]`` each; none without norms.
        frequencies: float32 ``[D / 2]``, by which positions are divided; None for a base.
    """

    products: Sequence[mx.array]
    firsts: tuple[int, int, int]
    positions: mx.array
    weights: Sequence[mx.array] = ()
    frequencies: mx.array | None = None
