"""Random directions in the space of trainable parameters, and steps along them.

A direction is drawn from its seed whenever it is needed and never kept (MeZO, arXiv:2305.17333).
With Rademacher numbers a step along a direction only adds and subtracts one number, so the same
seeds and coefficients give the same bits on every device.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.types.training import Distribution, Step


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


def stepped(theta: mx.array, step: Step, distribution: Distribution) -> mx.array:
    """Return ``keep * theta - sum_j coefficients[j] * z_j``, float32 ``[size]``.

    This is the only place that changes trainable parameters. The products are subtracted one after
    the other, so that a replay gives the same bits. Coefficients are rounded to float32.

    Args:
        theta: the parameters, float32 ``[size]``.
        step: the coefficients, and the seed that draws as many directions ``z``.
        distribution: of the directions.
    """
    if step.keep != 1.0:
        theta = theta * mx.array(step.keep, mx.float32)
    along = directions(step.seed, len(step.coefficients), theta.size, distribution)
    for coefficient, direction in zip(step.coefficients, along, strict=True):
        theta = theta - mx.array(coefficient, mx.float32) * direction
    return theta


def _direction(key: mx.array, size: int, distribution: Distribution) -> mx.array:
    if distribution is Distribution.GAUSSIAN:
        return mx.random.normal([size], key=key)
    is_positive = mx.random.bernoulli(0.5, [size], key=key)
    return mx.where(is_positive, mx.array(1.0, mx.float32), mx.array(-1.0, mx.float32))
