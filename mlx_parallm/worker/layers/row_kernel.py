"""The linear kernel: a few rows against one or several weights, on an NVIDIA GPU.

MLX hands a product of 2 rows or more to cuBLASLt, by a stream capture that takes the host 10 to
16 µs. This one is launched like any other kernel, in 2 µs, which matters where the device needs
less than that (``docs/decisions/013-linear-layers-of-rows.md``).
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

# The kernel multiplies by 8 rows at a time, of each of which it keeps sums in registers.
TILE = 8
MAX_ROWS = 32
MAX_OUTPUTS = 3
# Of the largest value: products of 16-bit numbers are rounded to 8 bits or more.
MAX_ERROR = 0.02
# Larger ones take the device longer than a call of cuBLAS takes the host.
MAX_BYTES = 24 << 20
# Of the weight that a report is about.
REPORT_SHAPE = (1024, 1024)
DTYPES = (mx.bfloat16, mx.float16)
WARP = 32
# Of a threadgroup, and how much of the weight they take: 16 rows for each panel.
WARPS = 8
PANEL = 16
# Numbers of a row that a warp takes at once.
CHUNK = 32


def linear_report() -> KernelReport:
    """Test the kernel of the default device, if it has one."""
    weight = mx.random.normal(REPORT_SHAPE, mx.bfloat16, key=mx.random.key(0))
    return cuda_report(lambda language: why_not(RowKernel(language), weight, [REPORT_SHAPE[0]]))


def why_not(kernel: RowKernel, weight: mx.array, widths: Sequence[int]) -> str | None:
    """Why the kernel is not to be used for a weight; None if it agrees with MLX.

    Args:
        kernel: on the device it will run on.
        weight: ``[N, K]``.
        widths: of the weights that it consists of, one after the other.
    """
    reason = why_unsupported([weight], len(widths))
    return reason or why_off(lambda: kernel_error(kernel, weight, widths), MAX_ERROR)


def why_unsupported(weights: Sequence[mx.array], num_outputs: int) -> str | None:
    """Return why the kernel is not for weights that lie one after the other; None if it is."""
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
    """Largest difference from MLX's own product, in parts of the largest value."""
    worst = 0.0
    for rows in (TILE, MAX_ROWS):
        x = mx.random.normal((rows, 1, weight.shape[1]), weight.dtype, key=mx.random.key(rows))
        found = mx.concatenate(kernel(x, weight, widths), axis=-1)[:, 0]
        worst = max(worst, largest_error(found, x[:, 0] @ weight.T))
    return worst


class RowKernel:
    """The kernel in its variants, each compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """``language`` is CUDA's, or one that stands for it."""
        self._builder = KernelBuilder(language, TEXTS, "paged", argument_dtype)
        self._made: dict[tuple[mx.Dtype, int, bool], Kernel] = {}
        self._ends: dict[tuple[int, ...], mx.array] = {}

    def __call__(self, x: mx.array, weight: mx.array, widths: Sequence[int]) -> list[mx.array]:
        """Products of x, ``[T, 1, K]`` with T up to ``MAX_ROWS``: one ``[T, 1, width]`` each.

        ``weight`` is ``[N, K]``, and ``widths`` sum up to N.
        """
        rows = x.shape[0]
        is_small = rows <= TILE
        columns = PANEL * _panels(is_small)
        return self._kernel(weight.dtype, len(widths), is_small)(
            inputs=[x, self._ends_of(tuple(widths)), weight],
            output_shapes=[(rows, 1, one) for one in widths],
            output_dtypes=[weight.dtype] * len(widths),
            grid=(-(-weight.shape[0] // columns) * WARPS * WARP, 1, 1),
            threadgroup=(WARPS * WARP, 1, 1),
        )

    def begin(self, dtype: mx.Dtype, num_outputs: int) -> None:
        """Begin to compile what so many weights need, in the background where that is possible."""
        for is_small in (True, False):
            self._kernel(dtype, num_outputs, is_small)

    def _kernel(self, dtype: mx.Dtype, num_outputs: int, is_small: bool) -> Kernel:
        key = (dtype, num_outputs, is_small)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, dtype: mx.Dtype, num_outputs: int, is_small: bool) -> Kernel:
        panels = _panels(is_small)
        constants: dict[str, Constant] = {
            "T": dtype,
            "OUTPUTS": num_outputs,
            "EXPERTS": 0,
            "TILES": 1 if is_small else MAX_ROWS // TILE,
            "PANELS": panels,
            "WARPS": WARPS,
            # Loads in flight, as many as fit the registers.
            "AHEAD": 4 // panels,
        }
        spec = KernelSpec(
            "tensor_cores/linear",
            ("x", "ends", "weight"),
            tuple(f"output{i}" for i in range(num_outputs)),
            headers=("common", "tensor_cores/tensor"),
        )
        return self._builder.kernel(spec, constants)

    def _ends_of(self, widths: tuple[int, ...]) -> mx.array:
        if widths not in self._ends:
            self._ends[widths] = mx.cumsum(mx.array(widths, mx.int32))
            mx.eval(self._ends[widths])
        return self._ends[widths]


def _panels(is_small: bool) -> int:
    return 1 if is_small else 2
