"""The towers by the ``model_type`` of their checkpoints, and their weights in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.vision.llava import LlavaTower

#: ``TOWERS``: makes a tower from ``config.json``.
TOWERS: Mapping[str, Callable[[dict[str, Any]], nn.Module]] = {"llava": LlavaTower}
# PARTS: where checkpoints have a tower's weights, below these optional prefixes.
PREFIXES = ("model.", "")
PARTS = ("vision_tower.", "multi_modal_projector.")


def has_tower(config: Mapping[str, Any]) -> bool:
    """True if a checkpoint of this config may have a tower that is known."""
    vision = config.get("vision_config")
    return (
        config.get("model_type") in TOWERS
        and isinstance(vision, dict)
        and vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    )


def make_tower(config: dict[str, Any]) -> nn.Module:
    """Return the tower of a config; its parameters are random."""
    return TOWERS[config["model_type"]](config)


def tower_weights(
    config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the tower's weights of a checkpoint, by the tower's names.

    Convolutions are turned to MLX's order if they are in PyTorch's.
    """
    own: dict[str, mx.array] = {}
    for name, array in weights.items():
        short = name.removeprefix("model.")
        if not short.startswith(PARTS):
            continue
        # Older checkpoints have one more level.
        short = short.replace("vision_tower.vision_model.", "vision_tower.", 1)
        if short.endswith("position_ids"):
            continue
        own[short] = _channels_last(array) if short.endswith("patch_embedding.weight") else array
    return own


def _channels_last(weight: mx.array) -> mx.array:
    """Return a convolution's weight as ``[out, height, width, in]``."""
    is_first = weight.shape[1] == 3 and weight.shape[-1] != 3
    return weight.transpose(0, 2, 3, 1) if is_first else weight
