"""The names and the order of a tower's weights in checkpoints, and text models with a tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.vision.features import TwoWay

# COLOURS: channels of an image, by which a convolution of pixels is known.
COLOURS = 3
#: ``TOWER``: the attribute of a text model that has the tower, and the prefix of its weights.
TOWER = "picture_tower"


def _any_config(config: Mapping[str, Any]) -> str | None:
    del config


def several_layers(config: Mapping[str, Any]) -> str | None:
    """Return that features are of several layers, or None: see ``TowerFamily.unlike``."""
    layer = config.get("vision_feature_layer", -1)
    return None if isinstance(layer, int) else f"vision_feature_layer {layer}"


def _causal(config: Mapping[str, Any]) -> TwoWay | None:
    del config


def in_order(name: str, weight: mx.array) -> dict[str, mx.array]:
    """Return a weight by its name, convolutions of pixels in MLX's order.

    A convolution of whole patches becomes a linear layer's weight. It has 5 axes: time, height and
    width besides the channels in and out. PyTorch's order has the channels in before those.
    """
    if weight.ndim == 5:
        is_last = weight.shape[-1] == COLOURS
        weight = weight.transpose(0, 4, 1, 2, 3) if is_last else weight
        return {name: weight.reshape(weight.shape[0], -1)}
    is_first = weight.ndim == 4 and weight.shape[1] == COLOURS and weight.shape[-1] != COLOURS
    return {name: weight.transpose(0, 2, 3, 1) if is_first else weight}


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """Towers of one kind in checkpoints.

    Attributes:
        make: returns the tower of a ``config.json``, a ``features.Tower``.
        parts: the prefixes of its weights in checkpoints, and the tower's own for each; the first
            that fits counts. transformers writes ``model.`` before them, or not.
        unlike: returns what the tower of a ``config.json`` has that those of this kind lack; None
            if it is of this kind.
        two_way: returns where the text model lets rows of an image attend to later ones.
        has_axes: True if rows of an image have position ids on several axes (M-RoPE).
        converted: returns the tower's weights that a weight of a checkpoint becomes, by name; its
            prefix is the tower's own already.
    """

    make: Callable[[dict[str, Any]], nn.Module]
    parts: Mapping[str, str]
    unlike: Callable[[Mapping[str, Any]], str | None] = _any_config
    two_way: Callable[[Mapping[str, Any]], TwoWay | None] = _causal
    has_axes: bool = False
    converted: Callable[[str, mx.array], dict[str, mx.array]] = in_order

    def weights(self, checkpoint: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the tower's weights of a checkpoint, by the tower's names and in MLX's order."""
        own: dict[str, mx.array] = {}
        for name, array in checkpoint.items():
            short, part = self._split(name)
            if part is not None and not short.endswith("position_ids"):
                own |= self.converted(self.parts[part] + short.removeprefix(part), array)
        return own

    def others(self, checkpoint: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of a checkpoint that are not the tower's."""
        return {name: each for name, each in checkpoint.items() if self._split(name)[1] is None}

    def _split(self, name: str) -> tuple[str, str | None]:
        """Return a name without "model.", and the part of the tower that it begins with."""
        short = name.removeprefix("model.")
        return short, next((part for part in self.parts if short.startswith(part)), None)


def with_tower(text_class: type, config: dict[str, Any], family: TowerFamily) -> type:
    """Return a text model's class that has a tower too.

    So the tower's weights are loaded, quantised, replaced and offloaded with the model's own. A
    checkpoint without a tower is read as a text model: the attribute is None then.

    Args:
        text_class: a class of mlx_lm, which drops the tower's weights.
        config: ``config.json``.
        family: of its tower.
    """

    class TextModelWithTower(text_class):
        """A text model and the tower of its images."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            setattr(self, TOWER, family.make(config))

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Return the weights of a whole checkpoint by this model's names."""
            if not family.weights(weights):
                setattr(self, TOWER, None)
            return self.renamed(weights)

        def renamed(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Return some weights of a checkpoint by this model's names."""
            own, text = family.weights(weights), family.others(weights)
            parent: Any = super()
            if text and hasattr(parent, "sanitize"):
                text = parent.sanitize(text)
            return {**text, **{f"{TOWER}.{name}": array for name, array in own.items()}}

    return TextModelWithTower
