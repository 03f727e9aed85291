"""The towers by the ``model_type`` of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.vision.checkpoint import TowerFamily
from mlx_parallm.models.vision.llava import LLAVA
from mlx_parallm.models.vision.qwen import QWEN

#: ``TOWERS``: one line for each ``model_type``.
TOWERS: Mapping[str, TowerFamily] = {
    "llava": LLAVA,
    "qwen2_5_vl": QWEN,
    "qwen2_vl": QWEN,
}


def has_tower(config: Mapping[str, Any]) -> bool:
    """True if a checkpoint of this config may have a tower that is known."""
    family = TOWERS.get(config.get("model_type", ""))
    return (
        family is not None
        and isinstance(config.get("vision_config"), dict)
        and family.is_known(config)
    )


def make_tower(config: dict[str, Any]) -> nn.Module:
    """Return the tower of a config; its parameters are random."""
    return TOWERS[config["model_type"]].make(config)


def tower_weights(
    config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the tower's weights of a checkpoint, by the tower's names."""
    return TOWERS[config["model_type"]].weights(weights)
