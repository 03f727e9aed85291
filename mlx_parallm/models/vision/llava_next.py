"""LLaVA-NeXT: the whole image and tiles of it, whose rows of patches end with a mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.models.vision.anyres import TileGrid, tile_grid
from mlx_parallm.models.vision.checkpoint import TowerFamily
from mlx_parallm.models.vision.features import Arrays, Features, Stages
from mlx_parallm.models.vision.llava import LLAVA, LlavaTower


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
