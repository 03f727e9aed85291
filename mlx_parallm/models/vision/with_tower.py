"""mlx_lm's text models with the tower of their checkpoint as a part of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_parallm.models.vision.checkpoint import TowerFamily

#: ``TOWER``: the attribute of a text model that has the tower, and the prefix of its weights.
TOWER = "picture_tower"


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
