"""Blocks of packed weights, whose kernels do what stands between their products.

For one or two rows, a product normalises its input, applies SwiGLU, and adds the residual by
itself: kernels of their own would take as long. For more rows, threadgroups divide the depth of
narrow weights, and the kernel that adds the residual adds their parts. See
``docs/decisions/059-blocks-of-packed-weights.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from mlx_parallm.worker.device.kernel_trial import KernelTrials, largest_error, why_off
from mlx_parallm.worker.layers.attention_heads import LAYERS
from mlx_parallm.worker.layers.block_kernels import BLOCKS, MLPS, gated
from mlx_parallm.worker.layers.packed import PackedProducts
from mlx_parallm.worker.layers.packed_kernel import MAX_ERROR, MAX_VECTORS, Around
from mlx_parallm.worker.layers.row_layers import Columns, RowProduct, product_of

# TRIAL_WIDTH: rows of a trial's weight; half of them are no multiple of a threadgroup's.
TRIAL_WIDTH = 168


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """The products of a block, each with what is computed around it.

    Attributes:
        block: mlx_lm's.
        heads: of queries, keys and values.
        output: of attention's output.
        gates: of SwiGLU's gates and the numbers that these multiply.
        down: of SwiGLU's output.
    """

    block: Any
    heads: RowProduct
    output: RowProduct
    gates: RowProduct
    down: RowProduct

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype of hidden states."""
        return self.block.input_layernorm.weight.dtype

    def parts(self) -> Iterator[tuple[PackedProducts, Around]]:
        """Yield how the weights are multiplied, with what is computed around that."""
        adds = Around(adds=True)
        for product, around in (
            (self.heads, Around(self.block.input_layernorm.eps)),
            (self.output, adds),
            (self.gates, Around(self.block.post_attention_layernorm.eps, gates=True)),
            (self.down, adds),
        ):
            assert product.packed is not None, "weights are packed"
            yield product.packed, around

    def columns(self, x: mx.array) -> list[Columns]:
        """Return the queries, keys and values of few rows of hidden states, ``[T, 1, hidden]``."""
        norm = self.block.input_layernorm
        whole = self.heads.around(x, Around(norm.eps), [norm.weight])
        firsts = accumulate(self.heads.widths[:-1], initial=0)
        return [Columns(whole, first) for first in firsts]

    def after_attention(self, attended: mx.array, x: mx.array) -> mx.array:
        """Return the block's output for few rows.

        Args:
            attended: of the rows' heads, ``[T, heads, 1, D]``.
            x: the block's hidden states, ``[T, 1, hidden]``.
        """
        norm = self.block.post_attention_layernorm
        hidden = self.output.around(attended, Around(adds=True), [x])
        numbers = self.gates.around(hidden, Around(norm.eps, gates=True), [norm.weight])
        return self.down.around(numbers, Around(adds=True), [hidden])

    def mlp(self, x: mx.array) -> mx.array:
        """Return the MLP of normalised rows, ``[T, 1, hidden]``, or parts of it."""
        return self.down.parts(gated(self.block.mlp, x))


def use_fused_blocks(model: nn.Module, trials: KernelTrials | None = None) -> int:
    """Mark a model's blocks for which the kernels are right; return how many are.

    Products and kernels of packed weights are in use already. Blocks use them only in packed
    forwards of this package, see ``attention_overrides``.
    """
    trial = (trials or KernelTrials()).of("the kernel of products and what is around them is")
    blocks = [fused for fused in map(_fused, model.modules()) if fused is not None]
    for fused in blocks:
        for packed, around in fused.parts():
            packed.begin(fused.dtype, around)
    marked = 0
    for fused in blocks:
        dtype, agrees = fused.dtype, True
        for packed, around in fused.parts():
            packing = packed.packing
            shape = (packing.mode, packing.bits, packing.group_size, packed.depth, dtype, around)
            agrees &= trial.agree(shape, partial(why_not, packed, dtype, around))
        if agrees:
            fused.block["_fuses"] = True
            marked += 1
    return marked


def fused_block(block: Any, x: mx.array) -> FusedBlock | None:
    """Return the products for rows of a marked block; None if it is to run as usual."""
    if "_fuses" not in block or x.ndim != 3 or x.shape[1] != 1:
        return None
    fused = _fused(block)
    return fused if fused and x.dtype == fused.dtype else None


def _fused(block: Any) -> FusedBlock | None:
    """Return the products of a block whose parts all have kernels and are not wrapped."""
    if _kind(block) not in BLOCKS or _kind(block.self_attn) not in LAYERS:
        return None
    norms = (block.input_layernorm, block.post_attention_layernorm)
    dtypes = {norm.weight.dtype for norm in norms}
    if any(type(norm) is not nn.RMSNorm for norm in norms) or len(dtypes) > 1:
        return None
    attention, mlp = block.self_attn, block.mlp
    if "_makes_heads" not in attention or _kind(mlp) not in MLPS or "_kernels" not in mlp:
        return None
    products = [
        product_of(layers)
        for layers in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
    ]
    whole = [product for product in products if product is not None and _suits(product, *dtypes)]
    return FusedBlock(block, *whole) if len(whole) == len(products) else None


def _kind(module: Any) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _suits(product: RowProduct, dtype: mx.Dtype) -> bool:
    return product.packed is not None and product.packed.can_surround(dtype)


def why_not(packed: PackedProducts, dtype: mx.Dtype, around: Around) -> str | None:
    """Return why the kernel is not to be used; None if it agrees with MLX."""
    return why_off(lambda: fusion_error(packed, dtype, around), MAX_ERROR)


def fusion_error(
    packed: PackedProducts, dtype: mx.Dtype, around: Around, width: int = TRIAL_WIDTH
) -> float:
    """Return the largest difference from MLX's operations, in parts of the largest value.

    Args:
        packed: multiplies the weights, with kernels.
        dtype: of the row.
        around: what is computed around the product.
        width: rows of the weight.
    """
    depth, packing = packed.depth, packed.packing
    keys = iter(mx.random.split(mx.random.key(0), 4))
    weight = mx.random.normal((width, depth), key=next(keys)) * depth**-0.5
    arrays = mx.quantize(weight.astype(dtype), packing.group_size, packing.bits, packing.mode)
    plain = packing.unpacked(arrays, dtype).T
    gain = mx.random.normal((depth,), key=next(keys)).astype(dtype)
    worst = 0.0
    for rows in range(1, MAX_VECTORS + 1):
        x = 3 * mx.random.normal((rows, 1, depth), key=next(keys)).astype(dtype)
        residual = mx.random.normal((rows, 1, width), key=mx.random.key(rows)).astype(dtype)
        others = {"norm_weight": gain, "residual": residual}
        actual = packed.around(x, arrays, around, [others[name] for name in around.inputs])
        if around.epsilon is not None:
            x = mx.fast.rms_norm(x, gain, around.epsilon)
        wanted = x @ plain
        if around.gates:
            wanted = swiglu(*mx.split(wanted, 2, axis=-1))
        worst = max(worst, largest_error(actual, wanted + residual if around.adds else wanted))
    return worst
