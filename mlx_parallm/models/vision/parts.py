"""Parts that towers share: activations by the names of transformers, turns, feed-forward parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.numerics.elementary import (
    LOG2_E,
    MAX_EXPONENT,
    MIN_EXPONENT,
    exp2,
    gelu,
    is_exp_slow,
)
from mlx_parallm.numerics.elementary import silu as _by_silu


def quick_gelu(x: mx.array) -> mx.array:
    """Return OpenAI's approximation of GELU."""
    return _by_silu(1.702 * x) / 1.702 if _is_own(x) else x * mx.sigmoid(1.702 * x)


def tanh_gelu(x: mx.array) -> mx.array:
    """Return ``mlx.nn.gelu_approx``, by the fastest operations of the device."""
    if not _is_own(x):
        return nn.gelu_approx(x)
    # (1 + tanh(a)) / 2 is the logistic function of 2 a.
    inner = 1 + 0.044715 * mx.square(x)
    exponents = x * inner * (-2 * math.sqrt(2 / math.pi) * LOG2_E)
    return x / (1 + exp2(mx.clip(exponents, MIN_EXPONENT, MAX_EXPONENT - 1)))


def silu(x: mx.array) -> mx.array:
    """Return ``mlx.nn.silu``, by the fastest operations of the device."""
    return _by_silu(x) if _is_own(x) else nn.silu(x)


def _is_own(x: mx.array) -> bool:
    """True if the operations of ``numerics`` are faster."""
    return x.dtype == mx.float32 and is_exp_slow()


ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "quick_gelu": quick_gelu,
    "gelu": gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "silu": silu,
}


def turned(x: mx.array, turns: mx.array) -> mx.array:
    """Return ``x`` with each pair of halves turned by its angle.

    Args:
        x: ``[images, patches, heads, size]``.
        turns: angles ``[patches, size / 2]``.
    """
    cos, sin = mx.cos(turns)[:, None], mx.sin(turns)[:, None]
    a, b = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class FeedForward(nn.Module):
    """The feed-forward part of a layer.

    Args:
        size: of the hidden states.
        inner: of what is between the two linear layers.
        activation: its name.
    """

    def __init__(self, size: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, inner)
        self.fc2 = nn.Linear(inner, size)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output for ``[..., size]``."""
        return self.fc2(self._activation(self.fc1(x)))


class GatedFeedForward(nn.Module):
    """The feed-forward part of a layer, in which one linear layer gates another.

    Args:
        size: of the hidden states.
        inner: of what is between the linear layers.
        activation: that of the gate, by name.
        linear: makes a linear layer of its input's and its output's size.
    """

    def __init__(
        self,
        size: int,
        inner: int,
        activation: str,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        self.gate_proj = linear(size, inner)
        self.up_proj = linear(size, inner)
        self.down_proj = linear(inner, size)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output for ``[..., size]``."""
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class LayerStack(nn.Module):
    """The layers of a tower."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = list(layers)
