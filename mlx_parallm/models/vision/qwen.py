"""The towers of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923).

An image is a grid of patches of any size, in the order of transformers' image processor: squares
of ``spatial_merge_size`` patches a side, each of which becomes one row, lie together.
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
from mlx_parallm.models.vision.features import Arrays, Layers, Stages, Tower, features_of
from mlx_parallm.models.vision.parts import FeedForward, GatedFeedForward, turned
from mlx_parallm.numerics.attention import softmax_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionConfig:
    """The fields of ``vision_config``, by transformers' names.

    Attributes:
        embed_dim: width of Qwen2-VL's tower; ``hidden_size`` is that of its rows then.
        out_hidden_size: width of Qwen2.5-VL's rows; ``hidden_size`` is its tower's.
        fullatt_block_indexes: layers of Qwen2.5-VL without windows.
        window_size: pixels along each side of a window.
    """

    depth: int = 32
    hidden_size: int = 3584
    embed_dim: int = 1280
    out_hidden_size: int = 3584
    intermediate_size: int = 3420
    mlp_ratio: float = 4
    num_heads: int = 16
    in_channels: int = 3
    in_chans: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    hidden_act: str = "quick_gelu"
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Return the fields that a config has."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in config.items() if name in names}
        own["fullatt_block_indexes"] = tuple(own.get("fullatt_block_indexes", (7, 15, 23, 31)))
        return cls(**own)

    @property
    def patch_dim(self) -> int:
        """The number of numbers in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class Grid:
    """The patches of one image.

    Attributes:
        places: row and column of each patch, int ``[patches, 2]``.
    """

    def __init__(self, height: int, width: int, merge_size: int) -> None:
        """``height`` and ``width`` count patches; both are multiples of ``merge_size``."""
        self._units = height // merge_size, width // merge_size
        self._patches_of_unit = merge_size**2
        rows, columns = np.indices((height, width))
        shape = (self._units[0], merge_size, self._units[1], merge_size)
        self.places = np.stack(
            [each.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for each in (rows, columns)],
            axis=1,
        )

    def windows(self, side: int) -> np.ndarray:
        """Return the patches of each window of ``side`` merged squares a side.

        Returns:
            Indices ``[windows, most patches]``; -1 behind the patches of windows at the edges.
        """
        rows, columns = np.indices(self._units)
        numbers = (rows // side) * -(-self._units[1] // side) + columns // side
        of_patch = numbers.reshape(-1).repeat(self._patches_of_unit)
        order = np.argsort(of_patch, kind="stable")
        counts = np.bincount(of_patch)
        table = np.full((len(counts), counts.max()), -1)
        table[np.arange(counts.max()) < counts[:, None]] = order
        return table


class QwenAttention(nn.Module):
    """Attention of patches, turned by their rows and columns."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def __call__(self, x: mx.array, turns: mx.array, windows: Windows | None) -> mx.array:
        """Return the output ``[images, patches, size]``.

        Args:
            x: ``[images, patches, size]``.
            turns: angles ``[patches, size of a head / 2]``.
            windows: patches attend to those of their window; None: to all.
        """
        count, length, size = x.shape
        shape = count, length, 3, self.num_heads, -1
        q, k, v = self.qkv(x).reshape(shape).transpose(2, 0, 1, 3, 4)
        q, k = (turned(each, turns) for each in (q, k))
        scale = q.shape[-1] ** -0.5
        if windows is None:
            q, k, v = (each.transpose(0, 2, 1, 3) for each in (q, k, v))
            out = softmax_attention(q, k, v, scale=scale, mask=None)
            return self.proj(out.transpose(0, 2, 1, 3).reshape(count, length, size))
        q, k, v = (windows.split(each) for each in (q, k, v))
        # The windows of all images are one axis.
        mask = mx.tile(windows.mask, (count, 1, 1, 1))
        out = softmax_attention(q, k, v, scale=scale, mask=mask)
        return self.proj(windows.joined(out).reshape(count, length, size))


class Windows:
    """The windows of an image's patches.

    Attributes:
        mask: bool ``[windows, 1, 1, most patches]``: False behind the patches of a window.
    """

    def __init__(self, table: np.ndarray) -> None:
        """``table`` is that of ``Grid.windows``."""
        is_patch = table >= 0
        self._table = mx.array(np.maximum(table, 0).reshape(-1).astype(np.int32))
        self._shape = table.shape
        self.mask = mx.array(is_patch.astype(np.uint8)).astype(mx.bool_)[:, None, None]
        places = np.empty(is_patch.sum(), np.int32)
        places[table[is_patch]] = np.flatnonzero(is_patch)
        self._places = mx.array(places)

    def split(self, x: mx.array) -> mx.array:
        """Return ``[images, patches, heads, size]`` by windows.

        Returns:
            ``[images * windows, heads, most patches, size]``.
        """
        count, most = self._shape
        rows = x[:, self._table].reshape(x.shape[0] * count, most, *x.shape[2:])
        return rows.transpose(0, 2, 1, 3)

    def joined(self, x: mx.array) -> mx.array:
        """Return what ``split`` returns as ``[images, patches, heads, size]``."""
        count, most = self._shape
        rows = x.transpose(0, 2, 1, 3)
        return rows.reshape(-1, count * most, *rows.shape[2:])[:, self._places]


class QwenBlock(nn.Module):
    """A layer, normed before each part."""

    def __init__(self, size: int, num_heads: int, norm: Any, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm(size, eps=1e-6)
        self.norm2 = norm(size, eps=1e-6)
        self.attn = QwenAttention(size, num_heads)
        self.mlp = mlp

    def __call__(self, x: mx.array, turns: mx.array, windows: Windows | None) -> mx.array:
        """Return the hidden states after this layer."""
        x = x + self.attn(self.norm1(x), turns, windows)
        return x + self.mlp(self.norm2(x))


class QwenPatches(nn.Module):
    """The embedding of patches, a convolution that is a linear layer."""

    def __init__(self, patch_dim: int, size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(patch_dim, size, bias=bias)

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return embeddings ``[patches, size]`` of ``[patches, patch dim]``."""
        return self.proj(pixels)


class QwenMerger(nn.Module):
    """Makes one row of each square of patches."""

    def __init__(self, size: int, merge_size: int, out: int, norm: Any) -> None:
        super().__init__()
        inner = self._inner = size * merge_size**2
        self.ln_q = norm(size, eps=1e-6)
        self.mlp = [nn.Linear(inner, inner), nn.GELU(), nn.Linear(inner, out)]

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[images, rows, out]`` of ``[images, patches, size]``."""
        first, activation, last = self.mlp
        x = self.ln_q(x).reshape(x.shape[0], -1, self._inner)
        return last(activation(first(x)))


class QwenTransformer(nn.Module):
    """A tower of either version."""

    def __init__(self, config: QwenVisionConfig, *, has_windows: bool) -> None:
        """``has_windows``: True for Qwen2.5-VL."""
        super().__init__()
        self.config = config
        self.has_windows = has_windows
        size = config.hidden_size if has_windows else config.embed_dim
        norm = nn.RMSNorm if has_windows else nn.LayerNorm
        self.head_size = size // config.num_heads
        self.patch_embed = QwenPatches(config.patch_dim, size)
        self.blocks = [
            QwenBlock(size, config.num_heads, norm, self._mlp(config, size))
            for _ in range(config.depth)
        ]
        out = config.out_hidden_size if has_windows else config.hidden_size
        self.merger = QwenMerger(size, config.spatial_merge_size, out, norm)

    def _mlp(self, config: QwenVisionConfig, size: int) -> nn.Module:
        if self.has_windows:
            return GatedFeedForward(size, config.intermediate_size, config.hidden_act)
        return FeedForward(size, int(size * config.mlp_ratio), config.hidden_act)

    def rows(self, pixels: mx.array, grid: Grid) -> Layers:
        """Compute rows ``[images, rows, out]`` of patches ``[images, patches, patch dim]``."""
        config = self.config
        turns = patch_turns(grid.places, self.head_size)
        windows = None
        if self.has_windows:
            side = config.window_size // config.patch_size // config.spatial_merge_size
            windows = Windows(grid.windows(side))
        x = self.patch_embed(pixels)
        for index, block in enumerate(self.blocks):
            is_full = index in config.fullatt_block_indexes
            x = block(x, turns, None if is_full else windows)
            yield x
        return self.merger(x)


class QwenTower(Tower):
    """The tower of Qwen2-VL or Qwen2.5-VL."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = QwenVisionConfig.of(config["vision_config"])
        self._merge_size = vision.spatial_merge_size
        has_windows = config["model_type"] == "qwen2_5_vl"
        self.visual = QwenTransformer(vision, has_windows=has_windows)

    @property
    @override
    def num_stages(self) -> int:
        return len(self.visual.blocks) + 1

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        dtype = self.visual.blocks[0].attn.qkv.bias.dtype
        pixels, grid = patches_of(images, self._merge_size)
        return features_of((yield from self.visual.rows(pixels.astype(dtype), grid)))


def patches_of(images: Sequence[Arrays], merge_size: int) -> tuple[mx.array, Grid]:
    """Return the patches ``[images, patches, patch dim]`` of images, and their grid."""
    _, height, width = np.array(images[0]["image_grid_thw"])[0].tolist()
    pixels = mx.stack([arrays["pixel_values"] for arrays in images])
    return pixels, Grid(height, width, merge_size)


def patch_turns(places: np.ndarray, head_size: int) -> mx.array:
    """Return angles ``[patches, head_size / 2]``: half by rows, half by columns."""
    half = head_size // 2
    frequencies = 1e4 ** -(np.arange(0, half, 2, dtype=np.float32) / half)
    angles = places[:, :, None].astype(np.float32) * frequencies
    return mx.array(angles.reshape(len(places), -1))


#: ``QWEN``: Qwen2-VL and Qwen2.5-VL. mlx-community calls their tower "vision_tower".
QWEN = TowerFamily(QwenTower, {"visual.": "visual.", "vision_tower.": "visual."}, has_axes=True)
