"""The texts of kernels of packed weights as C++."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.models.activations import swiglu

from benchmarks.gpu.check_packed import is_same_compiled
from mlx_parallm.worker.layers.packed import PackedProducts
from mlx_parallm.worker.layers.packed_kernel import PackedKernels, why_not
from mlx_parallm.worker.layers.packing import MXFP4, Packing
from mlx_parallm.worker.layers.product_variants import (
    FEW_BITS,
    FOR_128_SUMS,
    GATES,
    MAX_NARROW,
    NOTHING,
    SLAB,
    Around,
    Format,
    Rows,
    Tiles,
    Variant,
    Vectors,
    split_variant_for,
    variant_for,
)
from tests.kernels.mutation import passes_in_every_order
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS, KernelError
from tests.kernels.tensor_shim import CountedShim, TensorShim

Q4, Q8, FP4 = Packing(4, 64), Packing(8, 64), Packing(4, 32, MXFP4)
FORMATS = (
    *((packing, dtype) for packing in (Q4, Q8) for dtype in (mx.bfloat16, mx.float16)),
    (Packing(4, 32), mx.bfloat16),
    (Packing(8, 128), mx.bfloat16),
    (FP4, mx.bfloat16),
)


def packed(packing: Packing, dtype: mx.Dtype, width: int, depth: int) -> list[mx.array]:
    weight = mx.random.normal((width, depth), dtype, key=mx.random.key(1))
    return packing.packed(weight)


def error(
    shim: TensorShim,
    packing: Packing,
    dtype: mx.Dtype,
    variant: Variant,
    rows: int,
    width: int,
    depth: int,
    around: Around = NOTHING,
) -> float:
    """Return the largest error as a share of the largest value."""
    x = mx.random.normal((rows, 1, depth), dtype, key=mx.random.key(2))
    arrays = packed(packing, dtype, width, depth)
    actual = PackedKernels(shim).product(x, arrays, packing, variant, around)
    if isinstance(variant, Tiles) and variant.splits > 1:
        assert actual.dtype == mx.float32
        actual = actual.sum(axis=0).astype(dtype)
    assert actual.shape == (rows, 1, width // 2 if around.gates else width)
    assert actual.dtype == dtype
    wanted = x.astype(mx.float32) @ packing.unpacked(arrays, mx.float32).T
    if around.gates:
        wanted = swiglu(*mx.split(wanted, 2, axis=-1))
    return float(mx.abs(actual - wanted).max() / mx.abs(wanted).max())


DIVIDING = Tiles(rows=256, wide=64, slabs=1, stages=3, registers=FOR_128_SUMS, divides=True)
CASES: tuple[tuple[Variant, int, int, int], ...] = (
    (Rows(wide=32, warps=2, span=1024, stages=2), 3, 40, 3072),  # stages are used again
    (Rows(wide=16, warps=4, span=2048, stages=1), 8, 8, 1024),  # fewer numbers than a span has
    (Tiles(rows=16, wide=64, slabs=1, stages=4), 5, 72, 1024),
    (Tiles(rows=32, wide=128, slabs=2, stages=4), 40, 72, 1024),  # two threadgroups of rows
    # A warpgroup has two tiles of rows.
    (Tiles(rows=256, wide=64, slabs=2, stages=3, registers=FOR_128_SUMS), 130, 67, 1024),
    (Rows(wide=16, warps=4, span=2048, stages=1), 3, 9, 1024),
    (Tiles(rows=16, wide=64, slabs=1, stages=4), 5, 71, 1024),  # as a vocabulary may be
    (Tiles(rows=64, wide=192, slabs=1, stages=4), 40, 200, 1024),  # x is no whole turns
    (Tiles(rows=16, wide=64, slabs=1, stages=4, splits=3), 11, 72, 4096),
    # Two threadgroups have three tiles each.
    (Tiles(rows=16, wide=64, slabs=1, stages=4), 40, 72, 3072),
    (Tiles(rows=256, wide=64, slabs=1, stages=3, registers=FOR_128_SUMS), 200, 40, 1024),
    (Tiles(rows=256, wide=64, slabs=1, stages=3, splits=2), 260, 67, 2048),
    # Two threadgroups divide the depth of one tile, of the last one of three, and of none of four.
    (DIVIDING, 200, 40, 1024),
    (DIVIDING, 131, 135, 2048),
    (DIVIDING, 300, 68, 1024),
    (Vectors(depth=3072, warps=2, ahead=4, resident=1), 1, 72, 3072),
    (Vectors(depth=1024, warps=4, ahead=16, resident=1), 1, 71, 1024),
)


@pytest.mark.parametrize(
    ("packing", "dtype", "variant", "rows", "width", "depth"),
    [
        (*form, *case)
        for form in FORMATS
        for case in CASES
        if form[0].bits == FEW_BITS or not isinstance(case[0], Rows)
    ],
    ids=str,
)
def test_products_are_right(
    packing: Packing,
    dtype: mx.Dtype,
    variant: Variant,
    rows: int,
    width: int,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_compiler()
    # Threadgroups of ``vectors.cu`` take several panels where there are more than these.
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.PROCESSORS", 2)
    shim = TensorShim()
    shim.order = (rows + packing.bits) % len(ORDERS)
    assert error(shim, packing, dtype, variant, rows, width, depth) < 0.01


@pytest.mark.parametrize(
    ("packing", "variant", "rows", "width"),
    [
        # Halves of a threadgroup's rows and less, even and odd, and more than one threadgroup.
        *((Q4, Rows(wide=16, warps=4, span=1024, stages=1), 3, width) for width in (16, 18, 12)),
        *((Q8, Tiles(rows=16, wide=64, slabs=2, stages=4), 11, width) for width in (64, 66, 24)),
        (FP4, Tiles(rows=16, wide=64, slabs=4, stages=4), 16, 130),
        (Q4, Tiles(rows=64, wide=192, slabs=1, stages=4), 40, 386),
        (Q8, Tiles(rows=256, wide=64, slabs=2, stages=3, registers=FOR_128_SUMS), 257, 70),
        (Q8, Tiles(rows=256, wide=64, slabs=1, stages=3, registers=FOR_128_SUMS), 140, 146),
        (Q8, Tiles(rows=16, wide=64, slabs=1, stages=4, divides=True), 11, 146),
    ],
    ids=str,
)
def test_gates_are_right(
    packing: Packing,
    variant: Rows | Tiles,
    rows: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_compiler()
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.PROCESSORS", 2)
    shim = TensorShim()
    shim.order = (rows + width) % len(ORDERS)
    # Both factors are rounded, and their product is.
    assert error(shim, packing, mx.bfloat16, variant, rows, width, 1024, GATES) < 0.02


@pytest.mark.parametrize(
    ("packing", "limit"),
    [
        (Packing(4, 32), 32),
        *(
            pytest.param(packing, limit, marks=pytest.mark.slow)
            for packing in (*map(Packing, (4, 8) * 3, (32, 64, 128) * 2), FP4)
            for limit in (32, 128)
        ),
    ],
    ids=str,
)
def test_scales_stay_while_their_chunks_are_multiplied(
    packing: Packing, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches end early and late, and room for the scales of one span less is too little."""
    require_compiler()
    form, ring = Format(packing, mx.bfloat16), Tiles.ring
    in_use = PackedKernels(TensorShim()).variants_of(form, 4096)
    variants = {each for _, each in in_use if isinstance(each, Tiles)}
    for variant in [each for each in variants if limit // 4 < each.rows <= limit]:
        chunks = (variant.stages + 2) * SLAB * variant.slabs
        spans = max(-(-chunks // form.scale_span), variant.ring(form) + 1) * variant.splits
        size = variant.rows - 1, 40, spans * form.scale_span

        def why_not(shim: TensorShim, variant: Tiles, size: tuple[int, int, int]) -> str | None:
            part = error(shim, packing, mx.bfloat16, variant, *size)
            return None if part < 0.01 else f"off by {part}"

        for fewer in (0, 1):
            shim = TensorShim()
            monkeypatch.setattr(Tiles, "ring", lambda *each, n=fewer: ring(*each) - n)
            is_right = passes_in_every_order(shim, partial(why_not, shim, variant, size))
            assert is_right == (fewer == 0), variant
        monkeypatch.undo()


@pytest.mark.parametrize(("packing", "dtype"), FORMATS, ids=str)
def test_unpacked_weights_are_those_of_mlx(packing: Packing, dtype: mx.Dtype) -> None:
    require_compiler()
    # A threadgroup is not full.
    arrays = packed(packing, dtype, 9, 512)
    actual = PackedKernels(TensorShim()).unpacked(arrays, packing, dtype)
    wanted = packing.unpacked(arrays, mx.float32)
    assert actual.dtype == dtype
    assert mx.abs(actual - wanted).max() <= 0.01 * mx.abs(wanted).max()


SMALL: dict[str, tuple[Variant, int, int, int]] = {
    "rows": (Rows(wide=16, warps=2, span=512, stages=2), 2, 16, 2560),
    # Two tiles, whose scales are in other parts of the ring. The weight has fewer rows.
    "tiles": (Tiles(rows=16, wide=64, slabs=1, stages=5), 16, 120, 1536),
    # The last of eight chunks is in the first of seven stages, where sums are written too.
    "slabs": (Tiles(rows=16, wide=64, slabs=2, stages=7), 16, 56, 1024),
    # Two threadgroups have a tile and half of one each.
    "divided": (Tiles(rows=16, wide=64, slabs=1, stages=5, divides=True), 16, 168, 2048),
    # A warp loads numbers of the next chunk ahead.
    "ahead": (Tiles(rows=256, wide=64, slabs=1, stages=4), 16, 120, 1536),
    # Six warps have four of ten chunks, two at a time, and three panels.
    "vectors": (Vectors(depth=5120, warps=3, ahead=8, resident=1), 1, 40, 5120),
}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("rows", "__syncthreads();\nif (span + STAGES", "if (span + STAGES"),
        ("rows", "__syncthreads();\nfor (int i = threadIdx.x", "for (int i = threadIdx.x"),
        ("rows", "announce(arrival, WIDE *", "announce(arrival, 15 *"),
        ("rows", "span / STAGES % 2", "0"),
        ("rows", "min(first + row % OWN, width - 1)", "min(first + row + 1, width - 1)"),
        ("tiles", "await_arrival(&arrivals[stage_index], parity);\n}\n#pragma", "}\n#pragma"),
        ("tiles", "await_arrival(&rooms[stage_index], parity);", ""),
        ("tiles", "open_arrival(&arrivals[s], LOADERS / 32);", "open_arrival(&arrivals[s], 1);"),
        ("tiles", "open_arrival(&rooms[s], MULTIPLIERS / 32);", "open_arrival(&rooms[s], 3);"),
        ("tiles", "{\nawait_fetches<LAG>();\nannounce", "{\nawait_fetches<LAG + 1>();\nannounce"),
        ("tiles", "close_fetches();\nawait_fetches<LAG>();", "await_fetches<LAG>();"),
        ("tiles", "publish();\n__syncwarp();", "publish();"),
        ("tiles", "publish();\n__syncwarp();", "__syncwarp();"),
        ("tiles", "if (half == 1) {\n__sync", "if (half == 0) {\n__sync"),
        ("tiles", "min(item.first + row, width - 1)", "item.first + row"),
        ("tiles", "await_tiles<1>();", "await_tiles<2>();"),
        ("tiles", "await_sums(sums);", ""),
        ("tiles", "chunks > 0 && lane == 0", "false"),
        ("tiles", "(first_ring + item.spans) % RING", "first_ring"),
        ("tiles", "sums[j] = 0.0f;", "if (i == blockIdx.x) sums[j] = 0.0f;"),
        ("tiles", "load_groups(c, half);", "load_groups(0, half);"),
        ("ahead", "await_arrival(&arrivals[stage_index], parity);\n#pragma", "#pragma"),
        ("ahead", "load_chunk(c + 1)", "load_chunk(c)"),
        ("ahead", "await_tiles<1>();", "await_tiles<2>();"),
        ("slabs", "meet<MULTIPLIERS>();\n#pragma", "#pragma"),
        ("slabs", "meet<MULTIPLIERS>();\nfor (int k", "for (int k"),
        ("divided", "await_threadgroups<MULTIPLIERS>(arrivals_pool + item.number, 1);", ""),
        ("divided", "arrive_threadgroup<MULTIPLIERS>", "(void)"),
        ("divided", "counts[threadIdx.x] = 0;", "counts[threadIdx.x] = 1;"),
        ("divided", "sums[j * 4 + n] +=", "sums[j * 4 + n] ="),
        ("divided", "half < 0 ? i - divided : whole + number", "half < 0 ? i - divided : number"),
        ("divided", "const int part = half < 0 ? split : half;", "const int part = 0;"),
        ("divided", "arrivals_pool + item.number, 1", "arrivals_pool + item.number, 2"),
        ("vectors", "}\n__syncthreads();\n#if MXFP4", "}\n#if MXFP4"),
        ("vectors", "}\n__syncthreads();\nconst int column", "}\nconst int column"),
        ("vectors", "(panel - begin) % 2 *", "0 *"),
        ("vectors", "is_last ? next_rows[1] : rows[1]", "rows[1]"),
        ("vectors", "sum - odd * (15.0f / 16.0f)", "sum"),
        ("vectors", "? own_x", "|| true ? own_x"),
    ],
)
def test_a_mistake_shows(
    name: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_compiler()
    processors = 2 if name == "divided" else 1
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.PROCESSORS", processors)
    shim = TensorShim()
    bodies: list[str] = []

    def mutate(_: str, body: str) -> str:
        if right in body:
            assert body.count(right) == 1
            bodies.append(body)
        return body.replace(right, wrong)

    def why_not() -> str | None:
        try:
            part = error(shim, Q4, mx.bfloat16, *SMALL[name])
        except KernelError as cause:
            return str(cause)
        return None if part < 0.01 else f"off by {part}"

    assert passes_in_every_order(shim, why_not)
    shim.mutate = mutate
    assert not passes_in_every_order(shim, why_not)
    assert len(set(bodies)) == 1


def test_each_launch_has_counts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # A compiled step merges equal arrays of zeros, but not the outputs of kernels.
    require_compiler()
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.PROCESSORS", 2)
    shim = CountedShim()
    kernels = PackedKernels(shim)
    variant, rows, *_ = SMALL["divided"]
    x = mx.random.normal((rows, 1, 1024), mx.bfloat16)
    # Three tiles for two threadgroups, and two.
    for width, count in ((168, 1), (168, 2), (128, 2)):
        kernels.product(x, packed(Q4, mx.bfloat16, width, 1024), Q4, variant)
        assert shim.counts["packed_zeros"] == count


def test_a_compiled_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU ``mx.compile`` stands in place of these functions.
    require_compiler()
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.PROCESSORS", 2)
    variant, rows, width, depth = SMALL["divided"]
    assert isinstance(variant, Tiles)
    kernels, sizes = PackedKernels(TensorShim()), (rows, width, depth)
    assert is_same_compiled(kernels, Q4, variant, sizes, lambda step: step)
    assert not is_same_compiled(kernels, Q4, variant, sizes, lambda step: lambda x: step(x)[::-1])


@pytest.mark.parametrize("packing", [Q4, Q8, FP4], ids=str)
def test_numbers_beyond_float16_are_multiplied(packing: Packing) -> None:
    """One row is multiplied in float16, whose range is smaller than that of bfloat16."""
    require_compiler()
    depth, arrays = 1024, packed(packing, mx.bfloat16, 24, 1024)
    sizes = mx.power(10.0, mx.repeat(mx.arange(-30, 34, 4), 64)).astype(mx.bfloat16)
    x = mx.random.normal((1, 1, depth), mx.bfloat16, key=mx.random.key(4))
    plain = packing.unpacked(arrays, mx.float32)
    # Spans of one size each, so that none hides another one's error.
    for first in range(0, depth, 64):
        part = mx.where((mx.arange(depth) - first) // 64 == 0, x * sizes, 0)
        actual = PackedKernels(TensorShim()).product(
            part, arrays, packing, Vectors(depth, warps=2, ahead=4, resident=1)
        )
        wanted = part.astype(mx.float32) @ plain.T
        assert mx.abs(actual - wanted).max() <= 0.01 * mx.abs(wanted).max()


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_what_is_no_number_stays_none(special: float) -> None:
    require_compiler()
    x = mx.ones((1, 1, 1024), mx.bfloat16)
    x[0, 0, 700] = special
    actual = PackedKernels(TensorShim()).product(
        x, packed(Q4, mx.bfloat16, 24, 1024), Q4, Vectors(1024, 2, 4, 1)
    )
    assert not mx.isfinite(actual).any()


@pytest.mark.parametrize(("packing", "dtype"), FORMATS, ids=str)
def test_variants_fit_a_processor_and_take_their_rows(packing: Packing, dtype: mx.Dtype) -> None:
    form = Format(packing, dtype)
    for _, variant in PackedKernels(TensorShim()).variants_of(form, 4096):
        residency = variant.residency(form)
        # Each threadgroup takes 1 KB more; a thread has at most 255 of 65,536 registers.
        assert residency.threadgroups * (residency.shared_bytes + 1024) <= 228 * 1024
        assert residency.threads * residency.threadgroups <= 1024
        if isinstance(variant, Tiles) and variant.registers is not None:
            # Threads take what others give: a threadgroup begins with equally many for each.
            each = 65536 // (residency.threads * residency.threadgroups) // 8 * 8
            multiplier, loader = variant.registers
            assert multiplier * (variant.threads - 128) + loader * 128 <= each * variant.threads
            assert (multiplier % 8, loader % 8) == (0, 0)
    for width in (4096, 24576):
        assert isinstance(variant_for(form, 1, width, 4096), Vectors)
        few = Rows if packing.bits == FEW_BITS else Tiles
        assert isinstance(variant_for(form, 2, width, 4096), few)
        # Rows that are too long for shared memory.
        assert isinstance(variant_for(form, 1, width, 1 << 16), few)
        assert isinstance(variant_for(form, 8, width, 4096), few)
        assert isinstance(variant_for(form, 9, width, 4096), Tiles)
        assert isinstance(variant_for(form, 512, width, 4096), Tiles)
        # Unpacking wide weights pays later, as their products compute SwiGLU.
        limit = 1024 if width > MAX_NARROW else 512
        assert isinstance(variant_for(form, limit, width, 4096), Tiles)
        assert variant_for(form, limit + 1, width, 4096) is None
    splits = split_variant_for(form, 32, 4096, 8192)
    assert splits is not None
    assert splits.splits > 1
    assert split_variant_for(form, 32, 24576, 8192) is None
    assert split_variant_for(form, 32, 4096, 2 * splits.splits * form.scale_span) is not None
    assert split_variant_for(form, 32, 4096, form.scale_span) is None
    assert split_variant_for(form, 1, 4096, 8192) is None
    assert (split_variant_for(form, 8, 4096, 8192) is None) == (packing.bits == FEW_BITS)
    assert split_variant_for(form, 513, 4096, 8192) is None
    # Fewer threadgroups divide a depth that does not suffice for more.
    splits = split_variant_for(form, 128, 4096, 4 * form.scale_span)
    assert splits is not None
    assert splits.splits == 2


def test_no_threads_take_registers_unless_the_compiler_knows_how_many_there_are() -> None:
    """Without their number, ptxas ignores setmaxnreg, and a launch needs too many registers."""
    require_compiler()
    shim, calls = TensorShim(), list[str]()
    kernels = PackedKernels(shim)
    form = Format(Q8, mx.bfloat16)
    variants = [each for _, each in kernels.variants_of(form, 4096)]
    assert any(isinstance(each, Tiles) and each.registers for each in variants)
    shim.states_threads = False
    for _, variant in kernels.variants_of(form, 4096):
        assert not isinstance(variant, Tiles) or variant.registers is None
    shim.mutate = lambda name, body: calls.append(name.rpartition("_")[0]) or body
    products = PackedProducts(Q8, 512, "cuda")
    products.kernels = kernels
    products(mx.zeros((130, 1, 512), mx.bfloat16), packed(Q8, mx.bfloat16, 24, 512))
    assert calls == ["packed_unpack"]


@pytest.mark.parametrize("shape", [(3, 1), (20, 1), (4, 5), (520, 1)], ids=str)
def test_products_of_layers_have_the_kernels(shape: tuple[int, int]) -> None:
    require_compiler()
    calls: list[str] = []
    shim = TensorShim()

    def note(name: str, body: str) -> str:
        calls.append(name.rpartition("_")[0])
        return body

    shim.mutate = note
    products = PackedProducts(Q4, 512, "cuda")
    products.kernels = PackedKernels(shim)
    arrays = packed(Q4, mx.bfloat16, 24, 512)
    rows = shape[0] * shape[1]
    x = mx.random.normal((*shape, 512), mx.bfloat16, key=mx.random.key(3))
    actual = products(x, arrays)
    wanted = x.astype(mx.float32) @ Q4.unpacked(arrays, mx.float32).T
    assert actual.shape == (*shape, 24)
    # The product of an unpacked weight adds in bfloat16 on a CPU.
    assert mx.abs(actual - wanted).max() <= (0.1 if rows > 512 else 0.01) * mx.abs(wanted).max()
    assert calls == [
        "packed_rows" if rows < 9 else "packed_tiles" if rows < 513 else "packed_unpack"
    ]


@pytest.mark.parametrize(
    ("packing", "dtype", "depth", "reason"),
    [
        (Packing(6, 64), mx.bfloat16, 512, "6 bits"),
        (Packing(4, 16, "nvfp4"), mx.bfloat16, 512, "nvfp4"),
        (Q4, mx.float32, 512, "float32"),
        (FP4, mx.float16, 512, "float16"),
        (Q4, mx.bfloat16, 576, "576"),
        (Packing(4, 32), mx.bfloat16, 192, "192"),
    ],
)
def test_what_the_kernels_do_not_take(
    packing: Packing, dtype: mx.Dtype, depth: int, reason: str
) -> None:
    actual = why_not(PackedKernels(TensorShim()), packing, dtype, depth)
    assert actual is not None
    assert reason in actual
