"""Dense layers that sentence-transformers put behind a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.checkpoints.sentence_transformers import DenseSpec
from mlx_parallm.models.checkpoints.weight_files import PICKLES
from mlx_parallm.numerics.finite import evaluate_weights
from mlx_parallm.types.errors import ModelLoadError

_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "SiLU": nn.silu,
    "Sigmoid": mx.sigmoid,
}
_NAMES = ("linear.weight", "linear.bias", "residual.weight")


class DenseLayer:
    """A linear layer, its activation, and perhaps its input on top; in float32.

    Args:
        weights: ``linear.weight``, perhaps ``linear.bias``, and ``residual.weight`` where the
            input has another size than the output.
        activation: of the linear layer's output.
        has_residual: whether the input is added.
    """

    def __init__(
        self,
        weights: Mapping[str, mx.array],
        activation: Callable[[mx.array], mx.array],
        *,
        has_residual: bool,
    ) -> None:
        self._weights = weights
        self._activation = activation
        self._has_residual = has_residual

    def __call__(self, x: mx.array) -> mx.array:
        """``[..., out]`` of ``[..., in]``, float32."""
        weights = self._weights
        out = x @ weights["linear.weight"].T
        if "linear.bias" in weights:
            out = out + weights["linear.bias"]
        out = self._activation(out)
        if not self._has_residual:
            return out
        return out + (x @ weights["residual.weight"].T if "residual.weight" in weights else x)


def load_dense(spec: DenseSpec) -> DenseLayer:
    """Read a layer's weights.

    Raises:
        ModelLoadError: they cannot be read, are NaN or infinite, or its activation is not known.
    """
    activation = _ACTIVATIONS.get(spec.activation)
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise ModelLoadError(
            f"{spec.folder}: the activation {spec.activation} is not one of {known}."
        )
    file = spec.folder / "model.safetensors"
    if not file.exists():
        raise ModelLoadError(f"{file} is missing. {PICKLES}")
    try:
        weights = cast("dict[str, mx.array]", mx.load(str(file)))
    except (OSError, RuntimeError, ValueError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause
    if "linear.weight" not in weights:
        raise ModelLoadError(f"{file} has no linear.weight.")
    # Stanford's ColBERT has the whole model in this file.
    floats = {name: weights[name].astype(mx.float32) for name in _NAMES if name in weights}
    evaluate_weights(floats, file)
    return DenseLayer(floats, activation, has_residual=spec.has_residual)
