"""The scaling of positions of a GGUF file, as config.json has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlx_parallm.models.gguf.fields import Fields
from mlx_parallm.types.errors import ModelLoadError

TYPE = ".rope.scaling.type"
# LLAMA3: parameters of Llama 3's scaling beside its factor. Files have only the factors of the
# frequencies that result from them, and all of Llama's releases have these.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# TOLERANCE: of factors that were computed in float32.
TOLERANCE = 1e-3
# YARN_KEYS: settings of YaRN whose defaults alone are read.
YARN_KEYS = (
    *(".rope.scaling.attn_factor", ".rope.scaling.yarn_ext_factor"),
    *(".rope.scaling.yarn_beta_fast", ".rope.scaling.yarn_beta_slow"),
)


def rope_scaling(
    fields: Fields, config: Mapping[str, Any], factors: tuple[float, ...] | None
) -> dict[str, Any] | None:
    """Return the field ``rope_scaling`` of a config; None if positions are not scaled.

    Args:
        fields: the metadata.
        config: the other fields of the config.
        factors: of the wave lengths of each pair of dimensions; None if a file has none.

    Raises:
        ModelLoadError: the scaling is not one that is read.
    """
    if factors is not None:
        return _llama3(fields, config, factors)
    # Files of 2023 have only this key.
    older = fields.real(".rope.scale_linear", 1.0)
    kind = fields.text(TYPE, "linear" if older != 1.0 else "none")
    if kind == "none":
        return None
    factor = fields.real(".rope.scaling.factor", older)
    if factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind != "yarn" or any(fields.has(key) for key in YARN_KEYS):
        raise fields.wrong(TYPE, "none, linear, or yarn with its default settings")
    original = fields.size(".rope.scaling.original_context_length")
    return {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }


def _llama3(
    fields: Fields, config: Mapping[str, Any], factors: tuple[float, ...]
) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "type": "llama3", "factor": max(factors), **LLAMA3}
    expected = llama3_factors(scaling, config["rope_theta"], config["head_dim"])
    is_same = len(factors) == len(expected) and all(
        math.isclose(own, other, rel_tol=TOLERANCE)
        for own, other in zip(factors, expected, strict=True)
    )
    if not is_same:
        raise ModelLoadError(
            f"{fields.header.path}: the factors of rope_freqs.weight are not those of Llama 3."
        )
    return scaling


def llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Return by how much Llama 3's scaling makes the waves of each pair of dimensions longer."""
    factor, low, high, original = (scaling[name] for name in ("factor", *LLAMA3))
    factors: list[float] = []
    for place in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (place / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
