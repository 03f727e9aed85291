"""Idefics3 (arXiv:2408.12637) and SmolVLM: SigLIP's patches of tiles, squares of them in a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.models.vision.checkpoint import TowerFamily
from mlx_parallm.models.vision.clip import ClipConfig, SiglipTransformer
from mlx_parallm.models.vision.features import Arrays, Stages, Tower, features_of

# SIGLIP: what transformers' Idefics3VisionConfig has where a config is silent.
SIGLIP = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class SimpleProjection(nn.Module):
    """One linear layer, by transformers' name."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, out, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[..., out]``."""
        return self.proj(x)


class Connector(nn.Module):
    """Puts squares of patches into one row, and projects it to the text model's width."""

    def __init__(self, width: int, side: int, out: int) -> None:
        """``side`` is how many patches a square has along each side."""
        super().__init__()
        self._side = side
        self.modality_projection = SimpleProjection(width * side**2, out)

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[tiles, squares, out]`` of ``[tiles, patches, size]``."""
        count, num_patches, size = x.shape
        side, units = self._side, math.isqrt(num_patches) // self._side
        squares = x.reshape(count, units, side, units, side, size).transpose(0, 1, 3, 2, 4, 5)
        return self.modality_projection(squares.reshape(count, units**2, -1))


class Idefics3Tower(Tower):
    """SigLIP and the connector."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = ClipConfig.of({**SIGLIP, **config["vision_config"]})
        self.vision_model = SiglipTransformer(vision)
        self.connector = Connector(
            vision.hidden_size,
            int(config.get("scale_factor", 2)),
            config["text_config"]["hidden_size"],
        )

    @property
    @override
    def num_stages(self) -> int:
        return self.vision_model.num_layers + 1

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        """The tiles of one image are all full."""
        dtype = self.vision_model.post_layernorm.weight.dtype
        tiles = mx.concatenate([arrays["pixel_values"][0] for arrays in images])
        x = yield from self.vision_model.hidden(tiles.astype(dtype))
        rows = self.connector(x)
        return features_of(rows.reshape(len(images), -1, rows.shape[-1]))


#: ``IDEFICS3``: Idefics3 and SmolVLM.
IDEFICS3 = TowerFamily(
    Idefics3Tower, {"vision_model.": "vision_model.", "connector.": "connector."}
)
