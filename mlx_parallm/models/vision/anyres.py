"""The tiles of LLaVA-NeXT: how an image of any shape lies in a grid of square tiles.

The arithmetic is transformers', whose processor cuts the tiles (``models/llava_next``). Nothing
here needs MLX, because tokens are counted where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# DIGITS: to which transformers rounds a scaled side before it drops the fraction.
DIGITS = 7


class TileGrid(NamedTuple):
    """The tiles of an image, and the part of their patches that shows it.

    Attributes:
        rows: of tiles.
        columns: of tiles.
        top: rows of patches above the image, and as many below it.
        left: columns of patches on its left, and as many on its right.
        height: rows of patches that show it.
        width: columns of patches that show it.
    """

    rows: int
    columns: int
    top: int
    left: int
    height: int
    width: int

    @property
    def num_features(self) -> int:
        """The patches that show the image, and a mark behind each of their rows."""
        return self.height * (self.width + 1)


def tile_grid(
    size: tuple[int, int], resolutions: Sequence[Sequence[int]], tile: int, side: int
) -> TileGrid:
    """Return the grid of an image.

    Args:
        size: height and width of the image in pixels.
        resolutions: heights and widths that grids may have, ``image_grid_pinpoints``.
        tile: pixels along each side of a tile.
        side: patches along each side of a tile.
    """
    grid_height, grid_width = best_resolution(size, resolutions)
    rows, columns = grid_height // tile, grid_width // tile
    height, width = rows * side, columns * side
    top = left = 0
    if size[1] / size[0] > width / height:
        top = (height - int(round(size[0] * (width / size[1]), DIGITS))) // 2
    else:
        left = (width - int(round(size[1] * (height / size[0]), DIGITS))) // 2
    return TileGrid(rows, columns, top, left, height - 2 * top, width - 2 * left)


def best_resolution(size: tuple[int, int], resolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the resolution that keeps most pixels of an image, and then wastes least."""

    def merit(resolution: Sequence[int]) -> tuple[int, int]:
        height, width = resolution
        scale = min(width / size[1], height / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - height * width

    height, width = max(resolutions, key=merit)
    return int(height), int(width)
