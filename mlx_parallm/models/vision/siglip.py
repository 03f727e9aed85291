"""SigLIP's vision transformer (arXiv:2303.15343), with the parameter names of transformers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.vision.clip import ClipConfig, ClipEncoder
from mlx_parallm.models.vision.features import Layers


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
        self.encoder = ClipEncoder(config)
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
