"""The forms in which MLX packs weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

#: ``AFFINE``, ``MXFP4`` and ``MXFP8``: modes of ``mx.quantize``.
AFFINE, MXFP4, MXFP8 = "affine", "mxfp4", "mxfp8"
#: ``WORD_BITS``: packed numbers are in words of 32 bits.
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Packing:
    """The form in which ``mx.quantize`` packed a weight ``[N, K]``.

    Attributes:
        bits: of a number.
        group_size: how many numbers of a row share a scale.
        mode: see ``mx.quantize``.
    """

    bits: int
    group_size: int
    mode: str = AFFINE

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a layer's arrays."""
        return ("weight", "scales", "biases") if self.mode == AFFINE else ("weight", "scales")

    def packed(self, weight: mx.array) -> list[mx.array]:
        """Return the arrays of a plain weight ``[N, K]``, in the order of ``names``."""
        return list(mx.quantize(weight, self.group_size, self.bits, self.mode))

    def product(self, x: mx.array, arrays: Sequence[mx.array]) -> mx.array:
        """Return MLX's product ``x @ weight.T``; ``arrays`` are in the order of ``names``."""
        weight, scales, *biases = arrays
        return mx.quantized_matmul(
            x,
            weight,
            scales,
            biases[0] if biases else None,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    def unpacked(self, arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """Return the weight as MLX unpacks it."""
        weight, scales, *biases = arrays
        return mx.dequantize(
            weight,
            scales,
            biases[0] if biases else None,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=dtype,
        )


def packing_of(layer: Any) -> Packing | None:
    """Return the packing of a layer's weight; None if it is plain."""
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return Packing(layer.bits, layer.group_size, layer.mode)
    return None
