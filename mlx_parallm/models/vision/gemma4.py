"""The tower of Gemma 4: patches of images of any shape, squares of them averaged to one row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.vision.checkpoint import TowerFamily, in_order
from mlx_parallm.models.vision.features import (
    Arrays,
    Layers,
    Stages,
    Tower,
    TwoWay,
    features_of,
)
from mlx_parallm.models.vision.parts import GatedFeedForward, LayerStack, turned
from mlx_parallm.numerics.attention import softmax_attention

# LIMITS: the names of clipped layers' bounds.
LIMITS = ("input_min", "input_max", "output_min", "output_max")
# UNBOUNDED: bounds of at least this clip nothing. Checkpoints have infinite ones, but weights must
# be finite in any dtype: float16 and bfloat16 both have this power of two.
UNBOUNDED = 2.0**15
# PADDING: the position of patches that the image processor adds.
PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionConfig:
    """The fields of ``vision_config``, by transformers' names."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Return the fields that a config has."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in config.items() if name in names}
        rope = config.get("rope_parameters") or {}
        return cls(**{**own, **{name: rope[name] for name in rope if name == "rope_theta"}})


class ClippedLinear(nn.Module):
    """A linear layer whose inputs and outputs may be clipped to bounds of the checkpoint."""

    def __init__(self, inputs: int, outputs: int, *, is_clipped: bool) -> None:
        super().__init__()
        self._is_clipped = is_clipped
        self.linear = nn.Linear(inputs, outputs, bias=False)
        if is_clipped:
            for name in LIMITS:
                setattr(self, name, mx.array(0.0))

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output for ``[..., inputs]``."""
        if not self._is_clipped:
            return self.linear(x)
        return self._clipped(self.linear(self._clipped(x, "input")), "output")

    def _clipped(self, x: mx.array, side: str) -> mx.array:
        return mx.clip(x, _bound(self[f"{side}_min"]), _bound(self[f"{side}_max"]))


def _bound(stored: mx.array) -> mx.array:
    """Return a bound of a clipped layer, which is infinite if it clips nothing."""
    return mx.where(mx.abs(stored) < UNBOUNDED, stored, stored * math.inf)


class Gemma4Attention(nn.Module):
    """Attention of all patches of an image, turned by their columns and rows."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self._eps = config.rms_norm_eps
        self._head_dim = size = config.head_dim
        width, clipped = config.hidden_size, config.use_clipped_linears
        num_heads, num_kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = ClippedLinear(width, num_heads * size, is_clipped=clipped)
        self.k_proj = ClippedLinear(width, num_kv * size, is_clipped=clipped)
        self.v_proj = ClippedLinear(width, num_kv * size, is_clipped=clipped)
        self.o_proj = ClippedLinear(num_heads * size, width, is_clipped=clipped)
        self.q_norm = nn.RMSNorm(size, eps=self._eps)
        self.k_norm = nn.RMSNorm(size, eps=self._eps)

    def __call__(self, x: mx.array, turns: tuple[mx.array, mx.array]) -> mx.array:
        """Return the output for ``[images, patches, size]``.

        The angles are by column and by row.
        """
        count, length = x.shape[:2]
        q, k, v = (
            layer(x).reshape(count, length, -1, self._head_dim)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _turned(self.q_norm(q), turns), _turned(self.k_norm(k), turns)
        v = mx.fast.rms_norm(v, None, self._eps)
        heads = [each.transpose(0, 2, 1, 3) for each in (q, k, v)]
        out = softmax_attention(*heads, scale=1.0, mask=None)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(count, length, -1))


def _turned(x: mx.array, turns: tuple[mx.array, mx.array]) -> mx.array:
    """Return ``x`` with one half of each head turned by each of the angles.

    Args:
        x: ``[images, patches, heads, size]``.
        turns: by column and by row, ``[patches, size / 4]`` each.
    """
    halves = zip(mx.split(x, 2, axis=-1), turns, strict=True)
    return mx.concatenate([turned(half, angles) for half, angles in halves], axis=-1)


class Gemma4Layer(nn.Module):
    """A layer, normed before and after each part."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Gemma4Attention(config)
        self.mlp = GatedFeedForward(
            size,
            config.intermediate_size,
            config.hidden_activation,
            partial(ClippedLinear, is_clipped=config.use_clipped_linears),
        )
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)

    def __call__(self, x: mx.array, turns: tuple[mx.array, mx.array]) -> mx.array:
        """Return the hidden states after this layer."""
        attended = self.self_attn(self.input_layernorm(x), turns)
        x = x + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(inner)


class Gemma4Patches(nn.Module):
    """Patches as embeddings, with one position each for column and row."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_proj = nn.Linear(3 * config.patch_size**2, size, bias=False)
        self.position_embedding_table = mx.zeros((2, config.position_embedding_size, size))

    def __call__(self, pixels: mx.array, places: mx.array) -> mx.array:
        """Return ``[images, patches, size]``.

        Args:
            pixels: from 0 to 1, ``[images, patches, 3 * side²]``.
            places: column and row of each patch, ``[patches, 2]``.
        """
        dtype = self.position_embedding_table.dtype
        x = self.input_proj((2 * (pixels - 0.5)).astype(dtype))
        columns, rows = self.position_embedding_table
        return x + columns[places[:, 0]] + rows[places[:, 1]]


class Gemma4Transformer(nn.Module):
    """The tower without a projector."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self._config = config
        self.patch_embedder = Gemma4Patches(config)
        self.encoder = LayerStack(Gemma4Layer(config) for _ in range(config.num_hidden_layers))
        if config.standardize:
            self.std_bias = mx.zeros((config.hidden_size,))
            self.std_scale = mx.ones((config.hidden_size,))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.encoder.layers)

    def rows(self, pixels: mx.array, places: np.ndarray) -> Layers:
        """Compute rows ``[images, squares, size]``.

        Args:
            pixels: ``[images, patches, 3 * side²]``, row by row.
            places: column and row of each patch, ``[patches, 2]``.
        """
        turns = self._turns(places)
        x = self.patch_embedder(pixels, mx.array(places))
        for layer in self.encoder.layers:
            x = layer(x, turns)
            yield x
        columns, rows = (places.max(axis=0) + 1).tolist()
        side = self._config.pooling_kernel_size
        count, _, size = x.shape
        shape = count, rows // side, side, columns // side, side, size
        squares = x.astype(mx.float32).reshape(shape)
        pooled = squares.mean(axis=(2, 4)).reshape(count, -1, size) * size**0.5
        if self._config.standardize:
            bias, scale = (each.astype(mx.float32) for each in (self.std_bias, self.std_scale))
            pooled = (pooled - bias) * scale
        return pooled.astype(x.dtype)

    def _turns(self, places: np.ndarray) -> tuple[mx.array, mx.array]:
        """Return the angles ``[patches, size / 4]`` by column, and those by row."""
        half = self._config.head_dim // 2
        exponents = np.arange(0, half, 2, dtype=np.float32) / half
        frequencies = np.float32(self._config.rope_theta) ** -exponents
        angles = places.astype(np.float32)[:, :, None] * frequencies
        return mx.array(angles[:, 0]), mx.array(angles[:, 1])


class Gemma4Projector(nn.Module):
    """Norms rows and projects them to the text model's width."""

    def __init__(self, width: int, text_width: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.embedding_projection = nn.Linear(width, text_width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[..., text width]``."""
        return self.embedding_projection(mx.fast.rms_norm(x, None, self._eps))


class Gemma4Tower(Tower):
    """The tower and the projector."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = Gemma4VisionConfig.of(config["vision_config"])
        text_width = config["text_config"]["hidden_size"]
        self.vision_tower = Gemma4Transformer(vision)
        self.embed_vision = Gemma4Projector(vision.hidden_size, text_width, vision.rms_norm_eps)
        # mlx_lm multiplies embeddings, and rows in their place, by this number.
        self._scale = text_width**0.5

    @property
    @override
    def num_stages(self) -> int:
        return self.vision_tower.num_layers + 1

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        places = np.array(images[0]["image_position_ids"])[0].astype(np.int32)
        places = places[(places != PADDING).all(axis=-1)]
        pixels = mx.concatenate([arrays["pixel_values"] for arrays in images])
        rows = yield from self.vision_tower.rows(pixels[:, : len(places)], places)
        return features_of(self.embed_vision(rows), scale=self._scale)


def _not_gemma4(config: Mapping[str, Any]) -> str | None:
    tower = config["vision_config"].get("model_type", "gemma4_vision")
    if tower != "gemma4_vision":
        return f"a tower of the model_type {tower}"
    setting = config.get("text_config", {}).get("use_bidirectional_attention")
    return None if setting in (None, "vision") else f"use_bidirectional_attention {setting!r}"


def two_way_of(config: Mapping[str, Any]) -> TwoWay | None:
    """Return which layers read an image both ways: none in the smaller models."""
    setting = config.get("text_config", {}).get("use_bidirectional_attention")
    return TwoWay.SLIDING_LAYERS if setting == "vision" else None


def _with_finite_limits(name: str, weight: mx.array) -> dict[str, mx.array]:
    """Return a weight by its name; bounds that clip nothing are large instead of infinite."""
    if name.endswith(LIMITS):
        return {name: mx.clip(weight, -UNBOUNDED, UNBOUNDED)}
    return in_order(name, weight)


#: ``GEMMA4``: Gemma 4.
GEMMA4 = TowerFamily(
    Gemma4Tower,
    {"vision_tower.": "vision_tower.", "embed_vision.": "embed_vision."},
    _not_gemma4,
    two_way=two_way_of,
    converted=_with_finite_limits,
)
