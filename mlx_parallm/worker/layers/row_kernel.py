"""The linear kernel: a few rows against one or several weights, on an NVIDIA GPU.

MLX hands a product of 2 rows or more to cuBLASLt, by a stream capture that takes the host 10 to
16 µs. This kernel is launched like any other, in 2 µs. That matters where the device needs less
time than the capture (``docs/decisions/013-linear-layers-of-rows.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.attention.kernel_pool import argument_dtype
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.device.kernel_trial import cuda_report, largest_error, why_off
from mlx_parallm.worker.device.kernels import KernelReport

# TILE: the kernel multiplies by 8 rows at a time and keeps the sums of each in registers.
TILE = 8
MAX_ROWS = 32
MAX_OUTPUTS = 3
# MAX_ERROR is in parts of the largest value: 16-bit products are rounded to 8 bits or more.
MAX_ERROR = 0.02
# MAX_BYTES: larger weights take the device longer than a call of cuBLAS takes the host.
MAX_BYTES = 24 << 20
# REPORT_SHAPE is the shape ``[N, K]`` of the weight that ``linear_report`` tests.
REPORT_SHAPE = (1024, 1024)
DTYPES = (mx.bfloat16, mx.float16)
# WARP is the number of threads in a warp, and WARPS that of warps in a threadgroup.
WARP = 32
WARPS = 8
# PANEL: a threadgroup takes one or two panels, each of 16 rows of the weight.
PANEL = 16
# CHUNK: a warp takes 32 numbers of a row at once.
CHUNK = 32


def linear_report() -> KernelReport:
    """Test the kernel on the default device, if it has a kernel."""
    weight = mx.random.normal(REPORT_SHAPE, mx.bfloat16, key=mx.random.key(0))
    return cuda_report(lambda language: why_not(RowKernel(language), weight, [REPORT_SHAPE[0]]))


def why_not(kernel: RowKernel, weight: mx.array, widths: Sequence[int]) -> str | None:
    """Return why the kernel is not to be used for a weight; None if it agrees with MLX.

    Args:
        kernel: the kernel on the device that it will run on.
        weight: layers' weights one after the other, ``[N, K]``.
        widths: the output widths of these layers, N in all.
    """
    reason = why_unsupported([weight], len(widths))
    return reason or why_off(lambda: kernel_error(kernel, weight, widths), MAX_ERROR)


def why_unsupported(weights: Sequence[mx.array], num_outputs: int) -> str | None:
    """Return why the kernel does not take these weights as one product; None if it does."""
    dtype, length = weights[0].dtype, weights[0].shape[1]
    num_bytes = sum(weight.nbytes for weight in weights)
    if dtype not in DTYPES:
        return f"weights of {dtype}"
    if num_bytes > MAX_BYTES:
        return f"{num_bytes} bytes: cuBLAS reads them faster"
    if num_outputs > MAX_OUTPUTS:
        return f"{num_outputs} weights at once"
    if length % CHUNK:
        return f"rows of {length} numbers"
    return None


def kernel_error(kernel: RowKernel, weight: mx.array, widths: Sequence[int]) -> float:
    """Return the largest difference from MLX's own product, in parts of the largest value."""
    worst = 0.0
    for rows in (TILE, MAX_ROWS):
        x = mx.random.normal((rows, 1, weight.shape[1]), weight.dtype, key=mx.random.key(rows))
        actual = mx.concatenate(kernel(x, weight, widths), axis=-1)[:, 0]
        worst = max(worst, largest_error(actual, x[:, 0] @ weight.T))
    return worst


class RowKernel:
    """The linear kernel; each variant is compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build the kernel in ``language``: CUDA's, or a test's stand-in for it."""
        self._builder = KernelBuilder(language, TEXTS, "paged", argument_dtype)
        self._kernels: dict[tuple[mx.Dtype, int, bool], Kernel] = {}
        self._ends: dict[tuple[int, ...], mx.array] = {}

    def __call__(self, x: mx.array, weight: mx.array, widths: Sequence[int]) -> list[mx.array]:
        """Return the products of x and each layer's part of the weight, ``[T, 1, width]`` each.

        Args:
            x: T rows, ``[T, 1, K]`` with T at most ``MAX_ROWS``.
            weight: layers' weights one after the other, ``[N, K]``.
            widths: the output widths of these layers, N in all.
        """
        rows = x.shape[0]
        is_small = rows <= TILE
        columns = PANEL * _panels(is_small)
        return self._kernel(weight.dtype, len(widths), is_small)(
            inputs=[x, self._ends_of(tuple(widths)), weight],
            output_shapes=[(rows, 1, width) for width in widths],
            output_dtypes=[weight.dtype] * len(widths),
            grid=(-(-weight.shape[0] // columns) * WARPS * WARP, 1, 1),
            threadgroup=(WARPS * WARP, 1, 1),
        )

    def begin(self, dtype: mx.Dtype, num_outputs: int) -> None:
        """Begin to compile the variants for so many outputs, in the background if possible."""
        for is_small in (True, False):
            self._kernel(dtype, num_outputs, is_small)

    def _kernel(self, dtype: mx.Dtype, num_outputs: int, is_small: bool) -> Kernel:
        key = (dtype, num_outputs, is_small)
        if key not in self._kernels:
            self._kernels[key] = self._build(*key)
        return self._kernels[key]

    def _build(self, dtype: mx.Dtype, num_outputs: int, is_small: bool) -> Kernel:
        panels = _panels(is_small)
        constants: dict[str, Constant] = {
            "T": dtype,
            "OUTPUTS": num_outputs,
            "EXPERTS": 0,
            "TILES": 1 if is_small else MAX_ROWS // TILE,
            "PANELS": panels,
            "WARPS": WARPS,
            # AHEAD is the number of loads in flight, as many as fit the registers.
            "AHEAD": 4 // panels,
        }
        spec = KernelSpec(
            "tensor_cores/linear.cu",
            ("x", "ends", "weight"),
            tuple(f"output{i}" for i in range(num_outputs)),
            headers=("common.metal", "tensor_cores/tensor.cu"),
        )
        return self._builder.kernel(spec, constants)

    def _ends_of(self, widths: tuple[int, ...]) -> mx.array:
        """Return the number of the column after each output's last, int32."""
        if widths not in self._ends:
            self._ends[widths] = mx.cumsum(mx.array(widths, mx.int32))
            mx.eval(self._ends[widths])
        return self._ends[widths]


def _panels(is_small: bool) -> int:
    return 1 if is_small else 2
