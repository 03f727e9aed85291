"""Clipped layers of Gemma 4's tower, whose bounds may be infinite in checkpoints."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_parallm.models.vision.gemma4 import GEMMA4, LIMITS, ClippedLinear

DTYPES = ("float32", "float16", "bfloat16")
LAYER = "vision_tower.encoder.layers.0.mlp.up_proj"


def layer_of(limits: dict[str, float], saved: str, dtype: str) -> ClippedLinear:
    """Return an identity with the limits of a checkpoint, after a change of dtype."""
    checkpoint = {
        f"model.{LAYER}.{name}": mx.array(value, getattr(mx, saved))
        for name, value in limits.items()
    }
    weights = GEMMA4.weights(checkpoint)
    layer = ClippedLinear(2, 2, is_clipped=True)
    own = [(name.removeprefix(f"{LAYER}."), array) for name, array in weights.items()]
    layer.load_weights([*own, ("linear.weight", mx.eye(2))])
    layer.set_dtype(getattr(mx, dtype))
    return layer


@pytest.mark.parametrize("saved", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_bounds_are_finite_weights_that_clip_nothing(saved: str, dtype: str) -> None:
    limits = {name: math.inf if name.endswith("max") else -math.inf for name in LIMITS}
    layer = layer_of(limits, saved, dtype)
    assert all(mx.isfinite(layer[name]) for name in LIMITS)
    x = mx.array([[-60000.0, 60000.0]], getattr(mx, dtype))
    assert mx.array_equal(layer(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_bounds_clip(dtype: str) -> None:
    limits = {"input_min": -4.0, "input_max": 4.0, "output_min": -2.0, "output_max": math.inf}
    layer = layer_of(limits, "float32", dtype)
    assert layer(mx.array([[-10.0, 10.0]], getattr(mx, dtype))).tolist() == [[-2.0, 4.0]]
