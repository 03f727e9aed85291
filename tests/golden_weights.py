"""Random weights that depend on nothing but their name, so that no file has to hold them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np


def golden_adapter_weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return an adapter's weight: matrices are smaller, DoRA's magnitudes near 1."""
    weight = golden_weight(name, shape)
    if "magnitude" in name:
        return weight + np.float32(1)
    return weight * np.float32(0.3) if "lora_" in name else weight


def golden_weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return a float32 weight, random by the crc32 of its name.

    Scales of norms are near 1. Matrices are so large that attention is far from uniform.
    """
    # RandomState's numbers are promised to stay the same in every version of NumPy.
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    if len(shape) > 1:
        return (noise * 2 / math.sqrt(shape[-1])).astype(np.float32)
    if ("norm" in name.lower() or "_ln." in name) and name.endswith("weight"):
        return (1 + 0.1 * noise).astype(np.float32)
    return (0.1 * noise).astype(np.float32)
