"""mlx_lm's GLM, with the part of each head that transformers turns."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.nn as nn
from mlx_lm.models import glm


@dataclass
class ModelArgs(glm.ModelArgs):
    """Fields of ``config.json``."""

    partial_rotary_factor: float = 0.5


class Model(glm.Model):
    """mlx_lm's model, which turns whole heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        size = args.head_dim or args.hidden_size // args.num_attention_heads
        rotary = int(size * args.partial_rotary_factor)
        for layer in self.layers:
            layer.self_attn.rope = nn.RoPE(rotary, traditional=True, base=args.rope_theta)
