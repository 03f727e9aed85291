"""The linear kernel for experts, where each row chose one of several weights, on an NVIDIA GPU.

Where each expert has few rows, MLX's grouped product of sorted rows takes some five times as long
as reading the experts' weights once. This kernel reads a chosen expert's weight once per 8 rows.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.attention.kernel_pool import argument_dtype
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.device.kernel_trial import KernelTrials, cuda_report, largest_error, why_off
from mlx_parallm.worker.device.kernels import KernelReport
from mlx_parallm.worker.layers.row_kernel import CHUNK, DTYPES, MAX_ERROR, PANEL, TILE, WARP, WARPS
from mlx_parallm.worker.layers.wrapped_calls import replace_class

# MAX_ROWS_EACH bounds the rows per expert, on average: with more, weights are read several times.
MAX_ROWS_EACH = TILE
# CROWD is the number of rows that the first and the last expert each have in the check.
CROWD = 2 * TILE + 1
# REPORT_SHAPE is the shape ``[E, N, K]`` of the weights that ``expert_report`` tests.
REPORT_SHAPE = (16, 512, 512)


def expert_report() -> KernelReport:
    """Test the kernel on the default device, if it has a kernel."""
    weight = mx.random.normal(REPORT_SHAPE, mx.bfloat16, key=mx.random.key(0))
    return cuda_report(lambda language: why_not(ExpertKernel(language), weight))


class ExpertKernel:
    """The kernel of experts; each variant is compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build the kernel in ``language``: CUDA's, or a test's stand-in for it."""
        self._builder = KernelBuilder(language, TEXTS, "paged", argument_dtype)

    def __call__(self, x: mx.array, experts: mx.array, weight: mx.array) -> mx.array:
        """Return the product of each row and its expert's weight, ``[P, 1, N]``.

        Args:
            x: P rows, ``[P, 1, K]``.
            experts: the expert of each row, uint32 ``[P]`` in ascending order.
            weight: the weights of all experts, ``[E, N, K]`` in the dtype of x.
        """
        num_experts, width, _ = weight.shape
        groups = num_experts * -(-width // PANEL)
        return self._kernel(weight.dtype)(
            inputs=[x, experts, weight],
            output_shapes=[(x.shape[0], 1, width)],
            output_dtypes=[weight.dtype],
            grid=(groups * WARPS * WARP, 1, 1),
            threadgroup=(WARPS * WARP, 1, 1),
        )[0]

    def _kernel(self, dtype: mx.Dtype) -> Kernel:
        constants: dict[str, Constant] = {
            "T": dtype,
            "OUTPUTS": 1,
            "EXPERTS": 1,
            "TILES": 1,
            "PANELS": 1,
            "WARPS": WARPS,
            "AHEAD": 4,
        }
        spec = KernelSpec(
            "tensor_cores/linear.cu",
            ("x", "ids", "weight"),
            ("output0",),
            headers=("common.metal", "tensor_cores/tensor.cu"),
        )
        return self._builder.kernel(spec, constants)


def serves(x: mx.array, experts: mx.array, weight: mx.array) -> bool:
    """True if the kernel takes these arguments; see ``ExpertKernel.__call__``."""
    return (
        x.ndim == 3
        and x.shape[1] == 1
        and x.dtype == weight.dtype
        and experts.ndim == 1
        and experts.dtype == mx.uint32
        and x.shape[0] == experts.shape[0] <= MAX_ROWS_EACH * weight.shape[0]
    )


def why_not(kernel: ExpertKernel, weight: mx.array) -> str | None:
    """Return why the kernel is not to be used for weights ``[E, N, K]``; None if it agrees."""
    if weight.dtype not in DTYPES:
        return f"weights of {weight.dtype}"
    if weight.shape[2] % CHUNK:
        return f"rows of {weight.shape[2]} numbers"
    return why_off(lambda: kernel_error(kernel, weight), MAX_ERROR)


def kernel_error(kernel: ExpertKernel, weight: mx.array) -> float:
    """Return the largest difference from MLX's own products, in parts of the largest value.

    In the rows of this check some experts have many rows and some have none.
    """
    last = weight.shape[0] - 1
    ids = sorted([0] * CROWD + [last // 2] * 2 + [last] * CROWD)
    experts = mx.array(ids, mx.uint32)
    x = mx.random.normal((len(ids), 1, weight.shape[2]), weight.dtype, key=mx.random.key(0))
    rows = [x[i] @ weight[expert].T for i, expert in enumerate(ids)]
    return largest_error(kernel(x, experts, weight), mx.stack(rows))


class RowSwitchLinear(SwitchLinear):
    """Experts without biases; the kernel multiplies their rows if these are few."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return what ``SwitchLinear`` returns."""
        weight = self["weight"]
        # The kernel has no gradient.
        if sorted_indices and not self.training and serves(x, indices, weight):
            kernel: ExpertKernel = self["_kernel"]
            return kernel(x, indices, weight)
        return super().__call__(x, indices, sorted_indices=sorted_indices)


def use_expert_layers(
    model: nn.Module, kernel: ExpertKernel, trials: KernelTrials | None = None
) -> int:
    """Make a model's experts ``RowSwitchLinear`` where the kernel agrees; return how many are.

    Names and parameters stay.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) is SwitchLinear and "bias" not in module
    ]
    trial = (trials or KernelTrials()).of("the kernel of experts is")
    served = 0
    for layer in layers:
        weight = layer["weight"]
        shape = (*weight.shape, weight.dtype)
        if trial.agree(shape, partial(why_not, kernel, weight)):
            replace_class(layer, RowSwitchLinear, _kernel=kernel)
            served += 1
    return served
