"""Times products of packed and of plain weights by rows, as a model's layers compute them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.worker.device.properties import backend_name, give_back_memory
from mlx_parallm.worker.layers.packed import PackedProducts
from mlx_parallm.worker.layers.packed_kernel import PackedKernels, why_not
from mlx_parallm.worker.layers.packing import MXFP4, Packing

#: ``ROWS``: those of steps with few and many requests.
ROWS = (1, 8, 32, 128)
# GPU_SHAPE, CPU_SHAPE: weights ``[N, K]``; the larger one is in no GPU's cache.
GPU_SHAPE, CPU_SHAPE = (16384, 4096), (1024, 1024)
# GPU_PRODUCTS, CPU_PRODUCTS: products in a row. The fastest of NUM_ROUNDS counts.
GPU_PRODUCTS, CPU_PRODUCTS = 8, 1
NUM_ROUNDS = 3
DTYPE = mx.bfloat16
#: ``PACKINGS`` that are timed, by name.
PACKINGS = {
    "4-bit": Packing(4, 64),
    "8-bit": Packing(8, 64),
    "mxfp4": Packing(4, 32, MXFP4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """The times of products of one kind of weight.

    Attributes:
        weights: the weight's dtype or packing.
        us: microseconds of a product, by the number of rows.
        has_kernels: True if this project's kernels multiply.
    """

    weights: str
    us: dict[int, float]
    has_kernels: bool = False


def time_products() -> tuple[ProductTimes, ...]:
    """Return the times of bfloat16 weights, of float32 ones on a CPU, and of packed ones."""
    backend = backend_name()
    width, depth = CPU_SHAPE if backend == "cpu" else GPU_SHAPE
    weight = mx.random.normal((width, depth), DTYPE, key=mx.random.key(0))
    times = [_times("bfloat16", DTYPE, depth, lambda x: x @ weight.T)]
    if backend == "cpu":
        exact = weight.astype(mx.float32)
        times.append(_times("float32", mx.float32, depth, lambda x: x @ exact.T))
    for name, packing in PACKINGS.items():
        arrays = packing.packed(weight)
        mx.eval(arrays)
        products = PackedProducts(packing, depth, backend)
        if backend == "cuda":
            kernels = PackedKernels(CudaLanguage())
            products.kernels = None if why_not(kernels, packing, DTYPE, depth) else kernels
        has_kernels = products.kernels is not None

        def product(
            x: mx.array,
            products: PackedProducts = products,
            arrays: tuple[mx.array, ...] = tuple(arrays),
        ) -> mx.array:
            return products(x, arrays)

        times.append(_times(name, DTYPE, depth, product, has_kernels=has_kernels))
    give_back_memory()
    return tuple(times)


def _times(
    weights: str,
    dtype: mx.Dtype,
    depth: int,
    product: Callable[[mx.array], mx.array],
    *,
    has_kernels: bool = False,
) -> ProductTimes:
    count = CPU_PRODUCTS if backend_name() == "cpu" else GPU_PRODUCTS
    us: dict[int, float] = {}
    for rows in ROWS:
        inputs = [
            mx.random.normal((rows, depth), dtype, key=mx.random.key(i)) for i in range(count)
        ]
        mx.eval(inputs)
        best = float("inf")
        # The first round compiles and does not count.
        for turn in range(1 + NUM_ROUNDS):
            start_s = time.perf_counter()
            mx.eval([product(x) for x in inputs])
            if turn:
                best = min(best, time.perf_counter() - start_s)
        us[rows] = round(best / count * 1e6, 1)
    return ProductTimes(weights=weights, us=us, has_kernels=has_kernels)
