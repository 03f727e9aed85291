"""The texts of kernels of packed weights as C++."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_parallm.worker.layers.packed import PackedProducts
from mlx_parallm.worker.layers.packed_kernel import (
    Format,
    PackedKernels,
    Rows,
    Tiles,
    variant_for,
    variants_of,
    why_not,
)
from mlx_parallm.worker.layers.packing import MXFP4, Packing
from tests.kernels.mutation import passes_in_every_order
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS, KernelError
from tests.kernels.tensor_shim import TensorShim

Q4, Q8, FP4 = Packing(4, 64), Packing(8, 64), Packing(4, 32, MXFP4)
FORMATS = (
    *((packing, dtype) for packing in (Q4, Q8) for dtype in (mx.bfloat16, mx.float16)),
    (Packing(4, 32), mx.bfloat16),
    (Packing(8, 128), mx.bfloat16),
    (FP4, mx.bfloat16),
)


def packed(packing: Packing, dtype: mx.Dtype, width: int, depth: int) -> list[mx.array]:
    weight = mx.random.normal((width, depth), dtype, key=mx.random.key(1))
    return list(mx.quantize(weight, packing.group_size, packing.bits, packing.mode))


def error(
    shim: TensorShim,
    packing: Packing,
    dtype: mx.Dtype,
    variant: Rows | Tiles,
    rows: int,
    width: int,
    depth: int,
) -> float:
    """Return the largest error as a share of the largest value."""
    x = mx.random.normal((rows, 1, depth), dtype, key=mx.random.key(2))
    arrays = packed(packing, dtype, width, depth)
    actual = PackedKernels(shim).product(x, arrays, packing, variant)
    assert actual.shape == (rows, 1, width)
    assert actual.dtype == dtype
    wanted = x.astype(mx.float32) @ packing.unpacked(arrays, mx.float32).T
    return float(mx.abs(actual - wanted).max() / mx.abs(wanted).max())


@pytest.mark.parametrize(("packing", "dtype"), FORMATS, ids=str)
@pytest.mark.parametrize(
    ("variant", "rows", "width", "depth"),
    [
        (Rows(wide=32, warps=2, span=1024, stages=2), 3, 40, 3072),  # stages are used again
        (Rows(wide=16, warps=4, span=2048, stages=1), 8, 8, 1024),  # fewer numbers than a span has
        (Tiles(rows=16, wide=64, slabs=1, stages=4), 5, 72, 1024),
        (Tiles(rows=32, wide=128, slabs=2, stages=4), 40, 72, 1024),  # two tiles of rows
        (Rows(wide=16, warps=4, span=2048, stages=1), 3, 9, 1024),
        (Tiles(rows=16, wide=64, slabs=1, stages=4), 5, 71, 1024),  # as a vocabulary may be
    ],
    ids=str,
)
def test_products_are_right(
    packing: Packing, dtype: mx.Dtype, variant: Rows | Tiles, rows: int, width: int, depth: int
) -> None:
    require_compiler()
    shim = TensorShim()
    shim.order = (rows + packing.bits) % len(ORDERS)
    assert error(shim, packing, dtype, variant, rows, width, depth) < 0.01


@pytest.mark.parametrize(("packing", "dtype"), FORMATS, ids=str)
def test_unpacked_weights_are_those_of_mlx(packing: Packing, dtype: mx.Dtype) -> None:
    require_compiler()
    arrays = packed(packing, dtype, 8, 512)
    actual = PackedKernels(TensorShim()).unpacked(arrays, packing, dtype)
    wanted = packing.unpacked(arrays, mx.float32)
    assert actual.dtype == dtype
    assert mx.abs(actual - wanted).max() <= 0.01 * mx.abs(wanted).max()


SMALL: dict[str, tuple[Rows | Tiles, int, int, int]] = {
    "rows": (Rows(wide=16, warps=2, span=512, stages=2), 2, 16, 2560),
    # The last of 16 chunks is in the first of 5 stages, where sums are written too.
    "tiles": (Tiles(rows=16, wide=64, slabs=1, stages=5), 16, 64, 1024),
}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("rows", "__syncthreads();\nif (span + STAGES", "if (span + STAGES"),
        ("rows", "__syncthreads();\nfor (int i = threadIdx.x", "for (int i = threadIdx.x"),
        ("rows", "announce(arrival, WIDE *", "announce(arrival, 15 *"),
        ("rows", "span / STAGES % 2", "0"),
        ("rows", "min(first + row, width - 1)", "min(first + row + 1, width - 1)"),
        ("tiles", "publish();\n__syncthreads();", "publish();"),
        ("tiles", "await_tiles<0>();\n__syncthreads();", "await_tiles<0>();"),
        ("tiles", "await_fetches<STAGES - 3>", "await_fetches<STAGES - 2>"),
        ("tiles", "await_tiles<1>();", "await_tiles<2>();"),
        ("tiles", "c < STAGES - 2; c++", "c < STAGES - 1; c++"),
    ],
)
def test_a_mistake_shows(name: str, right: str, wrong: str) -> None:
    require_compiler()
    shim = TensorShim()
    bodies: list[str] = []

    def mutate(_: str, body: str) -> str:
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
    assert bodies


@pytest.mark.parametrize(("packing", "dtype"), FORMATS, ids=str)
def test_variants_fit_a_processor_and_take_their_rows(packing: Packing, dtype: mx.Dtype) -> None:
    form = Format(packing, dtype)
    for _, variant in variants_of(form):
        residency = variant.residency(form)
        # Each threadgroup takes 1 KB more; a thread has at most 255 of 65,536 registers.
        assert residency.threadgroups * (residency.shared_bytes + 1024) <= 228 * 1024
        assert residency.threads * residency.threadgroups <= 1024
    for width in (4096, 24576):
        assert isinstance(variant_for(form, 8, width), Rows)
        assert isinstance(variant_for(form, 9, width), Tiles)
        assert isinstance(variant_for(form, 512, width), Tiles)
        assert variant_for(form, 513, width) is None


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
