"""A weight of the embedded model, for updates."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_parallm.demo_models.folders import DEMO_FOLDER

NAME = "model.layers.0.input_layernorm.weight"


def weight() -> np.ndarray:
    """Return the weight of this name."""
    loaded = mx.load(str(DEMO_FOLDER / "model.safetensors"))
    assert isinstance(loaded, dict)
    return np.array(loaded[NAME].astype(mx.float32))
