"""Elementary functions by vectorised operations: powers of two, exp, SiLU and GELU.

MLX's x86 CPU build has no vectorised ``exp``: an element takes 11 ns, where a multiplication takes
0.4. That makes it the most expensive part of a step, in softmax and in SiLU. A power of two made of
additions and multiplications takes 3 ns. Other builds have a fast ``exp``.
"""

from __future__ import annotations

import math
import platform
from typing import cast

import mlx.core as mx
import mlx.nn as nn

LOG2_E = 1.4426950408889634
#: ``MIN_EXPONENT``, ``MAX_EXPONENT``: results are subnormal below 2**-126, infinite from 2**128 on.
MIN_EXPONENT, MAX_EXPONENT = -126.0, 127.0

# _ROUNDER, added to a float32, leaves the nearest integer in the low bits of the mantissa.
_ROUNDER = 1.5 * 2**23
# _COEFFICIENTS of 2**f for |f| <= 1/2, interpolated at Chebyshev nodes, highest power first. The
# last one was 1 + 8e-8; with 1, whole powers are exact.
_COEFFICIENTS = (
    0.001339086336353527,
    0.009676031918255982,
    0.05550357114222094,
    0.2402210748530968,
    0.6931471880262273,
    1.0,
)
_MANTISSA_BITS = 23
# MIN_ELEMENTS: below this many elements, the one operation is faster.
MIN_ELEMENTS = 4096

# _GELU_COEFFICIENTS of P(a) for a >= 0, highest power first; P(a) ** -16 is the tail of the normal
# distribution beyond a. The form is Hastings' (Abramowitz and Stegun, Handbook of Mathematical
# Functions, 7.1.28), fitted to minimise the largest error of a times the tail: 2e-7.
_GELU_COEFFICIENTS = (
    6.98801520e-06,
    3.96491954e-05,
    7.53223235e-05,
    3.37051047e-03,
    2.21137169e-02,
    5.20639779e-02,
    1.04427484e00,
)
_SQUARINGS = 4


def is_exp_slow() -> bool:
    """True if ``exp2`` beats ``mx.exp`` on the default device, for thousands of elements."""
    return mx.default_device().type == mx.DeviceType.cpu and platform.machine() in {
        "x86_64",
        "AMD64",
    }


def exp2(exponents: mx.array) -> mx.array:
    """Return ``2 ** exponents``, with a relative error up to 3e-7; it is differentiable.

    The power is ``2**n * 2**f``: n, the nearest integer, is added to the bits of the exponent, and
    2**f is a polynomial (Cody and Waite, Software Manual for the Elementary Functions, 1980).

    Args:
        exponents: float32 of any shape, from ``MIN_EXPONENT`` to ``MAX_EXPONENT``; the result is
            meaningless beyond.
    """
    return cast("mx.array", _exp2(exponents))


@mx.custom_function
def _exp2(exponents: mx.array) -> mx.array:
    rounded = exponents + _ROUNDER
    fraction = exponents - (rounded - _ROUNDER)
    power = _COEFFICIENTS[0] * fraction + _COEFFICIENTS[1]
    for coefficient in _COEFFICIENTS[2:]:
        power = power * fraction + coefficient
    shifted = rounded.view(mx.int32) << _MANTISSA_BITS
    return (shifted + power.view(mx.int32)).view(mx.float32)


@_exp2.vjp
def _exp2_vjp(exponents: mx.array, cotangent: mx.array, result: mx.array) -> mx.array:
    # The bit operations have no derivative, so it is written out.
    return cotangent * result * math.log(2)


def silu(values: mx.array) -> mx.array:
    """Return ``x * sigmoid(x)``, float32; its relative error against ``mlx.nn.silu`` is 1e-6."""
    exponents = mx.clip(values * -LOG2_E, MIN_EXPONENT, MAX_EXPONENT - 1)
    return values / (1 + exp2(exponents))


# GELU (Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415) by vectorised operations.
#
# MLX's x86 CPU build computes ``erf`` element by element, 29 ns each: more than the matrix
# products around it. Additions and multiplications replace it, 4 ns in all.


def gelu(values: mx.array) -> mx.array:
    """Return ``mlx.nn.gelu`` of values, to 1e-6, by the fastest operations of the device."""
    if values.dtype != mx.float32 or values.size < MIN_ELEMENTS or not is_exp_slow():
        return nn.gelu(values)
    return gelu_by_powers(values)


def gelu_by_powers(values: mx.array) -> mx.array:
    """Return ``x`` times the normal distribution function at ``x``, float32, to 1e-6."""
    size = mx.abs(values)
    power = _GELU_COEFFICIENTS[0] * size + _GELU_COEFFICIENTS[1]
    for coefficient in _GELU_COEFFICIENTS[2:]:
        power = power * size + coefficient
    for _ in range(_SQUARINGS):
        # For large values the power becomes infinite, and the tail 0.
        power = mx.square(power)
    return mx.maximum(values, 0) - size / power
