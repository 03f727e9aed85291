"""Random directions in the space of trainable parameters, and steps along them.

A direction is drawn from its seed whenever it is needed and never kept (MeZO, arXiv:2305.17333).
With Rademacher numbers a step along a direction only adds and subtracts one number, so the same
seeds and coefficients give the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import mlx.core as mx


class Distribution(StrEnum):
    """How the numbers of a direction are distributed; both have mean 0 and variance 1.

    rademacher: 1 or -1.
    gaussian: normal.
    """

    RADEMACHER = "rademacher"
    GAUSSIAN = "gaussian"


def directions(seed: int, count: int, size: int, distribution: Distribution) -> mx.array:
    """Return the directions of a step, float32 ``[count, size]``.

    Direction j depends on the seed, on j and on ``count``.

    Args:
        seed: from 0 to 2**64 - 1.
        count: how many directions.
        size: the number of parameters.
        distribution: of their numbers.
    """
    keys = mx.random.split(mx.random.key(seed), count)
    rows = [_direction(key, size, distribution) for key in keys]
    return mx.stack(rows)


def stepped(
    theta: mx.array,
    seed: int,
    coefficients: Sequence[float],
    distribution: Distribution,
    keep: float = 1.0,
) -> mx.array:
    """Return ``keep * theta - sum_j coefficients[j] * z_j``, float32 ``[size]``.

    This is the only place that changes trainable parameters. The products are subtracted one after
    the other, so that a replay gives the same bits.

    Args:
        theta: the parameters, float32 ``[size]``.
        seed: draws the directions ``z``, as many as there are coefficients.
        coefficients: how far to go along each direction; they are rounded to float32.
        distribution: of the directions.
        keep: the factor of weight decay.
    """
    if keep != 1.0:
        theta = theta * mx.array(keep, mx.float32)
    along = directions(seed, len(coefficients), theta.size, distribution)
    for coefficient, direction in zip(coefficients, along, strict=True):
        theta = theta - mx.array(coefficient, mx.float32) * direction
    return theta


def _direction(key: mx.array, size: int, distribution: Distribution) -> mx.array:
    if distribution is Distribution.GAUSSIAN:
        return mx.random.normal([size], key=key)
    is_positive = mx.random.bernoulli(0.5, [size], key=key)
    return mx.where(is_positive, mx.array(1.0, mx.float32), mx.array(-1.0, mx.float32))
