"""Kernels of packed weights on an NVIDIA GPU with products of warpgroups.

``mx.quantized_matmul`` takes longer than the product of plain weights from 8 rows on, and
``mx.dequantize`` four times as long as the memory needs. These kernels read a packed weight once
for up to 256 rows and unpack it in registers, or unpack it for cuBLAS at the memory's speed. See
``docs/decisions/055-packed-weights-by-rows.md``, 061 and 063.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.types.shape_buckets import ROW_COUNTS
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.device.kernel_trial import cuda_report, largest_error, why_off
from mlx_parallm.worker.device.kernels import KernelReport
from mlx_parallm.worker.layers.packing import AFFINE, MXFP4, WORD_BITS, Packing
from mlx_parallm.worker.layers.product_chain import SPACING, Chain
from mlx_parallm.worker.layers.product_variants import (
    MAX_NARROW,
    NOTHING,
    SLAB,
    Around,
    Format,
    Tiles,
    Variant,
    Vectors,
    split_variant_for,
    variant_for,
)

HEADERS = (
    *("common.metal", "tensor_cores/tensor.cu", "tensor_cores/warpgroups.cu"),
    *("packed/numbers.cu", "packed/order.cu"),
)
# UNPACK_THREADS: of a threadgroup that unpacks; each unpacks UNPACK_PIECES times 8 numbers.
UNPACK_THREADS, UNPACK_PIECES = 256, 2
# PACKINGS: the modes and bits of which the texts know the numbers.
PACKINGS = ((AFFINE, 4), (AFFINE, 8), (MXFP4, 4))
# MAX_ERROR is in parts of the largest value: 16-bit products are rounded to 8 bits or more.
MAX_ERROR = 0.02
# REPORT_DEPTH, REPORT_GROUP: of the weight that ``packed_report`` tests.
REPORT_DEPTH, REPORT_GROUP = 4096, 64
# TRIAL_WIDTHS: rows of the weights in the check, no multiples of a threadgroup's. Kernels store
# results in pairs if there is an even number of rows.
TRIAL_WIDTHS = (168, 167)
DTYPES = (mx.bfloat16, mx.float16)


def why_unsupported(packing: Packing, dtype: mx.Dtype, depth: int) -> str | None:
    """Return why the kernels do not take weights with rows of this length; None if they do."""
    form = Format(packing, dtype)
    if (packing.mode, packing.bits) not in PACKINGS:
        return f"{packing.bits} bits, {packing.mode}"
    if dtype not in DTYPES or (packing.mode == MXFP4 and dtype != mx.bfloat16):
        return f"rows of {dtype}"
    if depth % max(form.scale_span, 2 * SLAB):
        return f"rows of {depth} numbers"
    return None


def why_not(kernels: PackedKernels, packing: Packing, dtype: mx.Dtype, depth: int) -> str | None:
    """Return why the kernels are not to be used for rows of this length; None if they are right."""
    reason = why_unsupported(packing, dtype, depth)
    return reason or why_off(lambda: kernels_error(kernels, packing, dtype, depth), MAX_ERROR)


def packed_report() -> KernelReport:
    """Test the kernels on the default device, if it has kernels."""
    packing = Packing(4, REPORT_GROUP)
    return cuda_report(
        lambda language: why_not(PackedKernels(language), packing, mx.bfloat16, REPORT_DEPTH)
    )


def kernels_error(
    kernels: PackedKernels,
    packing: Packing,
    dtype: mx.Dtype,
    depth: int,
    widths: Sequence[int] = TRIAL_WIDTHS,
) -> float:
    """Return the largest difference from MLX's operations, in parts of the largest value.

    Args:
        kernels: the kernels.
        packing: of the weights.
        dtype: of the rows.
        depth: the length of rows.
        widths: rows of the weights.
    """
    form = Format(packing, dtype)
    worst = 0.0
    for width in widths:
        weight = mx.random.normal((width, depth), dtype, key=mx.random.key(0))
        arrays = packing.packed(weight)
        plain = packing.unpacked(arrays, dtype)
        worst = max(worst, largest_error(kernels.unpacked(arrays, packing, dtype), plain))
        for rows, variant in kernels.variants_of(form, depth):
            x = mx.random.normal((rows, 1, depth), dtype, key=mx.random.key(rows))
            wanted = x[:, 0] @ plain.T
            # One threadgroup takes all tiles of variants whose threadgroups stay.
            stays = isinstance(variant, Tiles) and variant.slabs == 1
            for most in (None, 1) if stays else (None,):
                (actual,) = kernels.outputs(x, arrays, packing, variant, most_threadgroups=most)
                if isinstance(variant, Tiles) and variant.splits > 1:
                    actual = actual.sum(axis=0).astype(dtype)
                worst = max(worst, largest_error(actual[:, 0], wanted))
    return worst


class PackedKernels:
    """The kernels of packed weights; each variant is compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build kernels in ``language``: CUDA's, or a test's stand-in for it."""
        self._language = language
        self._builder = KernelBuilder(language, TEXTS, "packed", _argument_dtype)
        self._kernels: dict[tuple[Format, Variant | None, Around], Kernel] = {}
        self._chains: dict[Chain, Kernel] = {}

    def variant_for(self, form: Format, rows: int, width: int, depth: int) -> Variant | None:
        """Return the variant that multiplies, see ``product_variants.variant_for``."""
        return self._usable(variant_for(form, rows, width, depth))

    def split_variant_for(self, form: Format, rows: int, width: int, depth: int) -> Variant | None:
        """Return the variant whose threadgroups divide the depth, see ``product_variants``."""
        return self._usable(split_variant_for(form, rows, width, depth))

    def _usable(self, variant: Variant | None) -> Variant | None:
        """Return a variant whose threads take registers of others only where they can."""
        takes = isinstance(variant, Tiles) and variant.registers is not None
        return None if takes and not self._language.states_threads else variant

    def variants_of(self, form: Format, depth: int) -> Iterator[tuple[int, Variant]]:
        """Yield the variants in use for rows of a length, each with rows that it does not fill."""
        known: set[Variant] = set()
        for width in (MAX_NARROW, MAX_NARROW + 1):
            for rows in (*ROW_COUNTS, 2 * ROW_COUNTS[-1]):
                for choose in (self.variant_for, self.split_variant_for):
                    variant = choose(form, rows, width, depth)
                    if variant is not None and variant not in known:
                        known.add(variant)
                        yield max(1, rows - 1), variant

    def product(
        self,
        x: mx.array,
        arrays: Sequence[mx.array],
        packing: Packing,
        variant: Variant,
        around: Around = NOTHING,
        others: Sequence[mx.array] = (),
    ) -> mx.array:
        """Return the product ``x @ weight.T`` alone, see ``outputs``."""
        return self.outputs(x, arrays, packing, variant, around, others)[0]

    def outputs(
        self,
        x: mx.array,
        arrays: Sequence[mx.array],
        packing: Packing,
        variant: Variant,
        around: Around = NOTHING,
        others: Sequence[mx.array] = (),
        most_threadgroups: int | None = None,
    ) -> list[mx.array]:
        """Return the product ``x @ weight.T``, ``[T, 1, N]`` in the dtype of x, and counts if any.

        A variant with splits returns parts of it in float32, ``[S, T, 1, N]``. Counts are uint32,
        ``around.counts`` of them.

        Args:
            x: T rows, ``[T, 1, K]``.
            arrays: of the weight ``[N, K]``, in the order of ``Packing.names``.
            packing: of the weight.
            variant: of the kernel; rows of x fit it.
            around: what is computed around the product; for others than ``Vectors`` SwiGLU alone.
            others: inputs of that, in the order of ``Around.inputs``.
            most_threadgroups: bounds threadgroups that go on with other tiles, for a trial: 1,
                which waits for no other. Two or more might wait for one behind them in the grid.
        """
        rows, width = x.shape[0], arrays[0].shape[0]
        inputs, outputs = [x, *arrays, *others], _outputs(rows, width, x.dtype, variant, around)
        if isinstance(variant, Tiles) and variant.divides:
            # Where nothing is divided, nothing is counted, and any array will do.
            is_divided = variant.num_divided(rows, width) > 0
            inputs.append(self._counts(x, variant) if is_divided else arrays[0])
        threadgroups = variant.threadgroups(rows, width)
        if most_threadgroups is not None:
            threadgroups = min(threadgroups, most_threadgroups)
        return self.kernel(Format(packing, x.dtype), variant, around)(
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=(threadgroups * variant.threads, 1, 1),
            threadgroup=(variant.threads, 1, 1),
        )[: len(around.outputs)]

    def _counts(self, x: mx.array, variant: Tiles) -> mx.array:
        """Return zeros for one launch alone, in which arrivals are counted.

        ``mx.zeros`` of several launches would be one array in a compiled step, where equal arrays
        are merged. A kernel's output is its own.
        """
        spec = KernelSpec("packed/zeros.cu", ("x",), ("counts",))
        size = max(SPACING, variant.max_threadgroups)
        return self._builder.kernel(spec, {"T": x.dtype, "SIZE": size})(
            inputs=[x],
            output_shapes=[(size,)],
            output_dtypes=[mx.uint32],
            grid=(size, 1, 1),
            threadgroup=(size, 1, 1),
        )[0]

    def unpacked(self, arrays: Sequence[mx.array], packing: Packing, dtype: mx.Dtype) -> mx.array:
        """Return the weight ``[N, K]`` in a dtype of ``DTYPES``."""
        width, words = arrays[0].shape
        depth = words * WORD_BITS // packing.bits
        threadgroups = -(-width * depth // (8 * UNPACK_THREADS * UNPACK_PIECES))
        return self.kernel(Format(packing, dtype), None)(
            inputs=list(arrays),
            output_shapes=[(width, depth)],
            output_dtypes=[dtype],
            grid=(threadgroups * UNPACK_THREADS, 1, 1),
            threadgroup=(UNPACK_THREADS, 1, 1),
        )[0]

    def begin(self, form: Format, depth: int) -> None:
        """Begin to compile the kernels for rows of a length, in the background if possible."""
        for variant in (None, *(variant for _, variant in self.variants_of(form, depth))):
            self.kernel(form, variant)

    def kernel(self, form: Format, variant: Variant | None, around: Around = NOTHING) -> Kernel:
        """Return a product's kernel, or with None the one that unpacks; it begins to compile."""
        key = (form, variant, around)
        if key not in self._kernels:
            self._kernels[key] = self._build(*key)
        return self._kernels[key]

    def chained(
        self,
        chain: Chain,
        x: mx.array,
        hidden: mx.array,
        weights: Sequence[Sequence[mx.array]],
        counts: mx.array,
    ) -> mx.array:
        """Return the last product of a chain, ``[1, 1, N]``.

        Args:
            chain: the products.
            x: a row of K numbers, the input of the first product.
            hidden: the hidden states, ``[1, 1, hidden]``.
            weights: of each product: the weight's arrays, and the weight of the norm before it.
            counts: ``chain.counts`` zeros, uint32, for this launch alone: it writes them.
        """
        return self.chain(chain)(
            inputs=[x, hidden, *(array for arrays in weights for array in arrays), counts],
            output_shapes=[(1, 1, link.outputs) for link in chain.links],
            output_dtypes=[hidden.dtype] * len(chain.links),
            grid=(chain.threadgroups * chain.threads, 1, 1),
            threadgroup=(chain.threads, 1, 1),
        )[-1]

    def chain(self, chain: Chain) -> Kernel:
        """Return the kernel of a chain; it begins to compile."""
        if chain not in self._chains:
            spec = KernelSpec(
                Vectors.text, chain.inputs, chain.outputs, HEADERS, residency=chain.residency
            )
            self._chains[chain] = self._builder.joined(spec, chain.parts())
        return self._chains[chain]

    def _build(self, form: Format, variant: Variant | None, around: Around) -> Kernel:
        names = form.packing.names
        if variant is None:
            spec = KernelSpec("packed/unpack.cu", names, ("out",), HEADERS)
            return self._builder.kernel(
                spec, {**form.constants, "THREADS": UNPACK_THREADS, "PIECES": UNPACK_PIECES}
            )
        divides = isinstance(variant, Tiles) and variant.divides
        spec = KernelSpec(
            variant.text,
            ("x", *names, *around.inputs, *(("arrivals_pool",) if divides else ())),
            (*around.outputs, *(("parts",) if divides else ())),
            HEADERS,
            residency=variant.residency(form),
        )
        own = around.constants
        if not isinstance(variant, Vectors):
            own = {"GATE": own["GATE"]}
        return self._builder.kernel(spec, {**variant.constants(form), **own})


def _outputs(
    rows: int, width: int, dtype: mx.Dtype, variant: Variant, around: Around
) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Return the shapes and dtypes of what a product's kernel writes, in the order of its names."""
    shape = rows, 1, width // (2 if around.gates else 1)
    if isinstance(variant, Tiles) and variant.splits > 1:
        return [((variant.splits, *shape), mx.float32)]
    outputs: list[tuple[tuple[int, ...], mx.Dtype]] = [(shape, dtype)]
    if around.counts:
        outputs.append(((around.counts,), mx.uint32))
    if isinstance(variant, Tiles) and variant.divides:
        num_divided = max(1, variant.num_divided(rows, width))
        outputs.append(((num_divided, variant.rows * variant.wide), mx.float32))
    return outputs


def _argument_dtype(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    # The arguments of a chain's products are numbered.
    kind = name.rstrip("_0123456789")
    if kind == "weight" or name in ("arrivals_pool", "counts"):
        return mx.uint32
    if kind == "scales" and constants["MXFP4"]:
        return mx.uint8
    dtype = constants["T"]
    if name == "parts" or (name == "out" and constants.get("SPLITS", 1) != 1):
        return mx.float32
    return dtype if isinstance(dtype, mx.Dtype) else None
