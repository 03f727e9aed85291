"""Powers of two by vectorised operations.

MLX's x86 CPU build has no vectorised ``exp``: it takes 11 ns an element, where a multiplication
takes 0.4. It is then the dearest part of a step, in softmax and in SiLU. A power of two made of
additions and multiplications takes 3 ns. Other builds have a fast ``exp``.
"""

from __future__ import annotations

import math
import platform
from typing import cast

import mlx.core as mx

LOG2_E = 1.4426950408889634
#: Results below 2**-126 would be subnormal, those from 2**128 on are infinite.
MIN_EXPONENT, MAX_EXPONENT = -126.0, 127.0

# Added to a float32, it leaves the nearest integer in the low bits of the mantissa.
_ROUNDER = 1.5 * 2**23
# 2**f for |f| <= 1/2, interpolated at Chebyshev nodes; highest power first. The last was 1 + 8e-8:
# so whole powers are exact.
_COEFFICIENTS = (
    0.001339086336353527,
    0.009676031918255982,
    0.05550357114222094,
    0.2402210748530968,
    0.6931471880262273,
    1.0,
)
_MANTISSA_BITS = 23


def is_exp_slow() -> bool:
    """Whether ``exp2`` beats ``mx.exp`` on the default device, for thousands of elements."""
    return mx.default_device().type == mx.DeviceType.cpu and platform.machine() in {
        "x86_64",
        "AMD64",
    }


def exp2(exponents: mx.array) -> mx.array:
    """``2 ** exponents``, to 3e-7 of the value; models that use it can be trained.

    The power is ``2**n * 2**f``: n the nearest integer, added to the bits of the exponent, f what
    remains, by a polynomial (Cody and Waite, Software Manual for the Elementary Functions, 1980).

    Args:
        exponents: float32, any shape, from ``MIN_EXPONENT`` to ``MAX_EXPONENT``; the result is
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
    # Of the bits themselves there is no derivative.
    return cotangent * result * math.log(2)


def silu(values: mx.array) -> mx.array:
    """``x * sigmoid(x)``, float32, any shape; as ``mlx.nn.silu`` to 1e-6 of the value."""
    exponents = mx.clip(values * -LOG2_E, MIN_EXPONENT, MAX_EXPONENT - 1)
    return values / (1 + exp2(exponents))
