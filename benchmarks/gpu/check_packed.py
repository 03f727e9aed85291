"""Kernels of packed weights on this GPU, compared with MLX and with each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.layers.chain_trial import ChainTrial
from mlx_parallm.worker.layers.fused_blocks import MAX_FUSED_ERROR, Fusion
from mlx_parallm.worker.layers.packed import PackedProducts
from mlx_parallm.worker.layers.packed_kernel import PackedKernels, kernels_error, why_not
from mlx_parallm.worker.layers.packing import MXFP4, Packing
from mlx_parallm.worker.layers.product_chain import Chain, Link
from mlx_parallm.worker.layers.product_variants import GATES, Around, Format, Tiles, vectors_for

# DEPTHS: lengths of rows; more and less than what threadgroups load at once.
DEPTHS = (1024, 4096, 12288)
#: ``WIDTHS``: rows of weights, fewer and more than all threadgroups take at once. With an odd
#: number, rows of outputs begin within a word.
WIDTHS = (40, 201, 4097, 12290)
#: ``AROUNDS``: what is computed around products.
AROUNDS = (Around(1e-6), Around(1e-6, gates=True), Around(adds=True), GATES)
# CHAINS: sizes of queries, hidden states and MLPs. CHAIN_TURNS: how often each is launched, every
# time with another input.
CHAINS = ((2048, 1024, 3072), (4096, 4096, 12288))
CHAIN_TURNS = 200
# STEP: rows of x, rows of a weight, and their length, where two threadgroups divide the depth of
# each of the last tiles; STEP_PRODUCTS: so many of them.
STEP, STEP_PRODUCTS = (256, 24576, 4096), 8
# PACKINGS: those of chains and steps.
PACKINGS = (Packing(4, 64), Packing(8, 64), Packing(4, 32, MXFP4))
#: ``Compile`` makes a function of a step; ``mx.compile`` but in tests.
Compile = Callable[[Callable[[mx.array], list[mx.array]]], Callable[[mx.array], list[mx.array]]]


def check_packed(language: KernelLanguage) -> int:
    """Compare the kernels of packed weights with MLX, and return the number of failures."""
    if not language.has_tensor_cores:
        return 0
    failed = 0
    packings = [Packing(bits, size) for bits in (4, 8) for size in (32, 64, 128)]
    cases = [
        PackedCase(packing, dtype, depth, PackedKernels(language))
        for packing, depth in itertools.product((*packings, Packing(4, 32, MXFP4)), DEPTHS)
        for dtype in ((mx.bfloat16,) if packing.mode == MXFP4 else (mx.bfloat16, mx.float16))
    ]
    for case in cases:
        case.begin()
    for case in cases:
        reason = case.why_not()
        failed += reason is not None
        print(f"{reason or 'ok'}  {case.packing}, {case.dtype}, rows of {case.depth}", flush=True)
    return failed


def check_chains(language: KernelLanguage) -> int:
    """Compare chains with their products alone, and return the number of failures."""
    if not language.has_tensor_cores:
        return 0
    failed = 0
    for packing, sizes in itertools.product(PACKINGS, CHAINS):
        chain = block_chain(Format(packing, mx.bfloat16), *sizes)
        error = ChainTrial(PackedKernels(language), chain).largest_error(CHAIN_TURNS)
        failed += error > 0
        verdict = "ok" if error == 0 else f"error of {error:.4f}"
        print(f"{verdict}  {packing}, chain of {sizes}", flush=True)
    return failed


def check_steps(language: KernelLanguage) -> int:
    """Compare products of a compiled step with the same uncompiled; return how many differ."""
    if not language.has_tensor_cores:
        return 0
    failed = 0
    for packing in PACKINGS:
        kernels = PackedKernels(language)
        variant = kernels.variant_for(Format(packing, mx.bfloat16), *STEP)
        assert isinstance(variant, Tiles), "rows are too few for others, and too many to unpack"
        is_right = is_same_compiled(kernels, packing, variant, STEP)
        failed += not is_right
        print(f"{'ok' if is_right else 'wrong'}  {packing}, compiled step", flush=True)
    return failed


def is_same_compiled(
    kernels: PackedKernels,
    packing: Packing,
    variant: Tiles,
    sizes: tuple[int, int, int],
    compiled: Compile = mx.compile,
) -> bool:
    """True if products that follow each other in a compiled step are the same as uncompiled.

    MLX merges equal arrays in a compiled step alone. Tiles are divided, because only then
    threadgroups wait for others.

    Args:
        kernels: that multiply.
        packing: of the weights.
        variant: of the kernel; two threadgroups divide the depth of some of its tiles.
        sizes: rows of x, rows of a weight, and their length.
        compiled: compiles the step.
    """
    rows, width, depth = sizes
    assert variant.num_divided(rows, width), "nothing waits"
    keys = mx.random.split(mx.random.key(0), STEP_PRODUCTS + 1)
    weights = [
        packing.packed(mx.random.normal((width, depth), mx.bfloat16, key=key)) for key in keys[1:]
    ]

    def step(x: mx.array) -> list[mx.array]:
        return [kernels.product(x, arrays, packing, variant) for arrays in weights]

    x = mx.random.normal((rows, 1, depth), mx.bfloat16, key=keys[0])
    pairs = zip(step(x), compiled(step)(x), strict=True)
    return all(mx.array_equal(*pair).item() for pair in pairs)


def block_chain(form: Format, queries: int, hidden: int, inner: int) -> Chain:
    """Return the products of a block after attention, by the sizes of what is between them."""
    adds, gates = Around(adds=True), Around(1e-6, gates=True)
    sizes = ((adds, hidden, queries), (gates, 2 * inner, hidden), (adds, hidden, inner))
    links: list[Link] = []
    for around, width, depth in sizes:
        variant = vectors_for(form, 1, depth)
        assert variant is not None, "rows are short enough"
        links.append(Link(variant, around, width))
    return Chain(form, tuple(links))


@dataclass(frozen=True)
class PackedCase:
    """Weights of a packing with rows of a length, and the kernels that multiply them."""

    packing: Packing
    dtype: mx.Dtype
    depth: int
    kernels: PackedKernels

    def begin(self) -> None:
        """Begin to compile the kernels, all at the same time."""
        self.kernels.begin(Format(self.packing, self.dtype), self.depth)
        for fusion in self._fusions():
            fusion.begin()

    def why_not(self) -> str | None:
        """Return what is wrong; None if all kernels agree with MLX."""
        reason = why_not(self.kernels, self.packing, self.dtype, self.depth)
        if reason is not None:
            return reason
        error = max(self._errors())
        return None if error <= MAX_FUSED_ERROR else f"error of {error:.4f}"

    def _errors(self) -> Iterator[float]:
        """Yield the errors of products of other widths than a load tries, alone and fused."""
        yield kernels_error(self.kernels, self.packing, self.dtype, self.depth, WIDTHS)
        for fusion, width in itertools.product(self._fusions(), WIDTHS):
            yield fusion.error(2 * width)

    def _fusions(self) -> Iterable[Fusion]:
        """Return what is computed around products of few rows of weights and of many."""
        packed = PackedProducts(self.packing, self.depth, "cuda")
        packed.kernels = self.kernels
        fusions = [
            Fusion(packed, around, self.dtype, 2 * width)
            for around, width in itertools.product(AROUNDS, (WIDTHS[0], WIDTHS[-1]))
        ]
        # One row has the same kernels for both.
        return {fusion.shape: fusion for fusion in fusions}.values()
