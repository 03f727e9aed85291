"""RoPE's settings under the names that most of mlx_lm's models read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a config lacks because transformers 5 wrote it.

    It writes RoPE's settings into ``rope_parameters``, by kind of layer if they differ.
    """
    missing: dict[str, Any] = {}
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    full: Mapping[str, Any] = rope.get("full_attention", rope)
    if "rope_theta" not in config and "rope_theta" in full:
        missing["rope_theta"] = full["rope_theta"]
    if not config.get("rope_scaling") and full.get("rope_type", "default") != "default":
        missing["rope_scaling"] = full
    local: Mapping[str, Any] = rope.get("sliding_attention") or {}
    if "rope_theta" in local:
        missing["rope_local_base_freq"] = local["rope_theta"]
    return missing
