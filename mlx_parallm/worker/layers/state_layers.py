"""Recurrent layers that use kernels where MLX's and mlx_lm's own operations are slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ssm import compute_dt

from mlx_parallm.worker.device.kernel_trial import KernelTrials, ShapeTrials
from mlx_parallm.worker.layers.state_kernels import (
    ConvolutionKernel,
    DeltaKernel,
    ScanKernel,
    why_not_convolution,
    why_not_delta,
    why_not_scan,
)
from mlx_parallm.worker.layers.wrapped_calls import replace_class


class RowConvolution(nn.Conv1d):
    """A depthwise convolution without padding that the kernel computes."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return what ``nn.Conv1d`` returns."""
        weight = self["weight"]
        # The kernel has no gradient.
        if self.training or x.dtype != weight.dtype or x.shape[1] < weight.shape[1]:
            return super().__call__(x)
        kernel: ConvolutionKernel = self["_kernel"]
        y = kernel(x, weight)
        return y + self["bias"] if "bias" in self else y


def use_state_layers(
    model: nn.Module, kernel: ConvolutionKernel, trials: KernelTrials | None = None
) -> int:
    """Make a model's short convolutions ``RowConvolution`` where the kernel agrees.

    Return how many are.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Conv1d and _is_plain_depthwise(module)
    ]
    trial = (trials or KernelTrials()).of("the kernel of convolutions is")
    for layer in layers:
        weight = layer["weight"]
        shape = (*weight.shape, weight.dtype)
        if trial.agree(shape, partial(why_not_convolution, kernel, weight)):
            replace_class(layer, RowConvolution, _kernel=kernel)
    return sum(type(layer) is RowConvolution for layer in layers)


def _is_plain_depthwise(layer: Any) -> bool:
    """True if the layer is depthwise, of stride and dilation 1, and without padding."""
    settings = (layer.stride, layer.padding, layer.dilation)
    return settings == (1, 0, 1) and layer.groups == layer["weight"].shape[0]


class DeltaSeam:
    """Replaces ``gated_delta_ops`` of mlx_lm.

    The kernel is checked for each shape when the shape first occurs. That is in the first prompt of
    the check at load, and so never while a function is traced.
    """

    def __init__(self, original: Callable[..., Any], kernel: DeltaKernel) -> None:
        self.original = original
        #: The forward in progress; without a forward, mlx_lm's own operations run.
        self.step: object | None = None
        self._kernel = kernel
        self._trials = ShapeTrials("the kernel of the delta rule is")

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return what mlx_lm's function returns."""
        if self.step is None or state is None or not self._serves(q, v, g, state):
            return self.original(q, k, v, g, beta, state, mask)
        if mask is not None:
            # A token with these leaves the state as it is.
            is_token = mask[..., None]
            beta = mx.where(is_token, beta, 0)
            g = mx.where(is_token if g.ndim == mask.ndim + 1 else is_token[..., None], g, 1)
        return self._kernel(q, k, v, g, beta, state)

    def _serves(self, q: mx.array, v: mx.array, g: mx.array, state: mx.array) -> bool:
        if not self._kernel.serves(q, v, state):
            return False
        heads, gates = (q.shape[2], v.shape[2]), g.shape[3] if g.ndim == v.ndim else 1
        shape = (2, 3, *heads, q.shape[-1], v.shape[-1])
        key = (*shape, q.dtype, gates)
        trial = partial(why_not_delta, self._kernel, shape, q.dtype, gates)
        return self._trials.agree(key, trial)


class ScanSeam:
    """Replaces ``ssm_attn`` of mlx_lm for one token; prompts still use it. See ``DeltaSeam``."""

    def __init__(self, original: Callable[..., Any], kernel: ScanKernel) -> None:
        self.original = original
        #: The forward in progress; without a forward, mlx_lm's own operations run.
        self.step: object | None = None
        self._kernel = kernel
        self._trials = ShapeTrials("the kernel of state spaces is")

    def __call__(  # noqa: PLR0913 - as mlx_lm's
        self,
        x: mx.array,
        a_log: mx.array,
        b: mx.array,
        c: mx.array,
        d: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        **options: Any,
    ) -> tuple[mx.array, mx.array]:
        """Return what mlx_lm's function returns."""
        has_options = any(option is not None for option in options.values())
        if self.step is None or has_options or state is None or not self._serves(x, b, state):
            parameters = (a_log, b, c, d, dt, dt_bias, state, time_step_limit)
            return self.original(x, *parameters, **options)
        time = compute_dt(dt, dt_bias, time_step_limit)
        decay = mx.exp(time * -mx.exp(a_log).astype(time.dtype))
        y, state = self._kernel(x, decay, time, b, c, state)
        return y + x * d.reshape(1, 1, -1, 1), state

    def _serves(self, x: mx.array, b: mx.array, state: mx.array) -> bool:
        if not self._kernel.serves(x, b, state):
            return False
        shape = (2, b.shape[2], x.shape[2], b.shape[3], x.shape[3])
        key = (*shape, x.dtype)
        return self._trials.agree(key, partial(why_not_scan, self._kernel, shape, x.dtype))
