"""Gemma 3 (arXiv:2503.19786): patches of SigLIP in squares, each averaged to one row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.vision.checkpoint import TowerFamily
from mlx_parallm.models.vision.clip import ClipConfig, SiglipTransformer
from mlx_parallm.models.vision.features import Arrays, Stages, Tower, TwoWay, features_of

# SIGLIP: what transformers' SiglipVisionConfig has where a config is silent.
SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "patch_size": 16}


class ShiftedNorm(nn.Module):
    """RMSNorm by 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.zeros((size,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """Return normed rows ``[..., size]``."""
        return mx.fast.rms_norm(x, 1.0 + self.weight, self._eps)


class GemmaProjector(nn.Module):
    """Averages squares of patches, and projects these to the text model's width."""

    def __init__(self, config: dict[str, Any], vision: ClipConfig) -> None:
        super().__init__()
        text_width = config["text_config"]["hidden_size"]
        self._side = math.isqrt(int(config.get("mm_tokens_per_image", 256)))
        self.mm_input_projection_weight = mx.zeros((vision.hidden_size, text_width))
        self.mm_soft_emb_norm = ShiftedNorm(vision.hidden_size, vision.layer_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Return rows ``[images, tokens, text width]`` of ``[images, patches, size]``."""
        count, num_patches, size = x.shape
        side = self._side
        pooled = math.isqrt(num_patches) // side
        squares = x.reshape(count, side, pooled, side, pooled, size)
        rows = squares.mean(axis=(2, 4)).reshape(count, side * side, size)
        return self.mm_soft_emb_norm(rows) @ self.mm_input_projection_weight


class GemmaTower(Tower):
    """SigLIP and the projector."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config`` is the checkpoint's ``config.json``."""
        super().__init__()
        vision = ClipConfig.of({**SIGLIP, **config["vision_config"]})
        self.vision_tower = SiglipTransformer(vision)
        self.multi_modal_projector = GemmaProjector(config, vision)
        # mlx_lm multiplies embeddings, and rows in their place, by this number in bfloat16.
        width = config["text_config"]["hidden_size"]
        rounded = mx.array(width**0.5, mx.bfloat16).astype(mx.float32)
        self._scale = float(np.array(rounded))

    @property
    @override
    def num_stages(self) -> int:
        return self.vision_tower.num_layers + 1

    @override
    def stages(self, images: Sequence[Arrays]) -> Stages:
        dtype = self.vision_tower.post_layernorm.weight.dtype
        pixels = mx.concatenate([arrays["pixel_values"] for arrays in images])
        x = yield from self.vision_tower.hidden(pixels.astype(dtype))
        rows = self.multi_modal_projector(x)
        return features_of(rows.reshape(len(images), -1, rows.shape[-1]), scale=self._scale)


#: ``GEMMA``: Gemma 3.
GEMMA = TowerFamily(
    GemmaTower,
    {
        "vision_tower.vision_model.": "vision_tower.",
        "vision_tower.": "vision_tower.",
        "multi_modal_projector.": "multi_modal_projector.",
    },
    two_way=lambda config: TwoWay.ALL_LAYERS,
)
