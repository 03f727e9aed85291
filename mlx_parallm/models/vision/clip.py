"""The vision transformers of CLIP (arXiv:2103.00020) and SigLIP (arXiv:2303.15343).

Parameters have the names of transformers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.vision.features import Layers
from mlx_parallm.models.vision.parts import FeedForward, LayerStack
from mlx_parallm.numerics.attention import softmax_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """The fields of ``vision_config``, by transformers' names."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Return the fields that a config has."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in names})


class ClipAttention(nn.Module):
    """Attention of all patches to all."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output for ``[images, patches, size]``."""
        count, length, size = x.shape
        heads = [
            layer(x).reshape(count, length, self.num_heads, -1).transpose(0, 2, 1, 3)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        scale = (size // self.num_heads) ** -0.5
        out = softmax_attention(*heads, scale=scale, mask=None)
        return self.out_proj(out.transpose(0, 2, 1, 3).reshape(count, length, size))


class ClipLayer(nn.Module):
    """A layer, normed before each part."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = ClipAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the hidden states after this layer."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class ClipEmbeddings(nn.Module):
    """Patches as embeddings with positions, after an embedding of the class."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        num_patches = (config.image_size // config.patch_size) ** 2
        self.class_embedding = mx.zeros((config.hidden_size,))
        self.patch_embedding = nn.Conv2d(
            config.num_channels,
            config.hidden_size,
            kernel_size=config.patch_size,
            stride=config.patch_size,
            bias=False,
        )
        self.position_embedding = nn.Embedding(num_patches + 1, config.hidden_size)

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return embeddings ``[images, 1 + patches, size]`` of ``[images, 3, h, w]``."""
        patches = self.patch_embedding(pixels.transpose(0, 2, 3, 1))
        count, size = patches.shape[0], patches.shape[-1]
        of_class = mx.broadcast_to(self.class_embedding, (count, 1, size))
        x = mx.concatenate([of_class, patches.reshape(count, -1, size)], axis=1)
        return x + self.position_embedding.weight


class ClipTransformer(nn.Module):
    """The tower below its last norm."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.embeddings = ClipEmbeddings(config)
        # The name is transformers'.
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = LayerStack(ClipLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def layer_numbers(self, layers: Sequence[int]) -> list[int]:
        """Return how many layers run until each of some ``hidden_states`` of transformers.

        Index 0 are the embeddings, -1 the states after the last layer.
        """
        count = len(self.encoder.layers) + 1
        return [layer % count for layer in layers]

    def hidden(
        self, pixels: mx.array, layers: Sequence[int]
    ) -> Generator[mx.array, None, list[mx.array]]:
        """Compute hidden states ``[images, 1 + patches, size]``, a layer at a time.

        Args:
            pixels: ``[images, 3, h, w]``.
            layers: after which layers, see ``layer_numbers``.

        Yields:
            The states after each layer up to the last of these.

        Returns:
            The states after each of these.
        """
        x = self.pre_layrnorm(self.embeddings(pixels))
        numbers = self.layer_numbers(layers)
        states = {0: x}
        for number, layer in enumerate(self.encoder.layers[: max(numbers)], 1):
            x = layer(x)
            if number in numbers:
                states[number] = x
            yield x
        return [states[number] for number in numbers]


class SiglipEmbeddings(nn.Module):
    """Patches as embeddings with positions."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            config.num_channels,
            config.hidden_size,
            kernel_size=config.patch_size,
            stride=config.patch_size,
        )
        num_patches = (config.image_size // config.patch_size) ** 2
        self.position_embedding = nn.Embedding(num_patches, config.hidden_size)

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return embeddings ``[images, patches, size]`` of ``[images, 3, h, w]``."""
        patches = self.patch_embedding(pixels.transpose(0, 2, 3, 1))
        x = patches.reshape(patches.shape[0], -1, patches.shape[-1])
        return x + self.position_embedding.weight


class SiglipTransformer(nn.Module):
    """The tower without its head; its layers are CLIP's."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(config)
        self.encoder = LayerStack(ClipLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.encoder.layers)

    def hidden(self, pixels: mx.array) -> Layers:
        """Compute hidden states ``[images, patches, size]`` of ``[images, 3, h, w]``."""
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
            yield x
        return self.post_layernorm(x)
