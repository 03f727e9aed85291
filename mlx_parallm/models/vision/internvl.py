"""InternVL 3 (arXiv:2504.10479): InternViT on tiles of an image, squares of patches in a row.

The parameter names are transformers'. Checkpoints of the ``model_type`` internvl_chat have the
authors' own names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.models.vision.checkpoint import TowerFamily, in_order, several_layers
from mlx_parallm.models.vision.features import Arrays, Layers, Stages, Tower, features_of
from mlx_parallm.models.vision.parts import ACTIVATIONS, FeedForward
from mlx_parallm.numerics.attention import softmax_attention

# NORM_EPS: of norms whose epsilon no config sets.
NORM_EPS = 1e-6
PROJECTOR_EPS = 1e-5
#: ``AUTHORS_FIELDS``: the authors' names of fields of ``vision_config``, and transformers'.
AUTHORS_FIELDS = {"qk_normalization": "use_qk_norm", "qkv_bias": "attention_bias"}
#: ``AUTHORS_NAMES``: patterns of the authors' names of weights, and the tower's names.
AUTHORS_NAMES = (
    (r"embeddings\.class_embedding", "embeddings.cls_token"),
    (r"embeddings\.position_embedding$", "embeddings.position_embeddings"),
    (r"embeddings\.patch_embedding\.", "embeddings.patch_embeddings.projection."),
    (r"encoder\.layers\.", "encoder.layer."),
    (r"\.attn\.proj\.", ".attention.projection_layer."),
    (r"\.attn\.", ".attention."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.ls1$", ".lambda_1"),
    (r"\.ls2$", ".lambda_2"),
    (r"^multi_modal_projector\.0\.", "multi_modal_projector.layer_norm."),
    (r"^multi_modal_projector\.1\.", "multi_modal_projector.linear_1."),
    (r"^multi_modal_projector\.3\.", "multi_modal_projector.linear_2."),
)
#: ``AUTHORS_SETTINGS``: fields of the authors' configs, and the only values that are read: the
#: whole image follows its tiles, images are not padded, and squares of patches are in order.
AUTHORS_SETTINGS = {"use_thumbnail": True, "pad2square": False, "ps_version": "v2"}
# JOINED: the authors' name of queries, keys and values in one layer.
JOINED = ".attention.qkv."


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVisionConfig:
    """The fields of ``vision_config``, by transformers' names."""

    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    attention_bias: bool = False
    use_qk_norm: bool = False
    intermediate_size: int = 4096
    hidden_act: str = "gelu"
    norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-6
    image_size: int = 448
    patch_size: int = 14
    num_channels: int = 3
    use_absolute_position_embeddings: bool = True
    use_mean_pooling: bool = True

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the fields that a config has, by transformers' names or the authors'."""
        named = {AUTHORS_FIELDS.get(name, name): value for name, value in config.items()}
        own = {field.name: named[field.name] for field in fields(cls) if field.name in named}
        for name in ("image_size", "patch_size"):
            if isinstance(own.get(name), list | tuple):
                own[name] = own[name][0]
        return cls(**own)

    @property
    def num_patches(self) -> int:
        """The patches of a tile."""
        return (self.image_size // self.patch_size) ** 2

    def norm(self) -> nn.Module:
        """Return a norm of a layer."""
        kind = nn.RMSNorm if self.norm_type == "rms_norm" else nn.LayerNorm
        return kind(self.hidden_size, eps=self.layer_norm_eps)


class InternAttention(nn.Module):
    """Attention of all patches of a tile."""

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self._num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(size, size, bias=bias)
        self.k_proj = nn.Linear(size, size, bias=bias)
        self.v_proj = nn.Linear(size, size, bias=bias)
        self.projection_layer = nn.Linear(size, size)
        self._is_normed = config.use_qk_norm
        if self._is_normed:
            self.q_norm = nn.RMSNorm(size, eps=NORM_EPS)
            self.k_norm = nn.RMSNorm(size, eps=NORM_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output for ``[tiles, patches, size]``."""
        count, length, size = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self._is_normed:
            q, k = self.q_norm(q), self.k_norm(k)
        heads = [
            each.reshape(count, length, self._num_heads, -1).transpose(0, 2, 1, 3)
            for each in (q, k, v)
        ]
        scale = (size // self._num_heads) ** -0.5
        out = softmax_attention(*heads, scale=scale, mask=None)
        return self.projection_layer(out.transpose(0, 2, 1, 3).reshape(count, length, size))


class InternLayer(nn.Module):
    """A layer, normed before each part and scaled after it."""

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__()
        self.attention = InternAttention(config)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.layernorm_before = config.norm()
        self.layernorm_after = config.norm()
        self.lambda_1 = mx.ones((config.hidden_size,))
        self.lambda_2 = mx.ones((config.hidden_size,))

    def __call__(self, x: mx.array) -> mx.array:
        """Return the hidden states after this layer."""
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        return x + self.lambda_2 * self.mlp(self.layernorm_after(x))


class InternPatches(nn.Module):
    """Patches as embeddings."""

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__()
        self.projection = nn.Conv2d(
            config.num_channels,
            config.hidden_size,
            kernel_size=config.patch_size,
            stride=config.patch_size,
        )


class InternEmbeddings(nn.Module):
    """Patches with positions, after an embedding of the class."""

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.cls_token = mx.zeros((1, 1, size))
        self.patch_embeddings = InternPatches(config)
        self._has_positions = config.use_absolute_position_embeddings
        if self._has_positions:
            self.position_embeddings = mx.zeros((1, config.num_patches + 1, size))

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return embeddings ``[tiles, 1 + patches, size]`` of ``[tiles, 3, h, w]``."""
        patches = self.patch_embeddings.projection(pixels.transpose(0, 2, 3, 1))
        count, size = patches.shape[0], patches.shape[-1]
        of_class = mx.broadcast_to(self.cls_token, (count, 1, size))
        x = mx.concatenate([of_class, patches.reshape(count, -1, size)], axis=1)
        return x + self.position_embeddings if self._has_positions else x


class InternLayers(nn.Module):
    """The layers."""

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__()
        self.layer = [InternLayer(config) for _ in range(config.num_hidden_layers)]


class InternTransformer(nn.Module):
    """The tower without a projector."""

    def __init__(self, config: InternVisionConfig) -> None:
        super().__init__()
        self.embeddings = InternEmbeddings(config)
        self.encoder = InternLayers(config)
        self._has_norm = not config.use_mean_pooling
        if self._has_norm:
            self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def num_layers(self, layer: int) -> int:
        """Return how many layers run until an index of ``hidden_states`` of transformers."""
        return layer % (len(self.encoder.layer) + 1)

    def hidden(self, pixels: mx.array, layer: int) -> Layers:
        """Compute hidden states ``[tiles, 1 + patches, size]``, see ``num_layers``."""
        x = self.embeddings(pixels)
        for each in self.encoder.layer[: self.num_layers(layer)]:
            x = each(x)
            yield x
        return self.layernorm(x) if self._has_norm and layer == -1 else x


class InternProjector(nn.Module):
    """Norms rows and projects them by two layers to the text model's width."""

    def __init__(self, width: int, text_width: int, activation: str) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width, eps=PROJECTOR_EPS)
        self.linear_1 = nn.Linear(width, text_width)
        self.linear_2 = nn.Linear(text_width, text_width)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[..., text width]``."""
        return self.linear_2(self._activation(self.linear_1(self.layer_norm(x))))


class InternTower(Tower):
    """InternViT and the projector."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = InternVisionConfig.of(config["vision_config"])
        text = config.get("text_config") or config["llm_config"]
        self._layer: int = config.get("vision_feature_layer", config.get("select_layer", -1))
        self._drops_class = config.get("vision_feature_select_strategy", "default") == "default"
        self._side = round(1 / config.get("downsample_ratio", 0.5))
        self.vision_tower = InternTransformer(vision)
        self.multi_modal_projector = InternProjector(
            vision.hidden_size * self._side**2,
            text["hidden_size"],
            config.get("projector_hidden_act", "gelu"),
        )

    @property
    @override
    def num_stages(self) -> int:
        return self.vision_tower.num_layers(self._layer) + 1

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        pixels = mx.concatenate([arrays["pixel_values"] for arrays in images])
        dtype = self.vision_tower.embeddings.cls_token.dtype
        x = yield from self.vision_tower.hidden(pixels.astype(dtype), self._layer)
        rows = self.multi_modal_projector(self._squares(x[:, 1:] if self._drops_class else x))
        return features_of(rows.reshape(len(images), -1, rows.shape[-1]))

    def _squares(self, x: mx.array) -> mx.array:
        """Return squares of patches as one row each, row by row, and so within each square."""
        count, num_patches, size = x.shape
        side, units = self._side, math.isqrt(num_patches) // self._side
        x = x.reshape(count, units, side, units, side, size).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(count, units**2, -1)


def _by_own_names(name: str, weight: mx.array) -> dict[str, mx.array]:
    """Return weights of a checkpoint by the tower's names, from transformers' or the authors'."""
    for pattern, own in AUTHORS_NAMES:
        name = re.sub(pattern, own, name)
    if JOINED not in name:
        return in_order(name, weight)
    parts = mx.split(weight, 3, axis=0)
    names = (name.replace(JOINED, f".attention.{kind}_proj.") for kind in "qkv")
    return dict(zip(names, parts, strict=True))


def _not_internvl(config: Mapping[str, Any]) -> str | None:
    """Return what a config has that this tower or its image processor lacks."""
    for name, expected in AUTHORS_SETTINGS.items():
        if config.get(name, expected) != expected:
            return f"{name} {config[name]}"
    side = InternVisionConfig.of(config["vision_config"]).image_size
    if config.get("force_image_size", side) != side:
        return f"force_image_size {config['force_image_size']} with a tower for {side}"
    return several_layers(config)


#: ``INTERNVL``: InternVL 3.
INTERNVL = TowerFamily(
    InternTower,
    {
        "vision_tower.": "vision_tower.",
        "vision_model.": "vision_tower.",
        "multi_modal_projector.": "multi_modal_projector.",
        "mlp1.": "multi_modal_projector.",
    },
    _not_internvl,
    converted=_by_own_names,
)
