"""mlx_lm's GPT-OSS, with the exact range in which YaRN turns from one frequency to the other."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from mlx_lm.models import gpt_oss

ModelArgs = gpt_oss.ModelArgs


class Model(gpt_oss.Model):
    """mlx_lm's model, which takes whole numbers for the ends of that range."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        scaling = args.rope_scaling or {}
        if scaling.get("truncate") is not False or "beta_fast" not in scaling:
            return
        wavelengths = mx.array(exact_wavelengths(args.head_dim, args.rope_theta, **scaling))
        for layer in self.layers:
            layer.self_attn.rope._freqs = wavelengths


def exact_wavelengths(
    dims: int,
    base: float,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
    **_others: object,
) -> np.ndarray:
    """Return tokens per radian for each pair of dimensions, float32 ``[dims / 2]``.

    Source: YaRN, arXiv:2309.00071, section 3.2.
    """

    def dimension(turns: float) -> float:
        """Return the dimension that turns so often within the original context."""
        wavelength = original_max_position_embeddings / (2 * math.pi * turns)
        return dims * math.log(wavelength) / (2 * math.log(base))

    low, high = max(dimension(beta_fast), 0), min(dimension(beta_slow), dims - 1)
    own = base ** (np.arange(0, dims, 2) / dims)
    span = high - low or 0.001
    stretched = np.clip((np.arange(dims // 2) - low) / span, 0, 1)
    return (1 / ((1 - stretched) / own + stretched / (factor * own))).astype(np.float32)
