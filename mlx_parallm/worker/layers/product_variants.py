"""The variants of the kernels of packed weights, and which one multiplies how many rows."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.kernels.build import Constant
from mlx_parallm.kernels.kernel import PROCESSORS, Residency
from mlx_parallm.worker.layers.packing import MXFP4, WORD_BITS, Packing

# WARP, WARPGROUP: threads.
WARP, WARPGROUP = 32, 128
# PIECE: bytes that are loaded at once.
PIECE = 16
# FEW: rows of x for which tensor cores multiply as long as for one. FEW_BITS: of numbers for which
# ``rows.cu`` is faster than ``tiles.cu``.
FEW, FEW_BITS = 8, 4
# SLAB: numbers of a row that a warpgroup multiplies at once.
SLAB = 64
# PANEL: rows of a weight that tensor cores multiply at once.
PANEL = 16
# ALIGNMENT of chunks in shared memory, in bytes.
ALIGNMENT = 1024


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
        """Return how many numbers share one piece of scales."""
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
    """A variant of ``rows.cu``: up to ``FEW`` rows of x, and numbers of ``FEW_BITS`` bits.

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

    def constants(self, form: Format) -> dict[str, Constant]:
        """Return the text's constants."""
        own = {"WIDE": self.wide, "WARPS": self.warps, "SPAN": self.span, "STAGES": self.stages}
        return {**form.constants, **own}

    def residency(self, form: Format) -> Residency:
        """Return the room that threadgroups take."""
        line = self.span * FEW_BITS // 8 + PIECE
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
    """A variant of ``vectors.cu``: one row of x.

    Attributes:
        depth: the length of rows.
        warps: of a threadgroup.
        ahead: pieces of a row that a lane loads at once.
        resident: threadgroups that a processor runs at once, which bounds their registers.
    """

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
    def max_threadgroups(self) -> int:
        """Return how many threadgroups the processors run at once, ``resident`` on each.

        A weight with more panels of ``PANEL`` rows gives each threadgroup several, one after the
        other, so that x is prepared once for all of them.
        """
        return PROCESSORS * self.resident

    def constants(self, form: Format) -> dict[str, Constant]:
        """Return the text's constants."""
        return {
            **form.constants,
            "DEPTH": self.depth,
            "WARPS": self.warps,
            "AHEAD": self.ahead,
            "THREADGROUPS": self.max_threadgroups,
            "LINK": 0,
            "LAST": 0,
            "FIRST": 0,
        }

    def residency(self, form: Format) -> Residency:
        """Return the room that threadgroups take."""
        numbers = self.depth * form.dtype.size
        zeros = PIECE * (4 + WORD_BITS // form.packing.bits * 2)
        spans = PIECE * (self.depth // min(form.packing.group_size, SLAB))
        sums = 2 * self.warps * PANEL * mx.float32.size
        return Residency(numbers + zeros + spans + sums, self.threads, self.resident)

    def threadgroups(self, rows: int, width: int) -> int:
        """Return how many threadgroups multiply so many rows of x and of the weight."""
        assert rows == 1
        panels = -(-width // PANEL)
        panels_each = -(-panels // self.max_threadgroups)
        return -(-panels // panels_each)


@dataclass(frozen=True, slots=True)
class Around:
    """The operations that a kernel computes around a product: all of them ``vectors.cu`` alone.

    Attributes:
        epsilon: of the RMSNorm of x; None to multiply x as it is.
        gates: True if the first half of the product are gates of the other half (SwiGLU). All
            variants that write no parts compute it.
        adds: True if the product is added to a residual.
        counts: how many zeros are written beside it, for a chain behind it (``product_chain``).
    """

    epsilon: float | None = None
    gates: bool = False
    adds: bool = False
    counts: int = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of further inputs."""
        norm = ("norm_weight",) if self.epsilon is not None else ()
        return (*norm, *(("residual",) if self.adds else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs."""
        return ("out", "counts") if self.counts else ("out",)

    @property
    def constants(self) -> dict[str, Constant]:
        """Return the text's constants."""
        epsilon = {} if self.epsilon is None else {"EPSILON": float(self.epsilon)}
        switches = {"NORM": len(epsilon), "GATE": int(self.gates), "RESIDUAL": int(self.adds)}
        return {**switches, "COUNTS": self.counts, **epsilon}


NOTHING = Around()
# GATES: SwiGLU alone, which is computed for more rows than what else stands around a product.
GATES = Around(gates=True)


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
        registers: of threads that multiply, and of those that load; None to divide them equally.
        divides: True if two threadgroups divide the depth of each of the last tiles where these
            would leave half of the threadgroups idle.
    """

    rows: int
    wide: int
    slabs: int
    stages: int
    resident: int = 1
    splits: int = 1
    registers: tuple[int, int] | None = None
    divides: bool = False

    text = "packed/tiles.cu"

    def __post_init__(self) -> None:
        """Check that halves of the depth are not divided again."""
        assert not self.divides or self.slabs == self.splits == 1, "sums are in two places"

    @property
    def threads(self) -> int:
        """Return the threads of a threadgroup: warpgroups that multiply, and one that loads."""
        return WARPGROUP * (self.wide // SLAB * self.slabs + 1)

    @property
    def max_threadgroups(self) -> int:
        """Return how many threadgroups the processors run at once, ``resident`` on each."""
        return PROCESSORS * self.resident

    def constants(self, form: Format) -> dict[str, Constant]:
        """Return the text's constants."""
        multiplier, loader = self.registers or (0, 0)
        return {
            **form.constants,
            "ROWS": self.rows,
            "WIDE": self.wide,
            "SLABS": self.slabs,
            "STAGES": self.stages,
            "RING": self.ring(form),
            "SPLITS": self.splits,
            "THREADGROUPS": self.max_threadgroups,
            "REGISTERS": multiplier,
            "LOADER_REGISTERS": loader,
            "DIVIDES": int(self.divides),
        }

    def ring(self, form: Format) -> int:
        """Return the number of spans whose scales are in shared memory.

        The first ``stages`` chunks are fetched at once. A later one is fetched when the scales of
        the one that is ``stages - 1`` before it have been read, and those in between are there.
        """
        span = form.scale_span // (SLAB * self.slabs)
        return -(-(self.stages + max(0, span - 2)) // span)

    def residency(self, form: Format) -> Residency:
        """Return the room that threadgroups take."""
        chunk = SLAB * self.slabs
        weights = self.wide * form.packing.bits // 8
        stages = self.stages * chunk * (self.rows * form.dtype.size + weights)
        scales = self.ring(form) * form.arrays * self.wide * PIECE
        sums = self.slabs * self.rows * (self.wide + 4) * mx.float32.size if self.slabs > 1 else 0
        return Residency(max(stages + scales, sums) + ALIGNMENT, self.threads, self.resident)

    def threadgroups(self, rows: int, width: int) -> int:
        """Return how many threadgroups multiply so many rows of x and of the weight."""
        tiles = self._tiles(rows, width)
        if self.slabs > 1:
            return tiles
        return min(self.max_threadgroups, tiles + self.num_divided(rows, width))

    def num_divided(self, rows: int, width: int) -> int:
        """Return of how many tiles two threadgroups divide the depth."""
        rest = self._tiles(rows, width) % self.max_threadgroups
        return rest if self.divides and 2 * rest <= self.max_threadgroups else 0

    def _tiles(self, rows: int, width: int) -> int:
        return -(-rows // self.rows) * -(-width // self.wide) * self.splits


#: ``Variant``: of a kernel that multiplies.
Variant = Rows | Vectors | Tiles
# FEW_ROWS: variants for up to ``FEW`` rows of x and numbers of 4 bits, for narrow and wide weights.
FEW_ROWS = (Rows(wide=16, warps=8, span=2048, stages=1), Rows(32, 8, 2048, 1))
# MAX_SHARED: bytes of shared memory of a threadgroup with x; two are on a processor at once.
MAX_SHARED = 96 << 10
# MAX_NARROW: a weight of so few rows has few threadgroups, so that these need more warps.
MAX_NARROW = 8192
# FOR_128_SUMS, FOR_64_SUMS: registers of a thread that multiplies and has so many sums, and of one
# that loads, which gives up the rest.
FOR_128_SUMS, FOR_64_SUMS = (216, 72), (152, 56)
# NARROW_TILES, WIDE_TILES: up to how many rows of x which variant is the fastest on an H200, about
# equally with all packings. More rows pay for unpacking the weight
# (docs/decisions/061-loading-warpgroups-for-packed-weights.md, 063).
NARROW_TILES = (
    (16, Tiles(16, 64, 4, 6)),
    (32, Tiles(32, 64, 4, 6)),
    (64, Tiles(64, 64, 4, 4)),
    (128, Tiles(128, 64, 2, 5)),
    (256, Tiles(256, 64, 2, 3, registers=FOR_128_SUMS)),
    (512, Tiles(128, 192, 1, 6, registers=FOR_64_SUMS)),
)
WIDE_TILES = (
    (16, Tiles(16, 64, 2, 6)),
    (32, Tiles(32, 64, 2, 6, 2)),
    (64, Tiles(64, 192, 1, 6)),
    (128, Tiles(128, 192, 1, 6, registers=FOR_64_SUMS)),
    (1024, Tiles(256, 128, 1, 5, registers=FOR_128_SUMS, divides=True)),
)
# SPLIT_TILES: the same for weights of up to MAX_NARROW rows where threadgroups divide the depth.
# The first one whose depth suffices is taken.
SPLIT_TILES = (
    (16, Tiles(16, 64, 4, 6, splits=2)),
    (32, Tiles(32, 64, 4, 6, splits=2)),
    (64, Tiles(64, 64, 2, 6, splits=2)),
    (128, Tiles(128, 128, 1, 7, splits=4)),
    (128, Tiles(128, 64, 2, 4, splits=2)),
    (256, Tiles(256, 64, 2, 3, splits=2, registers=FOR_128_SUMS)),
    (512, Tiles(256, 128, 1, 5, splits=2, registers=FOR_128_SUMS)),
)


def variant_for(form: Format, rows: int, width: int, depth: int) -> Variant | None:
    """Return the variant that multiplies so many rows of x and of the weight; None to unpack.

    Args:
        form: of the weight.
        rows: of x.
        width: rows of the weight.
        depth: the length of rows.
    """
    vectors = vectors_for(form, rows, depth)
    if vectors is not None:
        return vectors
    if _are_few(form, rows):
        return FEW_ROWS[width > MAX_NARROW]
    tiles = WIDE_TILES if width > MAX_NARROW else NARROW_TILES
    return next((variant for limit, variant in tiles if rows <= limit), None)


def split_variant_for(form: Format, rows: int, width: int, depth: int) -> Tiles | None:
    """Return the variant whose threadgroups divide the depth; None if another one is faster."""
    if width > MAX_NARROW or rows == 1 or _are_few(form, rows):
        return None
    spans = depth // form.scale_span
    fitting = (
        variant for limit, variant in SPLIT_TILES if rows <= limit and spans >= 2 * variant.splits
    )
    return next(fitting, None)


def _are_few(form: Format, rows: int) -> bool:
    """True if ``rows.cu`` is the fastest for so many rows of x, unless these are one."""
    return rows <= FEW and form.packing.bits == FEW_BITS


def vectors_for(form: Format, rows: int, depth: int) -> Vectors | None:
    """Return the variant of ``vectors.cu`` for so many rows of x; None if there is none."""
    if rows != 1:
        return None
    variant = Vectors(depth, warps=8, ahead=form.packing.bits, resident=2)
    return variant if variant.residency(form).shared_bytes <= MAX_SHARED else None
