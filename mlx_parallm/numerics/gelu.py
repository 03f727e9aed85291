"""GELU (Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415) by vectorised operations.

MLX's x86 CPU build computes ``erf`` element by element, 29 ns each: more than the matrix products
around it. Additions and multiplications replace it, 4 ns in all.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.numerics.exp2 import is_exp_slow

# MIN_ELEMENTS: below this many elements, the one operation is faster.
MIN_ELEMENTS = 4096

# _COEFFICIENTS of P(a) for a >= 0, highest power first; P(a) ** -16 is the tail of the normal
# distribution beyond a. The form is Hastings' (Abramowitz and Stegun, Handbook of Mathematical
# Functions, 7.1.28), fitted to minimise the largest error of a times the tail: 2e-7.
_COEFFICIENTS = (
    6.98801520e-06,
    3.96491954e-05,
    7.53223235e-05,
    3.37051047e-03,
    2.21137169e-02,
    5.20639779e-02,
    1.04427484e00,
)
_SQUARINGS = 4


def gelu(values: mx.array) -> mx.array:
    """Return ``mlx.nn.gelu`` of values, to 1e-6, by the fastest operations of the device."""
    if values.dtype != mx.float32 or values.size < MIN_ELEMENTS or not is_exp_slow():
        return nn.gelu(values)
    return gelu_by_powers(values)


def gelu_by_powers(values: mx.array) -> mx.array:
    """Return ``x`` times the normal distribution function at ``x``, float32, to 1e-6."""
    size = mx.abs(values)
    power = _COEFFICIENTS[0] * size + _COEFFICIENTS[1]
    for coefficient in _COEFFICIENTS[2:]:
        power = power * size + coefficient
    for _ in range(_SQUARINGS):
        # For large values the power becomes infinite, and the tail 0.
        power = mx.square(power)
    return mx.maximum(values, 0) - size / power
