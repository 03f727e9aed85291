"""Pixtral's tower (arXiv:2410.07073), for images of any size, and Mistral 3's merged patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.vision.checkpoint import TowerFamily, several_layers
from mlx_parallm.models.vision.features import Arrays, Layers, Stages, Tower, features_of
from mlx_parallm.models.vision.llava import LlavaProjector
from mlx_parallm.models.vision.parts import GatedFeedForward, LayerStack, turned
from mlx_parallm.numerics.attention import softmax_attention

EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig:
    """The fields of ``vision_config``, by transformers' names."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 16
    hidden_act: str = "gelu"
    rope_theta: float = 1e4

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Return the fields that a config has."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in config.items() if name in names}
        rope = config.get("rope_parameters") or {}
        return cls(**{**own, **{name: rope[name] for name in rope if name == "rope_theta"}})


class PixtralAttention(nn.Module):
    """Attention of all patches of an image, turned by their rows and columns."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def __call__(self, x: mx.array, turns: mx.array) -> mx.array:
        """Return the output for ``[images, patches, size]``; see ``turned``."""
        count, length, size = x.shape
        q, k, v = (
            layer(x).reshape(count, length, self.num_heads, -1)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = [each.transpose(0, 2, 1, 3) for each in (turned(q, turns), turned(k, turns), v)]
        scale = (size // self.num_heads) ** -0.5
        out = softmax_attention(*heads, scale=scale, mask=None)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(count, length, size))


class PixtralLayer(nn.Module):
    """A layer, normed before each part."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=EPSILON)
        self.attention = PixtralAttention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=EPSILON)
        self.feed_forward = GatedFeedForward(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            partial(nn.Linear, bias=False),
        )

    def __call__(self, x: mx.array, turns: mx.array) -> mx.array:
        """Return the hidden states after this layer."""
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class PixtralTransformer(nn.Module):
    """The tower without a projector."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_conv = nn.Conv2d(
            config.num_channels,
            config.hidden_size,
            kernel_size=config.patch_size,
            stride=config.patch_size,
            bias=False,
        )
        self.ln_pre = nn.RMSNorm(config.hidden_size, eps=EPSILON)
        self.transformer = LayerStack(PixtralLayer(config) for _ in range(config.num_hidden_layers))

    def num_layers(self, layer: int) -> int:
        """Return how many layers run until a state, see ``clip.ClipTransformer``."""
        return layer % (len(self.transformer.layers) + 1)

    def hidden(self, pixels: mx.array, layer: int) -> Layers:
        """Compute hidden states ``[images, rows, columns, size]`` of patches.

        Args:
            pixels: ``[images, 3, h, w]``.
            layer: after which layer, see ``num_layers``.
        """
        patches = self.patch_conv(pixels.transpose(0, 2, 3, 1))
        count, rows, columns, size = patches.shape
        turns = self._turns(rows, columns)
        x = self.ln_pre(patches.reshape(count, -1, size))
        for each in self.transformer.layers[: self.num_layers(layer)]:
            x = each(x, turns)
            yield x
        return x.reshape(count, rows, columns, size)

    def _turns(self, rows: int, columns: int) -> mx.array:
        """Return angles: every other frequency turns by the row, those between by the column."""
        size = self.config.hidden_size // self.config.num_attention_heads
        exponents = np.arange(0, size, 2, dtype=np.float32) / size
        frequencies = np.float32(self.config.rope_theta) ** -exponents
        places = np.indices((rows, columns)).reshape(2, -1, 1).astype(np.float32)
        angles = [places[axis] * frequencies[axis::2] for axis in range(2)]
        return mx.array(np.concatenate(angles, axis=-1))


class PatchMerger(nn.Module):
    """Makes one row of each square of patches."""

    def __init__(self, size: int, merge_size: int) -> None:
        super().__init__()
        self._merge_size = merge_size
        self.merging_layer = nn.Linear(size * merge_size**2, size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Return ``[images, squares, size]`` of ``[images, rows, columns, size]``."""
        side = self._merge_size
        count, rows, columns = x.shape[0], x.shape[1] // side, x.shape[2] // side
        x = x[:, : rows * side, : columns * side].reshape(count, rows, side, columns, side, -1)
        squares = x.transpose(0, 1, 3, 5, 2, 4).reshape(count, rows * columns, -1)
        return self.merging_layer(squares)


class MistralProjector(LlavaProjector):
    """Norms patches and merges squares of them before two linear layers."""

    def __init__(
        self, width: int, text_width: int, config: Mapping[str, Any], *, activation: str, bias: bool
    ) -> None:
        super().__init__(width, text_width, activation=activation, bias=bias)
        self.norm = nn.RMSNorm(width, eps=config["text_config"].get("rms_norm_eps", 1e-6))
        self.patch_merger = PatchMerger(width, int(config.get("spatial_merge_size", 2)))

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[images, squares, width]`` of ``[images, rows, columns, size]``."""
        return super().__call__(self.patch_merger(self.norm(x)))


class PixtralTower(Tower):
    """The tower of Pixtral or Mistral 3."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = PixtralConfig.of(config["vision_config"])
        self._layer: int = config.get("vision_feature_layer", -1)
        self.vision_tower = PixtralTransformer(vision)
        widths = vision.hidden_size, config["text_config"]["hidden_size"]
        activation = config.get("projector_hidden_act", "gelu")
        is_merged = config["model_type"] == "mistral3"
        bias = config.get("multimodal_projector_bias", not is_merged)
        self.multi_modal_projector = (
            MistralProjector(*widths, config, activation=activation, bias=bias)
            if is_merged
            else LlavaProjector(*widths, activation=activation, bias=bias)
        )

    @property
    @override
    def num_stages(self) -> int:
        return self.vision_tower.num_layers(self._layer) + 1

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        height, width = np.array(images[0]["image_sizes"])[0].tolist()
        pixels = mx.concatenate([arrays["pixel_values"] for arrays in images])
        pixels = pixels[..., :height, :width].astype(self.vision_tower.ln_pre.weight.dtype)
        x = yield from self.vision_tower.hidden(pixels, self._layer)
        return features_of(self.multi_modal_projector(x))


def _not_pixtral(config: Mapping[str, Any]) -> str | None:
    if config["vision_config"].get("model_type") != "pixtral":
        return "a tower other than Pixtral's"
    return several_layers(config)


#: ``PIXTRAL``: Pixtral, in folders of the ``model_type`` llava, and Mistral 3.
PIXTRAL = TowerFamily(
    PixtralTower,
    {
        "vision_tower.vision_model.": "vision_tower.",
        "vision_tower.": "vision_tower.",
        "multi_modal_projector.": "multi_modal_projector.",
    },
    _not_pixtral,
)
