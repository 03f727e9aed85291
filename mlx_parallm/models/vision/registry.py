"""The towers by the ``model_type`` of their checkpoints, and their weights in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.vision.llava import LlavaTower
from mlx_parallm.models.vision.qwen import QwenTower

#: ``TOWERS``: makes a tower from ``config.json``.
TOWERS: Mapping[str, Callable[[dict[str, Any]], nn.Module]] = {
    "llava": LlavaTower,
    "qwen2_5_vl": QwenTower,
    "qwen2_vl": QwenTower,
}
# PARTS: where checkpoints have a tower's weights, by the names of the tower; transformers writes
# "model." before them, or one more level.
PARTS = {
    "vision_tower.vision_model.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "multi_modal_projector.": "multi_modal_projector.",
    "visual.": "visual.",
}


def has_tower(config: Mapping[str, Any]) -> bool:
    """True if a checkpoint of this config may have a tower that is known."""
    vision = config.get("vision_config")
    if config.get("model_type") not in TOWERS or not isinstance(vision, dict):
        return False
    return vision.get("model_type") != "pixtral"


def make_tower(config: dict[str, Any]) -> nn.Module:
    """Return the tower of a config; its parameters are random."""
    return TOWERS[config["model_type"]](config)


def tower_weights(
    config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the tower's weights of a checkpoint, by the tower's names.

    Convolutions are turned to MLX's order if they are in PyTorch's.
    """
    is_qwen = config["model_type"].startswith("qwen")
    own: dict[str, mx.array] = {}
    for name, array in weights.items():
        short = name.removeprefix("model.")
        part = next((part for part in PARTS if short.startswith(part)), None)
        if part is None or short.endswith("position_ids"):
            continue
        # mlx-community calls Qwen's tower "vision_tower".
        prefix = "visual." if is_qwen else PARTS[part]
        own[prefix + short.removeprefix(part)] = _in_order(short, array)
    return own


def _in_order(name: str, weight: mx.array) -> mx.array:
    """Return a convolution's weight in MLX's order; one of whole patches as that of a linear layer.

    These have 5 axes: time, height and width besides the channels in and out.
    """
    if weight.ndim == 5:
        is_last = weight.shape[-1] == 3
        weight = weight.transpose(0, 4, 1, 2, 3) if is_last else weight
        return weight.reshape(weight.shape[0], -1)
    if name.endswith("patch_embedding.weight") and weight.ndim == 4 and weight.shape[-1] != 3:
        return weight.transpose(0, 2, 3, 1)
    return weight
