"""Random weights that depend on nothing but their name, so that no file has to hold them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

# SCALARS: the ends of names of weights that scale hidden states, and so are near 1.
SCALARS = ("layer_scalar", "lambda_1", "lambda_2", ".ls1", ".ls2", "std_scale")


def golden_adapter_weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return an adapter's weight: matrices are smaller, DoRA's magnitudes near 1."""
    weight = golden_weight(name, shape)
    if "magnitude" in name:
        return weight + np.float32(1)
    return weight * np.float32(0.3) if "lora_" in name else weight


def golden_weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return a float32 weight, random by the crc32 of its name.

    Scales of norms and layers are near 1, and bounds clip some numbers. Matrices are so large that
    attention is far from uniform.
    """
    # RandomState's numbers are promised to stay the same in every version of NumPy.
    random = np.random.RandomState(zlib.crc32(name.encode()))
    noise = np.array(random.standard_normal(tuple(shape)))
    is_table = name.endswith("shared.weight")
    if is_table or ("language_model." in name and ".embed_tokens." in name):
        # Tied to the head they would make tiny models repeat the last token.
        noise = noise * 0.3
    if len(shape) > 1:
        return (noise * 2 / math.sqrt(shape[-1])).astype(np.float32)
    if name.endswith(("put_min", "put_max")):
        bound = (-1.5 if name.endswith("min") else 1.5) * (1 + np.abs(noise))
        return np.array(bound, np.float32)
    if name.endswith(SCALARS):
        return (1 + 0.1 * noise).astype(np.float32)
    if ("norm" in name.lower() or "_ln." in name) and name.endswith("weight"):
        return (1 + 0.1 * noise).astype(np.float32)
    return (0.1 * noise).astype(np.float32)


def weighted_sum(array: np.ndarray) -> float:
    """Return a number by which an array is known, and which the order of its numbers changes."""
    flat = array.astype(np.float64).reshape(-1)
    return float(f"{np.cos(np.arange(len(flat))) @ flat:.5g}")
