"""Layers of experts that multiply few rows by one kernel: MLX's grouped product is slow there."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.layers.expert_kernel import ExpertKernel, serves, why_not
from mlx_parallm.worker.layers.wrapped_calls import replace_class


class RowSwitchLinear(SwitchLinear):
    """Experts without biases; the kernel multiplies their rows if these are few."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return what ``SwitchLinear`` returns."""
        weight = self["weight"]
        if sorted_indices and serves(x, indices, weight):
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
