"""Value heads of generators: a linear layer of one label beside the LM head.

Critics of PPO have one. TRL's ``AutoModelForCausalLMWithValueHead`` saves it as ``v_head.summary``,
and a classifier of one label as ``score``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.indexed_weights import read_weights
from mlx_parallm.types.errors import ModelLoadError

#: ``VALUE_HEADS``: names of the layer in checkpoints, the first of which counts.
VALUE_HEADS = ("v_head.summary", "v_head", "score")
# NUM_AXES: axes of the layer's tensors.
NUM_AXES = {"weight": 2, "bias": 1}


def value_head_in(names: Mapping[str, Any]) -> str | None:
    """Return the name of the layer whose tensors are among these; None if there is none."""
    return next((name for name in VALUE_HEADS if f"{name}.weight" in names), None)


def head_problem(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why tensors, by their names in the layer, are no value head; None if they are."""
    for leaf, shape in shapes.items():
        if NUM_AXES.get(leaf) != len(shape) or shape[0] != 1:
            return f"{leaf[:100]} has the shape {list(shape)}, which no layer of one label has"
    return None if "weight" in shapes else "it has no weight"


def with_value_head(model_class: Any, folder: Path) -> Any:
    """Return a class of mlx_lm whose models keep the value head of a folder.

    It is the class itself if the folder has none.

    Raises:
        ModelLoadError: the layer has several labels.
    """
    shapes = {name: array.shape for name, array in read_weights(folder).items()}
    name = value_head_in(shapes)
    if name is None:
        return model_class
    prefix = f"{name}."
    own = {key.removeprefix(prefix): shapes[key] for key in shapes if key.startswith(prefix)}
    if (problem := head_problem(own)) is not None:
        raise ModelLoadError(f"{folder}: {name} is no value head: {problem}.")

    class Critic(model_class):
        """A model with the layer, whose weights no other class of mlx_lm would take."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            layer = nn.Linear(own["weight"][1], 1, bias="bias" in own)
            tree: Any = tree_unflatten([(name, layer)])
            for key, child in tree.items():
                self[key] = child

        def sanitize(self, weights: Weights) -> Weights:
            """Return weights by the model's names, those of the layer as they are."""
            head = {key: weights[key] for key in weights if key.startswith(prefix)}
            others = {key: weights[key] for key in weights if key not in head}
            return (super().sanitize(others) if hasattr(super(), "sanitize") else others) | head

    Critic.__module__, Critic.__name__ = model_class.__module__, model_class.__name__
    return Critic


def value_layer(model: Any) -> Any:
    """Return the value head of a loaded model; None if it has none."""
    for name in VALUE_HEADS:
        layer = model
        for key in name.split("."):
            layer = layer.get(key, {})
        if "weight" in layer:
            return layer
    return None
