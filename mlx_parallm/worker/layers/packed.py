"""Products of rows and packed weights, each by the way that is fastest for the number of rows.

``mx.quantized_matmul`` reads packed weights once for one row, or for a few. With more rows it takes
longer than the product of plain weights, so that unpacking a layer's weights first is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.layers.packed_kernel import DTYPES, PackedKernels, why_not, why_unsupported
from mlx_parallm.worker.layers.packing import AFFINE, MXFP4, MXFP8, Packing
from mlx_parallm.worker.layers.product_variants import GATES, Around, Format, Variant, Vectors

# FOUR_BITS, EIGHT_BITS: widths of numbers of which a byte holds two, or one.
FOUR_BITS, EIGHT_BITS = 4, 8


class PackedProducts:
    """The products ``x @ weight.T`` of packed weights with rows of one length.

    Attributes:
        packing: of the weights.
        depth: the length of their rows, K.
        kernels: that multiply and unpack on a GPU; None to use MLX's operations alone.
        max_stock_rows: more rows are multiplied with the unpacked weight; None for no limit.
        piece_numbers: so many numbers of the weight, or one row, are unpacked at a time.
    """

    def __init__(self, packing: Packing, depth: int, backend: str) -> None:
        """Prepare for a backend, see ``backend_name``."""
        self.packing = packing
        self.depth = depth
        self.kernels: PackedKernels | None = None
        # MLX's CPU backend computes 16-bit numbers one at a time.
        self._is_on_cpu = backend == "cpu"
        self.max_stock_rows: int | None = None
        self.piece_numbers = PIECE_NUMBERS
        if backend == "cpu":
            key = packing.mode, packing.bits
            self.max_stock_rows = MAX_STOCK_ROWS_CPU.get(key, MAX_STOCK_ROWS_CPU_SLOW)
            self.piece_numbers = PIECE_NUMBERS_CPU
        elif backend == "cuda":
            self.max_stock_rows = MAX_STOCK_ROWS_CUDA

    def __call__(self, x: mx.array, arrays: Sequence[mx.array]) -> mx.array:
        """Return the product ``[..., N]`` in the dtype of x.

        Args:
            x: rows, ``[..., K]``, of a dtype that ``keeps_dtype``.
            arrays: the weight's, in the order of ``Packing.names``.
        """
        dtype = x.dtype
        is_rows = x.ndim == 3 and x.shape[1] == 1
        variant = self._variant(dtype, x.shape[0], arrays) if is_rows else None
        if variant is not None and self.kernels is not None:
            # Without the operations that flatten rows: each costs the host half a microsecond.
            return self.kernels.product(x, arrays, self.packing, variant)
        rows = x.reshape(-1, x.shape[-1])
        if self._is_on_cpu:
            rows = rows.astype(mx.float32)
            arrays = [_in_float32(array) for array in arrays]
        return self._product(rows, arrays).astype(dtype).reshape(*x.shape[:-1], -1)

    def around(
        self, x: mx.array, arrays: Sequence[mx.array], around: Around, others: Sequence[mx.array]
    ) -> list[mx.array]:
        """Return the product of rows with what is computed around it, and counts if any.

        The product is ``[T, 1, N]``; for the counts see ``PackedKernels.outputs``.

        Args:
            x: T rows of K numbers; the first axis has T elements.
            arrays: the weight's, in the order of ``Packing.names``; they ``suit`` the dtype of x.
            around: what is computed; there is a ``variant_around``.
            others: inputs of that, in the order of ``Around.inputs``.
        """
        variant = self.variant_around(x.dtype, around, len(x), len(arrays[0]))
        assert self.kernels is not None, "see variant_around"
        assert variant is not None, "see variant_around"
        return self.kernels.outputs(x, arrays, self.packing, variant, around, others)

    def variant_around(
        self, dtype: mx.Dtype, around: Around, rows: int, width: int
    ) -> Variant | None:
        """Return the variant that computes what stands around a product; None if there is none.

        Args:
            dtype: of the rows.
            around: what is computed.
            rows: how many.
            width: rows of the weight.
        """
        if self.kernels is None or dtype not in DTYPES:
            return None
        variant = self.kernels.variant_for(Format(self.packing, dtype), rows, width, self.depth)
        return variant if isinstance(variant, Vectors) or around == GATES else None

    def parts(self, x: mx.array, arrays: Sequence[mx.array]) -> mx.array:
        """Return the product of rows ``[T, 1, K]``, or parts of it that are still to be added.

        Threadgroups then divide the depth, because the weight has too few rows for all of them.
        Parts are float32, ``[S, T, 1, N]``, and the product is their sum, rounded.
        """
        kernels, variant = self._kernels_for(x.dtype, arrays), None
        if kernels is not None:
            form = Format(self.packing, x.dtype)
            variant = kernels.split_variant_for(form, x.shape[0], len(arrays[0]), self.depth)
        if variant is None or kernels is None:
            return self(x, arrays)
        return kernels.product(x, arrays, self.packing, variant)

    def _product(self, rows: mx.array, arrays: Sequence[mx.array]) -> mx.array:
        variant = self._variant(rows.dtype, len(rows), arrays)
        if variant is not None and self.kernels is not None:
            return self.kernels.product(rows[:, None], arrays, self.packing, variant)
        if self._kernels_for(rows.dtype, arrays) is None and (
            self.max_stock_rows is None or len(rows) <= self.max_stock_rows
        ):
            # MLX's CUDA backend treats [T, 1, K] as T products, which read the weight T times.
            return self.packing.product(rows, arrays)
        width = len(arrays[0])
        step = max(1, self.piece_numbers // self.depth)
        products: list[mx.array] = []
        for first in range(0, width, step):
            piece = [array[first : first + step] for array in arrays] if step < width else arrays
            if products:
                # Without this dependency, MLX would unpack up to 20 pieces before it multiplies.
                piece = mx.depends(list(piece), products[-1:])
            products.append(rows @ self._unpacked(piece, rows.dtype).T)
        return products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)

    def _unpacked(self, arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        if self._is_on_cpu:
            return unpacked_on_cpu(arrays, self.packing)
        kernels = self._kernels_for(dtype, arrays)
        if kernels is not None:
            return kernels.unpacked(arrays, self.packing, dtype)
        return self.packing.unpacked(arrays, dtype)

    def _kernels_for(self, dtype: mx.Dtype, arrays: Sequence[mx.array]) -> PackedKernels | None:
        return self.kernels if dtype in DTYPES and suit(arrays[1].dtype, dtype) else None

    def _variant(self, dtype: mx.Dtype, rows: int, arrays: Sequence[mx.array]) -> Variant | None:
        """Return the variant of a kernel that multiplies; None if there is none."""
        kernels = self._kernels_for(dtype, arrays)
        if kernels is None:
            return None
        return kernels.variant_for(Format(self.packing, dtype), rows, len(arrays[0]), self.depth)


def suit(scales: mx.Dtype, dtype: mx.Dtype) -> bool:
    """True if kernels multiply rows of a dtype by weights with such scales.

    They read floating-point scales as numbers of the rows' dtype.
    """
    return scales in (dtype, mx.uint8)


def keeps_dtype(scales: mx.Dtype, dtype: mx.Dtype) -> bool:
    """True if MLX's product of rows of a dtype and weights with such scales has that dtype too."""
    return dtype == mx.float32 or suit(scales, dtype)


def use_packed_kernels(
    model: nn.Module, kernels: PackedKernels, dtype: mx.Dtype, trials: KernelTrials | None = None
) -> int:
    """Give the packed layers of a model the kernels where these agree with MLX.

    Args:
        model: with layers of ``use_packed_layers``.
        kernels: the kernels.
        dtype: of the model's hidden states.
        trials: the trials of the model's kernels; None for new ones.

    Returns:
        How many kinds of weights have the kernels.
    """
    trial = (trials or KernelTrials()).of("the kernels of packed weights are")
    served = 0
    for packed in packed_products(model):
        packing, depth = packed.packing, packed.depth
        shape = (packing.mode, packing.bits, packing.group_size, depth, dtype)
        if trial.agree(shape, partial(why_not, kernels, packing, dtype, depth)):
            packed.kernels = kernels
            served += 1
    return served


def begin_packed_kernels(model: nn.Module, kernels: PackedKernels, dtype: mx.Dtype) -> None:
    """Begin to compile the kernels for a model's packed layers, all at the same time."""
    for packed in packed_products(model):
        if why_unsupported(packed.packing, dtype, packed.depth) is None:
            kernels.begin(Format(packed.packing, dtype), packed.depth)


def packed_products(model: nn.Module) -> list[PackedProducts]:
    """Return the products of a model's packed layers, one for each packing and length of rows."""
    products = [module["_packed"] for module in model.modules() if "_packed" in module]
    return list({id(each): each for each in products}.values())


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
    # Byte 0 becomes 0 where MLX has 2^-127. Half of byte 1 is subnormal, and too rare to cost time.
    return (scales.astype(mx.uint32) << 23).view(mx.float32) * 0.5
