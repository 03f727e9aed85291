"""Kernels of packed weights on an NVIDIA GPU with products of warpgroups.

``mx.quantized_matmul`` takes longer than the product of plain weights from 8 rows on, and
``mx.dequantize`` four times as long as the memory needs. These kernels read a packed weight once
for up to 128 rows and unpack it in registers, or unpack it for cuBLAS at the memory's speed. See
``docs/decisions/055-packed-weights-by-rows.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel, Residency
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.types.shape_buckets import ROW_COUNTS
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.device.kernel_trial import cuda_report, largest_error, why_off
from mlx_parallm.worker.device.kernels import KernelReport
from mlx_parallm.worker.layers.packing import AFFINE, MXFP4, WORD_BITS, Packing

# WARP, WARPGROUP: threads.
WARP, WARPGROUP = 32, 128
# PIECE: bytes that are loaded at once.
PIECE = 16
# FEW: rows of x for which tensor cores multiply as long as for one.
FEW = 8
# SLAB: numbers of a row that a warpgroup multiplies at once.
SLAB = 64
# PANEL: rows of a weight that tensor cores multiply at once.
PANEL = 16
# PROCESSORS of a GPU: as many threadgroups as these have room for take equal parts of a weight.
PROCESSORS = 132
# ALIGNMENT of chunks in shared memory, in bytes.
ALIGNMENT = 1024
HEADERS = (
    *("common.metal", "tensor_cores/tensor.cu", "tensor_cores/warpgroups.cu"),
    "packed/numbers.cu",
)
# UNPACK_THREADS: of a threadgroup that unpacks; each unpacks UNPACK_PIECES times 8 numbers.
UNPACK_THREADS, UNPACK_PIECES = 256, 4
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


@dataclass(frozen=True, slots=True)
class Format:
    """A packing, and the dtype of values."""

    packing: Packing
    dtype: mx.Dtype

    @property
    def arrays(self) -> int:
        """Return 2 for scales and biases, 1 for scales."""
        return len(self.packing.names) - 1

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of a scale."""
        return 1 if self.packing.mode == MXFP4 else self.dtype.size

    @property
    def scale_span(self) -> int:
        """Return of how many numbers the scales are a piece."""
        return PIECE // self.scale_bytes * self.packing.group_size

    @property
    def constants(self) -> dict[str, Constant]:
        """Return what the kernels' texts know of it."""
        return {
            "T": self.dtype,
            "BITS": self.packing.bits,
            "MXFP4": int(self.packing.mode == MXFP4),
            "GROUP": self.packing.group_size,
        }


@dataclass(frozen=True, slots=True)
class Rows:
    """A variant of ``rows.cu``: up to ``FEW`` rows of x.

    Attributes:
        wide: rows of the weight, of a threadgroup.
        warps: of a threadgroup.
        span: numbers of a row that are loaded at once.
        stages: spans that are in shared memory.
    """

    wide: int
    warps: int
    span: int
    stages: int

    text = "packed/rows.cu"

    @property
    def threads(self) -> int:
        """Return the threads of a threadgroup."""
        return WARP * self.warps

    @property
    def constants(self) -> dict[str, Constant]:
        """Return the text's constants."""
        return {"WIDE": self.wide, "WARPS": self.warps, "SPAN": self.span, "STAGES": self.stages}

    def residency(self, form: Format) -> Residency:
        """Return the room that threadgroups take."""
        bits = form.packing.bits
        line = self.span * bits // 8 + bits * 4
        scale_line = self.span // form.packing.group_size * form.scale_bytes + PIECE
        stages = self.stages * self.wide * (line + form.arrays * scale_line)
        sums = self.warps * FEW * (self.wide + 1) * mx.float32.size
        return Residency(max(stages, sums), self.threads)

    def threadgroups(self, rows: int, width: int) -> int:
        """Return how many threadgroups multiply so many rows of x and of the weight."""
        assert rows <= FEW
        return -(-width // self.wide)


@dataclass(frozen=True, slots=True)
class Vectors:
    """A variant of ``vectors.cu``: one or two rows of x.

    Attributes:
        rows: of x.
        depth: the length of rows.
        warps: of a threadgroup.
        ahead: pieces of a row that a lane loads at once.
        resident: threadgroups of a processor, which bounds their registers.
    """

    rows: int
    depth: int
    warps: int
    ahead: int
    resident: int

    text = "packed/vectors.cu"

    @property
    def threads(self) -> int:
        """Return the threads of a threadgroup."""
        return WARP * self.warps

    @property
    def most(self) -> int:
        """Return how many threadgroups multiply at most; each takes several panels."""
        return PROCESSORS * self.resident

    @property
    def constants(self) -> dict[str, Constant]:
        """Return the text's constants."""
        return {
            "ROWS": self.rows,
            "DEPTH": self.depth,
            "WARPS": self.warps,
            "AHEAD": self.ahead,
            "THREADGROUPS": self.most,
        }

    def residency(self, form: Format) -> Residency:
        """Return the room that threadgroups take."""
        numbers = self.rows * self.depth * form.dtype.size
        zeros = PIECE * (4 + WORD_BITS // form.packing.bits * 2)
        spans = PIECE * self.rows * (self.depth // min(form.packing.group_size, SLAB))
        sums = 2 * self.warps * self.rows * PANEL * mx.float32.size
        return Residency(numbers + zeros + spans + sums, self.threads, self.resident)

    def threadgroups(self, rows: int, width: int) -> int:
        """Return how many threadgroups multiply so many rows of x and of the weight."""
        assert rows <= self.rows
        panels = -(-width // PANEL)
        return -(-panels // -(-panels // self.most))


@dataclass(frozen=True, slots=True)
class Around:
    """The operations that a kernel computes around a product: all of them ``vectors.cu`` alone.

    Attributes:
        epsilon: of the RMSNorm of x; None to multiply x as it is.
        gates: True if the first half of the product are gates of the other half (SwiGLU). All
            variants that write no parts compute it.
        adds: True if the product is added to a residual.
    """

    epsilon: float | None = None
    gates: bool = False
    adds: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of further inputs."""
        norm = ("norm_weight",) if self.epsilon is not None else ()
        return (*norm, *(("residual",) if self.adds else ()))

    @property
    def constants(self) -> dict[str, Constant]:
        """Return the text's constants."""
        epsilon = {} if self.epsilon is None else {"EPSILON": float(self.epsilon)}
        switches = {"NORM": len(epsilon), "GATE": int(self.gates), "RESIDUAL": int(self.adds)}
        return {**switches, **epsilon}


NOTHING = Around()


@dataclass(frozen=True, slots=True)
class Tiles:
    """A variant of ``tiles.cu``.

    Attributes:
        rows: of x, of a threadgroup.
        wide: rows of the weight, of a threadgroup.
        slabs: warpgroups that divide the depth.
        stages: chunks that are in shared memory.
        resident: threadgroups of a processor, which bounds their registers.
        splits: threadgroups that divide the depth; their sums are still to be added.
    """

    rows: int
    wide: int
    slabs: int
    stages: int
    resident: int = 1
    splits: int = 1

    text = "packed/tiles.cu"

    @property
    def threads(self) -> int:
        """Return the threads of a threadgroup."""
        return WARPGROUP * self.wide // SLAB * self.slabs

    @property
    def constants(self) -> dict[str, Constant]:
        """Return the text's constants."""
        return {
            "ROWS": self.rows,
            "TILE_ROWS": self.rows,
            "WIDE": self.wide,
            "SLABS": self.slabs,
            "STAGES": self.stages,
            "SPLITS": self.splits,
        }

    def residency(self, form: Format) -> Residency:
        """Return the room that threadgroups take."""
        chunk = SLAB * self.slabs
        weights = self.wide * form.packing.bits // 8
        stages = self.stages * chunk * (self.rows * form.dtype.size + weights)
        spans = 2 if form.scale_span // chunk >= self.stages else 4
        scales = spans * form.arrays * self.wide * PIECE
        sums = self.slabs * self.rows * (self.wide + 4) * mx.float32.size
        return Residency(max(stages + scales, sums) + ALIGNMENT, self.threads, self.resident)

    def threadgroups(self, rows: int, width: int) -> int:
        """Return how many threadgroups multiply so many rows of x and of the weight."""
        return -(-rows // self.rows) * -(-width // self.wide) * self.splits


# FEW_ROWS: variants for up to ``FEW`` rows of x, by bits, for narrow weights and for wide ones.
FEW_ROWS = {
    4: (Rows(wide=16, warps=8, span=2048, stages=1), Rows(32, 8, 2048, 1)),
    8: (Rows(16, 8, 1024, 3), Rows(16, 8, 1024, 2)),
}
# MAX_VECTORS: rows of x up to which ``vectors.cu`` is used.
MAX_VECTORS = 2
# MAX_SHARED: bytes of shared memory of a threadgroup with x; two are on a processor at once.
MAX_SHARED = 96 << 10
# MAX_NARROW: a weight of so few rows has few threadgroups, so that these need more warps.
MAX_NARROW = 8192
# NARROW_TILES, WIDE_TILES: by mode and bits, up to how many rows of x which variant is the fastest
# on an H200. More rows pay for unpacking the weight (docs/decisions/055-packed-weights-by-rows.md).
_FIRST = (16, Tiles(16, 64, 2, 6))
_LAST = (512, Tiles(128, 128, 1, 4, 2))
_NARROW = ((64, Tiles(64, 64, 4, 4)), (128, Tiles(128, 64, 2, 4)))
NARROW_TILES = {
    (AFFINE, 4): (_FIRST, (32, Tiles(32, 64, 4, 6)), *_NARROW, (256, Tiles(128, 64, 2, 4)), _LAST),
    (AFFINE, 8): (_FIRST, (32, Tiles(32, 64, 4, 6)), *_NARROW, (256, Tiles(128, 64, 2, 3)), _LAST),
    (MXFP4, 4): (_FIRST, (32, Tiles(32, 64, 4, 6)), *_NARROW, (256, Tiles(128, 64, 2, 4)), _LAST),
}
_WIDE = (_FIRST, (32, Tiles(32, 64, 2, 4, 2)))
WIDE_TILES = {
    (AFFINE, 4): (*_WIDE, (64, Tiles(64, 64, 2, 5)), (128, Tiles(128, 192, 1, 6)), _LAST),
    (AFFINE, 8): (*_WIDE, (64, Tiles(64, 64, 2, 4, 2)), (128, Tiles(128, 192, 1, 6)), _LAST),
    (MXFP4, 4): (*_WIDE, (64, Tiles(64, 64, 2, 5, 2)), (128, Tiles(128, 192, 1, 6)), _LAST),
}
# SPLIT_TILES: the same of all packings where threadgroups divide the depth, for weights of up to
# MAX_NARROW rows.
SPLIT_TILES = (
    (16, Tiles(16, 64, 2, 5, 2, splits=4)),
    (32, Tiles(32, 64, 2, 4, 2, splits=4)),
    (64, Tiles(64, 64, 2, 4, 2, splits=4)),
    (128, Tiles(128, 128, 2, 4, splits=4)),
)


def variant_for(form: Format, rows: int, width: int, depth: int) -> Rows | Vectors | Tiles | None:
    """Return the variant that multiplies so many rows of x and of the weight; None to unpack.

    Args:
        form: of the weight.
        rows: of x.
        width: rows of the weight.
        depth: the length of rows.
    """
    packing = form.packing
    vectors = vectors_for(form, rows, depth)
    if vectors is not None:
        return vectors
    if rows <= FEW:
        return FEW_ROWS[packing.bits][width > MAX_NARROW]
    tiles = WIDE_TILES if width > MAX_NARROW else NARROW_TILES
    own = tiles[packing.mode, packing.bits]
    return next((variant for limit, variant in own if rows <= limit), None)


def split_variant_for(form: Format, rows: int, width: int, depth: int) -> Tiles | None:
    """Return the variant whose threadgroups divide the depth; None if another one is faster."""
    if width > MAX_NARROW or rows <= FEW:
        return None
    variant = next((variant for limit, variant in SPLIT_TILES if rows <= limit), None)
    spans = depth // form.scale_span
    return variant if variant is not None and spans >= variant.splits else None


def vectors_for(form: Format, rows: int, depth: int) -> Vectors | None:
    """Return the variant of ``vectors.cu`` for so many rows of x; None if there is none."""
    if rows > MAX_VECTORS:
        return None
    bits = form.packing.bits
    variant = Vectors(rows, depth, warps=8, ahead=bits, resident=2)
    return variant if variant.residency(form).shared_bytes <= MAX_SHARED else None


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
        arrays = mx.quantize(weight, packing.group_size, packing.bits, packing.mode)
        plain = packing.unpacked(arrays, dtype)
        worst = max(worst, largest_error(kernels.unpacked(arrays, packing, dtype), plain))
        for rows, variant in variants_of(form, depth):
            x = mx.random.normal((rows, 1, depth), dtype, key=mx.random.key(rows))
            actual = kernels.product(x, arrays, packing, variant)
            if isinstance(variant, Tiles) and variant.splits > 1:
                actual = actual.sum(axis=0).astype(dtype)
            worst = max(worst, largest_error(actual[:, 0], x[:, 0] @ plain.T))
    return worst


def variants_of(form: Format, depth: int) -> Iterator[tuple[int, Rows | Vectors | Tiles]]:
    """Yield the variants in use for rows of a length, each with rows that it does not fill."""
    known: set[Rows | Vectors | Tiles] = set()
    for width in (MAX_NARROW, MAX_NARROW + 1):
        for rows in (*ROW_COUNTS, 2 * ROW_COUNTS[-1]):
            for choose in (variant_for, split_variant_for):
                variant = choose(form, rows, width, depth)
                if variant is not None and variant not in known:
                    known.add(variant)
                    yield max(1, rows - 1), variant


class PackedKernels:
    """The kernels of packed weights; each variant is compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build kernels in ``language``: CUDA's, or a test's stand-in for it."""
        self._builder = KernelBuilder(language, TEXTS, "packed", _argument_dtype)
        self._kernels: dict[tuple[Format, Rows | Vectors | Tiles | None, Around], Kernel] = {}

    def product(
        self,
        x: mx.array,
        arrays: Sequence[mx.array],
        packing: Packing,
        variant: Rows | Vectors | Tiles,
        around: Around = NOTHING,
        others: Sequence[mx.array] = (),
    ) -> mx.array:
        """Return the product ``x @ weight.T``, ``[T, 1, N]`` in the dtype of x.

        A variant with splits returns parts of it in float32, ``[S, T, 1, N]``.

        Args:
            x: T rows, ``[T, 1, K]``.
            arrays: of the weight ``[N, K]``, in the order of ``Packing.names``.
            packing: of the weight.
            variant: of the kernel; rows of x fit it.
            around: what is computed around the product.
            others: inputs of that, in the order of ``Around.inputs``.
        """
        rows, width = x.shape[0], arrays[0].shape[0] // (2 if around.gates else 1)
        shape, dtype = (rows, 1, width), x.dtype
        if isinstance(variant, Tiles) and variant.splits > 1:
            shape, dtype = (variant.splits, *shape), mx.float32
        return self.kernel(Format(packing, x.dtype), variant, around)(
            inputs=[x, *arrays, *others],
            output_shapes=[shape],
            output_dtypes=[dtype],
            grid=(variant.threadgroups(rows, arrays[0].shape[0]) * variant.threads, 1, 1),
            threadgroup=(variant.threads, 1, 1),
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
        for variant in (None, *(variant for _, variant in variants_of(form, depth))):
            self.kernel(form, variant)

    def kernel(
        self, form: Format, variant: Rows | Vectors | Tiles | None, around: Around = NOTHING
    ) -> Kernel:
        """Return a product's kernel, or with None the one that unpacks; it begins to compile."""
        key = (form, variant, around)
        if key not in self._kernels:
            self._kernels[key] = self._build(*key)
        return self._kernels[key]

    def _build(
        self, form: Format, variant: Rows | Vectors | Tiles | None, around: Around
    ) -> Kernel:
        names = form.packing.names
        if variant is None:
            spec = KernelSpec("packed/unpack.cu", names, ("out",), HEADERS)
            return self._builder.kernel(
                spec, {**form.constants, "THREADS": UNPACK_THREADS, "PIECES": UNPACK_PIECES}
            )
        spec = KernelSpec(
            variant.text,
            ("x", *names, *around.inputs),
            ("out",),
            HEADERS,
            residency=variant.residency(form),
        )
        own = around.constants
        if not isinstance(variant, Vectors):
            own = {"GATE": own["GATE"]}
        return self._builder.kernel(spec, {**form.constants, **variant.constants, **own})


def _argument_dtype(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    if name == "weight":
        return mx.uint32
    if name == "scales" and constants["MXFP4"]:
        return mx.uint8
    dtype = constants["T"]
    if name == "out" and constants.get("SPLITS", 1) != 1:
        return mx.float32
    return dtype if isinstance(dtype, mx.Dtype) else None
