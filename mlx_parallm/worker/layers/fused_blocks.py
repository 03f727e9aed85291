"""Blocks of packed weights, whose kernels do what stands between their products.

For one row, a product normalises its input, applies SwiGLU, and adds the residual by itself:
kernels of their own would take as long. Those behind attention are one launch. For more rows a
product applies SwiGLU. Threadgroups divide the depth of narrow weights then, and the kernel that
adds the residual adds their parts. See ``docs/decisions/059-blocks-of-packed-weights.md`` and 062.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from mlx_parallm.types.shape_buckets import ROW_COUNTS
from mlx_parallm.worker.device.kernel_trial import KernelTrials, ShapeTrials, largest_error, why_off
from mlx_parallm.worker.layers.attention_heads import LAYERS
from mlx_parallm.worker.layers.block_kernels import BLOCKS, MLPS, gated
from mlx_parallm.worker.layers.chain_trial import ChainTrial
from mlx_parallm.worker.layers.packed import PackedProducts, suit
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from mlx_parallm.worker.layers.product_chain import Chain, Link
from mlx_parallm.worker.layers.product_variants import GATES, Around, Format, Variant, Vectors
from mlx_parallm.worker.layers.row_layers import Columns, RowProduct, product_of
from mlx_parallm.worker.layers.wrapped_calls import class_of

# TRIAL_WIDTHS: rows of a trial's weights; their halves are no multiples of a threadgroup's, and one
# is odd.
TRIAL_WIDTHS = (168, 166)
# MAX_FUSED_ERROR is in parts of the largest value: gates and the numbers that they multiply are
# each rounded, and their product is.
MAX_FUSED_ERROR = 0.03
# MAX_ROWS: all weights are unpacked for more rows; weights of few rows are from 513 rows on.
MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Fusion:
    """A product of packed weights with what is computed around it.

    Attributes:
        packed: multiplies the weights, with kernels.
        around: what is computed.
        dtype: of the rows.
        width: rows of the weights.
    """

    packed: PackedProducts
    around: Around
    dtype: mx.Dtype
    width: int

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return all that the kernels depend on."""
        packing = self.packed.packing
        return (
            *(packing.mode, packing.bits, packing.group_size, self.packed.depth, self.dtype),
            *(self.around, tuple(self.variants())),
        )

    def variants(self) -> dict[Variant, int]:
        """Return the kernels' variants, each with a number of rows that it does not fill."""
        variants: dict[Variant, int] = {}
        for rows in (*ROW_COUNTS, 2 * ROW_COUNTS[-1]):
            variant = self.packed.variant_around(self.dtype, self.around, rows, self.width)
            # What one row computes with a norm, others compute with SwiGLU alone.
            if variant is not None and (rows == 1) == (self.around != GATES):
                variants.setdefault(variant, max(1, rows - 1))
        return variants

    def begin(self) -> None:
        """Begin to compile the kernels, in the background if possible."""
        assert self.packed.kernels is not None, "there are no variants without"
        for variant in self.variants():
            self.packed.kernels.kernel(
                Format(self.packed.packing, self.dtype), variant, self.around
            )

    def why_not(self) -> str | None:
        """Return why the kernels are not to be used; None if they agree with MLX."""
        return why_off(lambda: max(map(self.error, TRIAL_WIDTHS)), MAX_FUSED_ERROR)

    def error(self, width: int) -> float:
        """Return the largest difference from MLX's operations, in parts of the largest value.

        ``width`` is that of the weight in the trial.
        """
        depth, packing, dtype = self.packed.depth, self.packed.packing, self.dtype
        kernels = self.packed.kernels
        assert kernels is not None, "there are no variants without"
        keys = mx.random.split(mx.random.key(0), 4)
        weight = mx.random.normal((width, depth), key=keys[0]) * depth**-0.5
        arrays = packing.packed(weight.astype(dtype))
        plain = packing.unpacked(arrays, dtype).T
        gain = mx.random.normal((depth,), key=keys[2]).astype(dtype)
        worst = 0.0
        for variant, rows in self.variants().items():
            x = 3 * mx.random.normal((rows, 1, depth), key=keys[1]).astype(dtype)
            residual = mx.random.normal((rows, 1, width), key=keys[3]).astype(dtype)
            others = {"norm_weight": gain, "residual": residual}
            inputs = [others[name] for name in self.around.inputs]
            actual, *counts = kernels.outputs(x, arrays, packing, variant, self.around, inputs)
            wanted = _stock(x, plain, gain, residual, self.around)
            worst = max(worst, largest_error(actual, wanted))
            if any(count.any().item() for count in counts):
                return math.inf
        return worst


def _stock(
    x: mx.array, plain: mx.array, gain: mx.array, residual: mx.array, around: Around
) -> mx.array:
    """Return what MLX's operations compute of rows and an unpacked weight, ``[K, N]``."""
    if around.epsilon is not None:
        x = mx.fast.rms_norm(x, gain, around.epsilon)
    output = x @ plain
    if around.gates:
        output = swiglu(*mx.split(output, 2, axis=-1))
    return output + residual if around.adds else output


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

    @property
    def has_kernels(self) -> bool:
        """True if all products have kernels for rows of the hidden states' dtype."""
        return all(fusion.variants() for fusion in self.fusions())

    def fusions(self) -> Iterator[Fusion]:
        """Yield the products of one row with what is computed around them."""
        yield self._fusion(self.heads, Around(self.block.input_layernorm.eps))
        yield from self._fusions_after_attention()

    def _fusions_after_attention(self) -> Iterator[Fusion]:
        adds, norm = Around(adds=True), self.block.post_attention_layernorm
        yield self._fusion(self.output, adds)
        yield self._fusion(self.gates, Around(norm.eps, gates=True))
        yield self._fusion(self.down, adds)

    def _fusion(self, product: RowProduct, around: Around) -> Fusion:
        assert product.packed is not None, "weights are packed"
        return Fusion(product.packed, around, self.dtype, sum(product.widths))

    @property
    def many_gates(self) -> Fusion:
        """Return the products of gates of more rows with SwiGLU."""
        return self._fusion(self.gates, GATES)

    @property
    def chain(self) -> Chain | None:
        """Return the products after attention as one launch; None if their packings differ."""
        links: list[Link] = []
        forms: set[Format] = set()
        for fusion in self._fusions_after_attention():
            (variant,) = fusion.variants()
            if not isinstance(variant, Vectors):
                return None
            links.append(Link(variant, fusion.around, fusion.width))
            forms.add(Format(fusion.packed.packing, fusion.dtype))
        return Chain(forms.pop(), tuple(links)) if len(forms) == 1 else None

    def counting(self, chain: Chain) -> Fusion:
        """Return the product of heads that makes the counts for a chain."""
        return self._fusion(self.heads, Around(self.block.input_layernorm.eps, counts=chain.counts))

    def columns(self, x: mx.array) -> tuple[list[Columns], mx.array | None]:
        """Return the queries, keys and values of one row, and counts for ``after_attention``.

        ``x`` are hidden states, ``[1, 1, hidden]``.
        """
        chain: Chain | None = self.block.get("_chain")
        norm = self.block.input_layernorm
        around = Around(norm.eps, counts=chain.counts if chain else 0)
        whole, *counts = self.heads.around(x, around, [norm.weight])
        firsts = accumulate(self.heads.widths[:-1], initial=0)
        return [Columns(whole, first) for first in firsts], counts[0] if counts else None

    def after_attention(
        self, attended: mx.array, x: mx.array, counts: mx.array | None = None
    ) -> mx.array:
        """Return the block's output for one row.

        Args:
            attended: of the row's heads, ``[1, heads, 1, D]``.
            x: the block's hidden states, ``[1, 1, hidden]``.
            counts: from ``columns``, for this call alone; None to launch each product.
        """
        if counts is not None:
            return self._chained(attended, x, counts)
        norm = self.block.post_attention_layernorm
        (hidden,) = self.output.around(attended, Around(adds=True), [x])
        (numbers,) = self.gates.around(hidden, Around(norm.eps, gates=True), [norm.weight])
        (output,) = self.down.around(numbers, Around(adds=True), [hidden])
        return output

    def _chained(self, attended: mx.array, x: mx.array, counts: mx.array) -> mx.array:
        norm = self.block.post_attention_layernorm.weight
        weights = (self.output.merged(), [*self.gates.merged(), norm], self.down.merged())
        return _kernels_of(self).chained(self.block["_chain"], attended, x, weights, counts)

    def mlp(self, x: mx.array) -> mx.array:
        """Return the MLP of normalised rows, ``[T, 1, hidden]``, or parts of it."""
        many = self.many_gates
        if "_gates" in self.block and many.packed.variant_around(
            x.dtype, GATES, len(x), many.width
        ):
            return self.down.parts(*self.gates.around(x, GATES, []))
        return self.down.parts(gated(self.block.mlp, x))


def use_fused_blocks(model: nn.Module, trials: KernelTrials | None = None) -> int:
    """Mark a model's blocks for which the kernels are right; return how many are.

    Products and kernels of packed weights are in use already. Blocks use them only in packed
    forwards of this package, see ``attention_overrides``.
    """
    trials = trials or KernelTrials()
    trial = trials.of("the kernel of products and what is around them is")
    chain_trial = trials.of("the kernel of products that follow each other is")
    blocks = [fused for fused in map(_fused, model.modules()) if fused and fused.has_kernels]
    for fused in blocks:
        _begin(fused)
    marked = 0
    for fused in blocks:
        agrees = True
        for fusion in fused.fusions():
            agrees &= trial.agree(fusion.shape, fusion.why_not)
        if agrees:
            _use_chain(fused, trial, chain_trial)
            fused.block["_fuses"] = True
            marked += 1
            if trial.agree(fused.many_gates.shape, fused.many_gates.why_not):
                fused.block["_gates"] = True
    return marked


def _begin(fused: FusedBlock) -> None:
    """Begin to compile a block's kernels, all at the same time."""
    for fusion in (*fused.fusions(), fused.many_gates):
        fusion.begin()
    if (chain := fused.chain) is not None:
        fused.counting(chain).begin()
        _kernels_of(fused).chain(chain)


def _use_chain(fused: FusedBlock, trial: ShapeTrials, chain_trial: ShapeTrials) -> None:
    """Let the products of one row after attention be one launch if that computes the same."""
    chain = fused.chain
    if chain is None:
        return
    counting, whole = fused.counting(chain), ChainTrial(_kernels_of(fused), chain)
    if trial.agree(counting.shape, counting.why_not) and chain_trial.agree(
        chain, lambda: why_off(whole.largest_error, 0.0)
    ):
        fused.block["_chain"] = chain


def _kernels_of(fused: FusedBlock) -> PackedKernels:
    assert fused.output.packed is not None, "weights are packed"
    assert fused.output.packed.kernels is not None, "the block has kernels"
    return fused.output.packed.kernels


def fused_block(block: Any, x: mx.array) -> FusedBlock | None:
    """Return the products for rows of a marked block; None if it is to run as usual."""
    if "_fuses" not in block or x.ndim != 3 or x.shape[1] != 1 or len(x) > MAX_ROWS:
        return None
    fused = _fused(block)
    return fused if fused and x.dtype == fused.dtype else None


def _fused(block: Any) -> FusedBlock | None:
    """Return the products of a block whose parts are not wrapped."""
    if class_of(block) not in BLOCKS or class_of(block.self_attn) not in LAYERS:
        return None
    norms = (block.input_layernorm, block.post_attention_layernorm)
    dtypes = {norm.weight.dtype for norm in norms}
    if any(type(norm) is not nn.RMSNorm for norm in norms) or len(dtypes) > 1:
        return None
    attention, mlp = block.self_attn, block.mlp
    if "_makes_heads" not in attention or class_of(mlp) not in MLPS or "_kernels" not in mlp:
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
    dtype = norms[0].weight.dtype
    packed = [
        product
        for product in products
        if product is not None
        and product.packed
        and all(suit(layer["scales"].dtype, dtype) for layer in product.layers)
    ]
    return FusedBlock(block, *packed) if len(packed) == len(products) else None
