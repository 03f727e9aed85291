"""LLaVA (arXiv:2304.08485): patches of a tower through two linear layers; and LLaVA-NeXT.

LLaVA-NeXT reads the whole image and tiles of it, whose rows of patches end with a mark.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.vision.anyres import TileGrid, tile_grid
from mlx_parallm.models.vision.checkpoint import TowerFamily
from mlx_parallm.models.vision.clip import ClipConfig, ClipTransformer
from mlx_parallm.models.vision.features import Arrays, Features, Stages, Tower, features_of
from mlx_parallm.models.vision.parts import ACTIVATIONS


class LlavaProjector(nn.Module):
    """Two linear layers from the tower's width to the text model's."""

    def __init__(self, width: int, text_width: int, *, activation: str, bias: bool) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, text_width, bias=bias)
        self.linear_2 = nn.Linear(text_width, text_width, bias=bias)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[..., text width]``."""
        return self.linear_2(self._activation(self.linear_1(x)))


class LlavaTower(Tower):
    """CLIP and the projector."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = ClipConfig.of(config["vision_config"])
        layers = config.get("vision_feature_layer", -2)
        self._layers: list[int] = layers if isinstance(layers, list) else [layers]
        self._drops_class = config.get("vision_feature_select_strategy", "default") == "default"
        self.vision_tower = ClipTransformer(vision)
        self.multi_modal_projector = LlavaProjector(
            vision.hidden_size * len(self._layers),
            config["text_config"]["hidden_size"],
            activation=config.get("projector_hidden_act", "gelu"),
            bias=config.get("multimodal_projector_bias", True),
        )

    @property
    @override
    def num_stages(self) -> int:
        return max(self.vision_tower.layer_numbers(self._layers)) + 1

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        pixels = mx.stack([arrays["pixel_values"] for arrays in images])
        rows = yield from self.rows_of(pixels.flatten(0, 1))
        return features_of(rows.reshape(len(images), -1, rows.shape[-1]))

    def rows_of(self, pixels: mx.array) -> Generator[mx.array, None, mx.array]:
        """Compute rows ``[images, patches, text width]`` of ``[images, 3, h, w]``."""
        pixels = pixels.astype(self.vision_tower.embeddings.class_embedding.dtype)
        hidden = yield from self.vision_tower.hidden(pixels, self._layers)
        x = mx.concatenate(hidden, axis=-1)
        if self._drops_class:
            x = x[:, 1:]
        return self.multi_modal_projector(x)


def _not_clip(config: Mapping[str, Any]) -> str | None:
    """Return a difference from CLIP's tower; Pixtral has the same ``model_type``."""
    kind = config["vision_config"].get("model_type")
    return "a tower of Pixtral" if kind == "pixtral" else None


#: ``LLAVA``: LLaVA 1.5.
LLAVA = TowerFamily(
    LlavaTower,
    {
        "vision_tower.vision_model.": "vision_tower.",
        "vision_tower.": "vision_tower.",
        "multi_modal_projector.": "multi_modal_projector.",
    },
    _not_clip,
)


class LlavaNextTower(LlavaTower):
    """CLIP, the projector and the mark."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__(config)
        vision = config["vision_config"]
        self._resolutions: list[list[int]] = config["image_grid_pinpoints"]
        self._tile = int(vision.get("image_size", 336))
        self._patches = self._tile // int(vision.get("patch_size", 14))
        self.image_newline = mx.zeros((config["text_config"]["hidden_size"],))

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        height, width = np.array(images[0]["image_sizes"])[0].tolist()
        grid = tile_grid((height, width), self._resolutions, self._tile, self._patches)
        count = 1 + grid.rows * grid.columns
        tiles = mx.concatenate([arrays["pixel_values"][0, :count] for arrays in images])
        rows = yield from self.rows_of(tiles)
        parts = mx.split(rows, len(images))
        return [self._features(part, grid) for part in parts]

    def _features(self, rows: mx.array, grid: TileGrid) -> Features:
        """Return the features of an image: ``rows`` of the whole and of each tile."""
        side = self._patches
        tiles = rows[1:].reshape(grid.rows, grid.columns, side, side, -1).transpose(0, 2, 1, 3, 4)
        whole = tiles.reshape(grid.rows * side, grid.columns * side, -1)
        shown = whole[grid.top : grid.top + grid.height, grid.left : grid.left + grid.width]
        marks = mx.broadcast_to(self.image_newline, (grid.height, 1, shown.shape[-1]))
        lines = mx.concatenate([shown, marks.astype(shown.dtype)], axis=1)
        return Features(mx.concatenate([rows[0], lines.reshape(-1, lines.shape[-1])]))


#: ``LLAVA_NEXT``: LLaVA 1.6.
LLAVA_NEXT = TowerFamily(
    LlavaNextTower, {**LLAVA.parts, "image_newline": "image_newline"}, LLAVA.unlike
)
