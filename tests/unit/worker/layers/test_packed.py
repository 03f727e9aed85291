"""Products of packed weights by all ways."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_parallm.worker.layers.packed import PackedProducts, unpacked_on_cpu
from mlx_parallm.worker.layers.packing import MXFP4, Packing

PACKINGS = (
    *(Packing(bits, size) for bits in (4, 8) for size in (32, 64, 128)),
    Packing(6, 64),
    Packing(4, 32, MXFP4),
    Packing(8, 32, "mxfp8"),
    Packing(4, 16, "nvfp4"),
)
BACKENDS = ("cpu", "cuda", "metal")
WIDTH, DEPTH = 48, 256


def packed(packing: Packing, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    weight = mx.random.normal((WIDTH, DEPTH), dtype, key=mx.random.key(0))
    return packing.packed(weight)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_unpacked_numbers_are_those_of_mlx(packing: Packing) -> None:
    arrays = packed(packing)
    wanted = packing.unpacked(arrays, mx.float32)
    assert mx.array_equal(unpacked_on_cpu(arrays, packing), wanted)


def test_all_numbers_and_scales_of_mxfp4_are_unpacked() -> None:
    numbers = mx.arange(16, dtype=mx.uint32)
    words = numbers | numbers[::-1] << 4
    weight = mx.repeat(words * 0x1010101, 4).reshape(16, 4)
    packing = Packing(4, 32, MXFP4)
    for scale in (1, 2, 64, 127, 128, 251):
        arrays = [weight, mx.full((16, 1), scale, mx.uint8)]
        wanted = packing.unpacked(arrays, mx.float32)
        assert mx.array_equal(unpacked_on_cpu(arrays, packing), wanted), scale


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_products_are_right_for_any_number_of_rows(
    backend: str, packing: Packing, dtype: mx.Dtype
) -> None:
    arrays = packed(packing, dtype)
    weight = packing.unpacked(arrays, mx.float32)
    products = PackedProducts(packing, DEPTH, backend)
    for shape in ((1, 1), (2, 1), (1, 24), (3, 7), (600, 1)):
        x = mx.random.normal((*shape, DEPTH), dtype, key=mx.random.key(1))
        actual = products(x, arrays)
        wanted = x.astype(mx.float32) @ weight.T
        assert actual.shape == wanted.shape
        assert actual.dtype == dtype
        error = mx.abs(actual - wanted).max() / mx.abs(wanted).max()
        # MLX's CPU backend adds in 16 bits, so ways for GPUs are less precise on it.
        limit = 1e-5 if dtype == mx.float32 else 1e-2 if backend == "cpu" else 0.1
        assert error < limit, shape


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_weight_is_unpacked_for_more_rows_than_the_limit(backend: str) -> None:
    packing = Packing(4, 64)
    products = PackedProducts(packing, DEPTH, backend)
    arrays = packed(packing)
    assert products.max_stock_rows is not None
    for rows, weight in (
        (products.max_stock_rows, None),
        (products.max_stock_rows + 1, packing.unpacked(arrays, mx.float32)),
    ):
        x = mx.random.normal((rows, DEPTH), key=mx.random.key(1))
        stock = packing.product(x, arrays)
        wanted = stock if weight is None else x @ weight.T
        assert mx.array_equal(products(x, arrays), wanted)
        assert not mx.array_equal(stock, x @ packing.unpacked(arrays, mx.float32).T)


def test_pieces_of_a_weight_are_unpacked_one_after_the_other() -> None:
    packing = Packing(4, 64)
    weight = mx.random.normal((4096, DEPTH), key=mx.random.key(0))
    arrays = list(mx.quantize(weight, packing.group_size, packing.bits))
    x = mx.random.normal((3, 1, DEPTH), key=mx.random.key(1))
    mx.eval(arrays, x)
    products = PackedProducts(packing, DEPTH, "cpu")
    outputs, peaks = [], []
    for products.piece_numbers in (weight.size, 100 * DEPTH):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        outputs.append(products(x, arrays))
        mx.eval(outputs[-1])
        peaks.append(mx.get_peak_memory() - before)
    assert mx.allclose(*outputs, atol=1e-4)
    assert peaks[1] < peaks[0] / 3
