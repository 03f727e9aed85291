"""The tower of Qwen3-VL (arXiv:2511.21631), dense and MoE, and of Qwen3.5.

Patches lie in the order of Qwen2-VL's. Learned positions are read from a square table, between its
entries where an image has other sides, and some layers give rows of their own to the text model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.vision.checkpoint import TowerFamily
from mlx_parallm.models.vision.features import Arrays, Features, Stages, Tower
from mlx_parallm.models.vision.parts import ACTIVATIONS
from mlx_parallm.models.vision.qwen import Grid, QwenAttention, QwenPatches, patch_turns, patches_of
from mlx_parallm.numerics.elementary import gelu


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VisionConfig:
    """The fields of ``vision_config``, by transformers' names.

    Attributes:
        num_position_embeddings: entries of the table of positions.
        deepstack_visual_indexes: the layers that give rows of their own; Qwen3.5 has none.
    """

    depth: int = 27
    hidden_size: int = 1152
    out_hidden_size: int = 3584
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    hidden_act: str = "gelu_pytorch_tanh"
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Return the fields that a config has."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in config.items() if name in names}
        own["deepstack_visual_indexes"] = tuple(own.get("deepstack_visual_indexes", ()))
        return cls(**own)

    @property
    def patch_dim(self) -> int:
        """The number of numbers in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class Qwen3MLP(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, config: Qwen3VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output for ``[..., size]``."""
        return self.linear_fc2(self._activation(self.linear_fc1(x)))


class Qwen3Block(nn.Module):
    """A layer, normed before each part."""

    def __init__(self, config: Qwen3VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = QwenAttention(config.hidden_size, config.num_heads)
        self.mlp = Qwen3MLP(config)

    def __call__(self, x: mx.array, turns: mx.array) -> mx.array:
        """Return the hidden states after this layer."""
        x = x + self.attn(self.norm1(x), turns, None)
        return x + self.mlp(self.norm2(x))


class Qwen3Merger(nn.Module):
    """Makes one row of each square of patches."""

    def __init__(self, config: Qwen3VisionConfig, *, norms_squares: bool) -> None:
        """``norms_squares``: True to norm whole squares, as for the rows of single layers."""
        super().__init__()
        self._inner = config.hidden_size * config.spatial_merge_size**2
        self._normed_size = self._inner if norms_squares else config.hidden_size
        self.norm = nn.LayerNorm(self._normed_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(self._inner, self._inner)
        self.linear_fc2 = nn.Linear(self._inner, config.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[images, rows, out]`` of ``[images, patches, size]``."""
        count = x.shape[0]
        x = self.norm(x.reshape(count, -1, self._normed_size)).reshape(count, -1, self._inner)
        return self.linear_fc2(gelu(self.linear_fc1(x)))


class Qwen3Transformer(nn.Module):
    """The tower and its mergers."""

    def __init__(self, config: Qwen3VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self._deepstack = config.deepstack_visual_indexes
        self._head_size = size // config.num_heads
        self._side = int(config.num_position_embeddings**0.5)
        self.patch_embed = QwenPatches(config.patch_dim, size, bias=True)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, size)
        self.blocks = [Qwen3Block(config) for _ in range(config.depth)]
        self.merger = Qwen3Merger(config, norms_squares=False)
        self.deepstack_merger_list = [
            Qwen3Merger(config, norms_squares=True) for _ in self._deepstack
        ]

    def features(self, pixels: mx.array, grid: Grid) -> Stages:
        """Compute the features of patches ``[images, patches, patch dim]``."""
        indices, weights = table_places(grid, self._side)
        x = self.patch_embed(pixels)
        positions = self.pos_embed(mx.array(indices)) * mx.array(weights)[..., None]
        x = x + positions.sum(axis=1).astype(x.dtype)
        turns = patch_turns(grid.places, self._head_size)
        layers: dict[int, mx.array] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, turns)
            if index in self._deepstack:
                place = self._deepstack.index(index)
                layers[place] = self.deepstack_merger_list[place](x)
            yield x
        # The k-th layer of the list that runs gives the rows of the k-th text layer.
        added = zip(*layers.values(), strict=True) if layers else [()] * len(pixels)
        rows = self.merger(x)
        return [Features(*each) for each in zip(rows, map(tuple, added), strict=True)]


class Qwen3Tower(Tower):
    """The tower of a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = Qwen3VisionConfig.of(config["vision_config"])
        self._merge_size = vision.spatial_merge_size
        self.visual = Qwen3Transformer(vision)

    @property
    @override
    def num_stages(self) -> int:
        return len(self.visual.blocks) + 1

    @property
    @override
    def num_added_layers(self) -> int:
        return len(self.visual.deepstack_merger_list)

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        dtype = self.visual.blocks[0].attn.qkv.bias.dtype
        pixels, grid = patches_of(images, self._merge_size)
        return self.visual.features(pixels.astype(dtype), grid)


def table_places(grid: Grid, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where patches lie in a table of positions that is spread over the whole image.

    Args:
        grid: of the patches.
        side: entries along each side of the table; its corners are the image's corner patches.

    Returns:
        The four entries around each patch, int32 ``[patches, 4]``, and the weight of each in a
        bilinear interpolation, float32 ``[patches, 4]``.
    """
    most = np.maximum(grid.places.max(axis=0), 1)
    places = grid.places.astype(np.float32) * (side - 1) / most
    low = np.floor(places).astype(np.int32)
    high = np.minimum(low + 1, side - 1)
    share = (places - low).astype(np.float32)
    (row, column), (row_share, column_share) = low.T, share.T
    next_row, next_column = high.T
    rows, columns = [row, row, next_row, next_row], [column, next_column, column, next_column]
    indices = np.stack(rows, 1) * side + np.stack(columns, 1)
    row_weights = np.stack([1 - row_share, 1 - row_share, row_share, row_share], 1)
    column_weights = np.stack([1 - column_share, column_share, 1 - column_share, column_share], 1)
    return indices.astype(np.int32), row_weights * column_weights


#: ``QWEN3``: Qwen3-VL and Qwen3.5. mlx-community calls their tower "vision_tower".
QWEN3 = TowerFamily(Qwen3Tower, {"visual.": "visual.", "vision_tower.": "visual."}, has_axes=True)
