"""Products of rows and packed weights, each by the way that is fastest for the number of rows.

``mx.quantized_matmul`` reads packed weights once for one row, or for a few. With more rows it takes
longer than the product of plain weights, so that unpacking a layer's weights first is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

#: ``AFFINE``, ``MXFP4`` and ``MXFP8``: modes of ``mx.quantize``.
AFFINE, MXFP4, MXFP8 = "affine", "mxfp4", "mxfp8"
# FOUR_BITS, EIGHT_BITS: widths of numbers of which a byte holds two, or one.
FOUR_BITS, EIGHT_BITS = 4, 8


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


@dataclass(frozen=True, slots=True)
class PackedProducts:
    """The product ``x @ weight.T`` of a packed weight.

    Attributes:
        packing: of the weight.
        computes_in_float32: True on the CPU, where MLX computes 16-bit numbers one at a time.
        max_stock_rows: more rows are multiplied with the unpacked weight; None for no limit.
        piece_numbers: so many numbers of the weight, or one row, are unpacked at a time.
    """

    packing: Packing
    computes_in_float32: bool
    max_stock_rows: int | None
    piece_numbers: int

    def __call__(self, x: mx.array, arrays: Sequence[mx.array]) -> mx.array:
        """Return the product ``[..., N]`` in the dtype of x.

        Args:
            x: rows, ``[..., K]``.
            arrays: the weight's, in the order of ``Packing.names``.
        """
        dtype = x.dtype
        rows = x.reshape(-1, x.shape[-1])
        if self.computes_in_float32:
            rows = rows.astype(mx.float32)
            arrays = [_in_float32(array) for array in arrays]
        if self.max_stock_rows is None or rows.shape[0] <= self.max_stock_rows:
            # MLX's CUDA backend treats [T, 1, K] as T products, which read the weight T times.
            product = self.packing.product(rows, arrays)
        else:
            product = self._unpacked_product(rows, arrays)
        return product.astype(dtype).reshape(*x.shape[:-1], -1)

    def _unpacked_product(self, rows: mx.array, arrays: Sequence[mx.array]) -> mx.array:
        width, depth = arrays[0].shape[0], rows.shape[1]
        step = max(1, self.piece_numbers // depth)
        products: list[mx.array] = []
        for first in range(0, width, step):
            piece = [array[first : first + step] for array in arrays] if step < width else arrays
            if products:
                # Without this dependency, MLX would unpack up to 20 pieces before it multiplies.
                piece = mx.depends(list(piece), products[-1:])
            products.append(rows @ self._unpacked(piece, rows.dtype).T)
        return products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)

    def _unpacked(self, arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        if self.computes_in_float32:
            return unpacked_on_cpu(arrays, self.packing)
        return self.packing.unpacked(arrays, dtype)


def products_for(packing: Packing, backend: str) -> PackedProducts:
    """Return how a backend, see ``backend_name``, multiplies weights of a packing."""
    if backend == "cpu":
        few = MAX_STOCK_ROWS_CPU.get((packing.mode, packing.bits), MAX_STOCK_ROWS_CPU_SLOW)
        return PackedProducts(packing, True, few, PIECE_NUMBERS_CPU)
    few = MAX_STOCK_ROWS_CUDA if backend == "cuda" else None
    return PackedProducts(packing, False, few, PIECE_NUMBERS)


# MAX_STOCK_ROWS_CPU: by mode and bits, the rows up to which ``quantized_matmul`` is faster than
# unpacking a weight to multiply with it. A row takes it 2.9 ms, in MXFP4 1.4, where 3,072 x 1,024
# numbers are unpacked in 1.5 to 3.7 ms and multiplied in 2.4 (x86, one thread).
MAX_STOCK_ROWS_CPU = {(AFFINE, 4): 1, (AFFINE, 8): 1, (MXFP4, 4): 3, (MXFP8, 8): 1}
# MAX_STOCK_ROWS_CPU_SLOW is the same for other packings, which are unpacked in 25 to 65 ms.
MAX_STOCK_ROWS_CPU_SLOW = 20
# MAX_STOCK_ROWS_CUDA is the same for CUDA.
MAX_STOCK_ROWS_CUDA = 512
# PIECE_NUMBERS bounds the memory of an unpacked weight, whose bytes are twice to six times as many.
PIECE_NUMBERS = 1 << 28
# PIECE_NUMBERS_CPU: a small piece is in the CPU's cache when it is multiplied.
PIECE_NUMBERS_CPU = 1 << 22


def unpacked_on_cpu(arrays: Sequence[mx.array], packing: Packing) -> mx.array:
    """Return a packed weight as float32 ``[N, K]``; scales and biases are float32 or bytes.

    ``mx.dequantize`` takes two to ten times as long: MLX's CPU backend is fast with numbers of 8
    and 16 bits, and slow with shifts by an array, tables and subnormal numbers.
    """
    weight, scales, *biases = arrays
    if packing.mode == MXFP4:
        levels, scales = _fp4_doubled(_nibbles(weight)), _powers(scales)
    elif packing.mode == AFFINE and packing.bits in (FOUR_BITS, EIGHT_BITS):
        levels = _nibbles(weight) if packing.bits == FOUR_BITS else weight.view(mx.uint8)
    else:
        return packing.unpacked(arrays, mx.float32)
    groups = levels.astype(mx.float32).reshape(weight.shape[0], -1, packing.group_size)
    values = groups * scales[..., None]
    if biases:
        values = values + biases[0][..., None]
    return values.reshape(weight.shape[0], -1)


def _in_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def _nibbles(weight: mx.array) -> mx.array:
    """Return the numbers of 4 bits, uint8 ``[N, K]``."""
    pairs = weight.view(mx.uint8).astype(mx.uint16)
    return ((pairs | (pairs << 4)) & 0x0F0F).view(mx.uint8)


def _fp4_doubled(numbers: mx.array) -> mx.array:
    """Return twice the E2M1 numbers of 4 bits, which are whole: 0, 1, 2, 3, 4, 6, 8, 12; int8."""
    size = numbers & 7
    doubled = size + mx.maximum(size, 4) + 2 * mx.maximum(size, 6) - 16
    sign = 1 - ((numbers >> 2) & 2)
    return (doubled * sign).view(mx.int8)


def _powers(scales: mx.array) -> mx.array:
    """Return half of the E8M0 scales, which are powers of two: bytes with a bias of 127."""
    # MLX gives 2^-127, of byte 0, as it is. Half of it is subnormal, which costs nothing so rarely.
    return (scales.astype(mx.uint32) << 23).view(mx.float32) * 0.5
