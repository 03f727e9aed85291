"""The linear kernel's text as C++, and the shapes that it does not take."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_parallm.kernels.kernel import kernel_text
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.layers.row_kernel import MAX_BYTES, MAX_ROWS, RowKernel, why_not
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS
from tests.kernels.tensor_shim import TensorShim


def error(
    kernel: RowKernel, rows: int, depth: int, widths: Sequence[int], dtype: mx.Dtype
) -> float:
    """Return the largest error as a share of the largest value; check the shapes."""
    x = mx.random.normal((rows, 1, depth), dtype, key=mx.random.key(1))
    weight = mx.random.normal((sum(widths), depth), dtype, key=mx.random.key(2))
    actual = kernel(x, weight, widths)
    assert [output.shape for output in actual] == [(rows, 1, width) for width in widths]
    wanted = x[:, 0].astype(mx.float32) @ weight.astype(mx.float32).T
    joined = mx.concatenate(actual, axis=-1)[:, 0]
    return float(mx.abs(joined - wanted).max() / mx.abs(wanted).max())


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "depth", "widths"),
    [
        (1, 32, [16]),
        (3, 96, [5]),  # fewer rows of the weight than a threadgroup takes
        (8, 64, [16, 8, 8]),  # an output begins within a threadgroup
        (9, 288, [24, 24]),  # more chunks than warps
        (MAX_ROWS, 1088, [40]),  # more chunks than are loaded at once
    ],
)
def test_products_are_right_in_every_order(
    rows: int, depth: int, widths: list[int], dtype: mx.Dtype
) -> None:
    require_compiler()
    shim = TensorShim()
    for shim.order in ORDERS:
        assert error(RowKernel(shim), rows, depth, widths, dtype) < 0.01


def test_the_barrier_is_needed() -> None:
    require_compiler()
    shim = TensorShim()
    shim.mutate = lambda _, body: body.replace("__syncthreads();", "")
    errors = []
    for shim.order in ORDERS:
        errors.append(error(RowKernel(shim), 8, 512, [16], mx.bfloat16))
    assert not max(errors) < 0.01


def test_a_wrong_kernel_is_not_used() -> None:
    require_compiler()
    weight = mx.random.normal((24, 64), mx.bfloat16)
    assert why_not(RowKernel(TensorShim()), weight, [24]) is None
    shim = TensorShim()
    shim.mutate = lambda _, body: body.replace("at * 8", "0")
    reason = why_not(RowKernel(shim), weight, [24])
    assert reason is not None
    assert "off by" in reason


@pytest.mark.parametrize(
    ("weight", "widths", "reason"),
    [
        (mx.zeros((8, 64)), [8], "float32"),
        (mx.zeros((8, 40), mx.float16), [8], "40"),
        (mx.zeros((8, 64), mx.float16), [2, 2, 2, 2], "4 weights"),
        (mx.zeros((MAX_BYTES // 64 + 1, 32), mx.float16), [MAX_BYTES // 64 + 1], "faster"),
    ],
)
def test_what_it_does_not_serve(weight: mx.array, widths: list[int], reason: str) -> None:
    actual = why_not(RowKernel(TensorShim()), weight, widths)
    assert actual is not None
    assert reason in actual


@pytest.mark.parametrize("name", ["linear", "prefill"])
def test_the_texts_are_short_as_they_are_hashed_at_every_call(name: str) -> None:
    files = ("common.metal", "tensor_cores/tensor.cu", f"tensor_cores/{name}.cu")
    assert sum(len(kernel_text(TEXTS / file)) for file in files) < 10_000
