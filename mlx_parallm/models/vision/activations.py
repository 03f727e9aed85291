"""Activations of towers, by the names of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn


def quick_gelu(x: mx.array) -> mx.array:
    """Return OpenAI's approximation of GELU."""
    return x * mx.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "quick_gelu": quick_gelu,
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "silu": nn.silu,
}
