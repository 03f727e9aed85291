"""The names and the order of a tower's weights in checkpoints of one family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# COLOURS: channels of a picture, by which a convolution of pixels is known.
COLOURS = 3


def _any_config(config: Mapping[str, Any]) -> bool:
    del config
    return True


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """Towers of one kind in checkpoints.

    Attributes:
        make: returns the tower of a ``config.json``, a ``features.Tower``.
        parts: the prefixes of its weights in checkpoints, and the tower's own for each; the first
            that fits counts. transformers writes ``model.`` before them, or not.
        is_known: True if the tower of a ``config.json`` is of this kind.
        sees_both_ways: True if the text model lets all rows of a picture attend to each other.
    """

    make: Callable[[dict[str, Any]], nn.Module]
    parts: Mapping[str, str]
    is_known: Callable[[Mapping[str, Any]], bool] = _any_config
    sees_both_ways: bool = False

    def weights(self, checkpoint: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the tower's weights of a checkpoint, by the tower's names and in MLX's order."""
        own: dict[str, mx.array] = {}
        for name, array in checkpoint.items():
            short = name.removeprefix("model.")
            part = next((part for part in self.parts if short.startswith(part)), None)
            if part is not None and not short.endswith("position_ids"):
                own[self.parts[part] + short.removeprefix(part)] = _in_order(array)
        return own


def _in_order(weight: mx.array) -> mx.array:
    """Return a convolution of pixels in MLX's order; one of whole patches as a linear layer's.

    These have 5 axes: time, height and width besides the channels in and out. PyTorch's order has
    the channels in before those.
    """
    if weight.ndim == 5:
        is_last = weight.shape[-1] == COLOURS
        weight = weight.transpose(0, 4, 1, 2, 3) if is_last else weight
        return weight.reshape(weight.shape[0], -1)
    is_first = weight.ndim == 4 and weight.shape[1] == COLOURS and weight.shape[-1] != COLOURS
    return weight.transpose(0, 2, 3, 1) if is_first else weight
