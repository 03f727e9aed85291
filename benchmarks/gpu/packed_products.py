"""Times of the device for products of packed weights, by rows, beside plain ones.

``python -m benchmarks.gpu.packed_products [--rows 16 32 128]`` prints microseconds for each of the
four weights of a layer of 8B shape and for all of them, in bfloat16 and packed, with the variants
in use; gates are without SwiGLU. PyTorch's profiler records the kernels. There are several copies
of a weight, so that none is in the cache of the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks.gpu.step_profile import profiler
from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.process_setup.device_process import set_mlx_variables
from mlx_parallm.worker.layers.packed import PackedProducts
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from mlx_parallm.worker.layers.packing import MXFP4, Packing
from mlx_parallm.worker.layers.product_variants import Format

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
#: ``PACKINGS``: by the column of the table.
PACKINGS = {"4-bit": Packing(4, 64), "8-bit": Packing(8, 64), "MXFP4": Packing(4, 32, MXFP4)}
DTYPE = mx.bfloat16
TURNS = 3
#: ``Record`` runs a function and returns its events, see ``step_profile.profiler``.
Record = Callable[[Callable[[], Any]], tuple[list[dict[str, Any]], float]]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight ``[width, depth]`` of a layer.

    Attributes:
        copies: how many are more than the cache holds.
        is_added: True if the product is added to a residual, which may add parts of it.
    """

    width: int
    depth: int
    copies: int
    is_added: bool = False


WEIGHTS = {
    "qkv": Weight(6144, 4096, 4),
    "o": Weight(4096, 4096, 6, is_added=True),
    "gates": Weight(24576, 4096, 2),
    "down": Weight(4096, 12288, 3, is_added=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.packed_products", description=__doc__
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    set_mlx_variables()
    kernels, record = PackedKernels(CudaLanguage()), profiler()
    for packing in PACKINGS.values():
        for depth in {weight.depth for weight in WEIGHTS.values()}:
            kernels.begin(Format(packing, DTYPE), depth)
    times = {name: layer_times(kernels, record, name, args.rows) for name in WEIGHTS}
    print_table(times, args.rows)
    return 0


def layer_times(
    kernels: PackedKernels, record: Record, name: str, row_counts: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Return microseconds of a weight's products, by column of the table and rows."""
    weight = WEIGHTS[name]
    shape = weight.width, weight.depth
    plain = [mx.random.normal(shape, DTYPE, key=mx.random.key(i)) for i in range(weight.copies)]
    inputs = {rows: mx.random.normal((rows, 1, weight.depth), DTYPE) for rows in row_counts}
    times = {
        "bf16": {
            rows: device_us(record, [partial(_plain, x, each) for each in plain])
            for rows, x in inputs.items()
        }
    }
    for column, packing in PACKINGS.items():
        packed = [packing.packed(each) for each in plain]
        products = PackedProducts(packing, weight.depth, "cuda")
        products.kernels = kernels
        multiply = products.parts if weight.is_added else products
        times[column] = {
            rows: device_us(record, [partial(multiply, x, each) for each in packed])
            for rows, x in inputs.items()
        }
    return times


def device_us(record: Record, products: Sequence[Callable[[], mx.array]]) -> float:
    """Return microseconds of the device for one of these products, on average."""
    for product in products:
        mx.eval(product())

    def run() -> None:
        for _ in range(TURNS):
            for product in products:
                mx.eval(product())

    events, _ = record(run)
    busy = sum(event["dur"] for event in events if event.get("cat") == "kernel")
    return busy / (TURNS * len(products))


def _plain(x: mx.array, weight: mx.array) -> mx.array:
    return x[:, 0] @ weight.T


def print_table(times: dict[str, dict[str, dict[int, float]]], row_counts: Sequence[int]) -> None:
    """Print each weight's times, then their sums."""
    columns = ("bf16", *PACKINGS)
    print("weight  rows " + "".join(f"{column:>9}" for column in columns))
    for name in (*times, "all"):
        parts = list(times.values()) if name == "all" else [times[name]]
        for rows in row_counts:
            cells = [sum(part[column][rows] for part in parts) for column in columns]
            print(f"{name:7} {rows:4} " + "".join(f"{cell:9.1f}" for cell in cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
