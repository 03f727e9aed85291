"""Decoders of mlx_lm, extended by what transformers' checkpoints and configs have beside.

Classes are in the form of mlx_lm's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import falcon_h1, gemma2, glm, gpt2, gpt_oss
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_parallm.models.checkpoint_names import Weights, without

logger = logging.getLogger(__name__)

SLIDING = "sliding_attention"
#: ``GPT2_BUFFERS``: endings of the names of attention's constants.
GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")


class FalconH1(falcon_h1.Model):
    """Falcon-H1 with all multipliers of transformers.

    mlx_lm multiplies weights once, when they are loaded. It leaves out ``key_multiplier``, and the
    factors of values and biases.
    """

    args: falcon_h1.ModelArgs

    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights, multiplied if they have transformers' form."""
        read: Weights = super().sanitize(weights)
        args = self.args
        if read is weights:
            if (args.key_multiplier, args.attention_in_multiplier) != (1, 1):
                logger.warning(
                    "Weights that mlx_lm converted lack key_multiplier in keys and "
                    "attention_in_multiplier in values: serve transformers' folder instead."
                )
            return read
        factors = self._left_out()
        return {
            name: array * factors[part].astype(array.dtype)
            if (part := ".".join(name.split(".")[-2:])) in factors
            else array
            for name, array in read.items()
        }

    def _left_out(self) -> dict[str, mx.array]:
        """Return factors that mlx_lm leaves out, by the last two parts of weights' names."""
        args = self.args
        gate, down = args.mlp_multipliers
        factors = {
            "k_proj.weight": args.key_multiplier,
            "k_proj.bias": args.key_multiplier,
            "v_proj.weight": args.attention_in_multiplier,
            "o_proj.bias": args.attention_out_multiplier,
            "gate_proj.bias": gate,
            "down_proj.bias": down,
            "out_proj.bias": args.ssm_out_multiplier,
        }
        arrays = {name: mx.array(factor) for name, factor in factors.items()}
        return {**arrays, "in_proj.bias": self.model._mup_vector}


@dataclass
class Gemma2Args(gemma2.ModelArgs):
    """Fields of ``config.json``; ``layer_types`` are alternating if there are none."""

    sliding_window: int | None = 4096
    max_position_embeddings: int = 8192
    layer_types: Sequence[str] | None = None

    @property
    def slides(self) -> list[bool]:
        """True for each layer that attends to the latest tokens only."""
        window = self.sliding_window
        if window is None or window >= self.max_position_embeddings:
            return [False] * self.num_hidden_layers
        if self.layer_types is None:
            return [number % 2 == 0 for number in range(self.num_hidden_layers)]
        return [kind == SLIDING for kind in self.layer_types]


class Gemma2Trunk(gemma2.GemmaModel):
    """The layers, each with the mask of its kind."""

    args: Gemma2Args

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Return hidden states ``[batch, length, size]``."""
        h = self.embed_tokens(inputs) * self.args.hidden_size**0.5
        caches = cache or [None] * len(self.layers)
        slides = self.args.slides
        masks: dict[bool, Any] = {
            kind: create_attention_mask(
                h,
                caches[slides.index(kind)],
                window_size=self.args.sliding_window if kind else None,
                return_array=True,
            )
            for kind in set(slides)
        }
        for layer, kind, each in zip(self.layers, slides, caches, strict=True):
            h = layer(h, masks[kind], each)
        return self.norm(h)


class Gemma2(gemma2.Model):
    """Gemma 2 with the window that every other layer of transformers' has."""

    args: Gemma2Args

    def __init__(self, args: Gemma2Args) -> None:
        super().__init__(args)
        self.model = Gemma2Trunk(args)

    def make_cache(self) -> list[Any]:
        """Return a cache for each layer."""
        window = self.args.sliding_window
        return [
            RotatingKVCache(max_size=window) if kind else KVCache() for kind in self.args.slides
        ]


@dataclass
class GlmArgs(glm.ModelArgs):
    """Fields of ``config.json``."""

    partial_rotary_factor: float = 0.5


class Glm(glm.Model):
    """GLM with the part of each head that transformers turns; mlx_lm turns whole heads."""

    def __init__(self, args: GlmArgs) -> None:
        super().__init__(args)
        size = args.head_dim or args.hidden_size // args.num_attention_heads
        rotary = int(size * args.partial_rotary_factor)
        for layer in self.layers:
            layer.self_attn.rope = nn.RoPE(rotary, traditional=True, base=args.rope_theta)


@dataclass(kw_only=True)
class Gpt2Args(gpt2.ModelArgs):
    """Fields of ``config.json``; ``n_ctx`` is not used, so it may be missing."""

    n_ctx: int = 0
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class Gpt2(gpt2.Model):
    """GPT-2 for checkpoints as transformers writes them today.

    mlx_lm reads the first checkpoints, which are of the bare model. Later ones have the prefix
    ``transformer.``, maybe the tied head, and no ``n_ctx`` in their config. Two fields of it change
    the scale of attention.
    """

    def __init__(self, args: Gpt2Args) -> None:
        super().__init__(args)
        for number, layer in enumerate(self.layers, 1):
            if not args.scale_attn_weights:
                layer.attn.scale = 1.0
            if args.scale_attn_by_inverse_layer_idx:
                layer.attn.scale /= number

    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights by the names of mlx_lm's modules."""
        bare = {
            name.removeprefix("transformer."): array
            for name, array in without(weights, "lm_head.").items()
            if not name.endswith(GPT2_BUFFERS)
        }
        return super().sanitize(bare)


class GptOss(gpt_oss.Model):
    """GPT-OSS with the exact range in which YaRN turns from one frequency to the other.

    mlx_lm takes whole numbers for the ends of that range.
    """

    def __init__(self, args: gpt_oss.ModelArgs) -> None:
        super().__init__(args)
        scaling = args.rope_scaling or {}
        if scaling.get("truncate") is not False or "beta_fast" not in scaling:
            return
        wavelengths = mx.array(exact_wavelengths(args.head_dim, args.rope_theta, **scaling))
        for layer in self.layers:
            layer.self_attn.rope._freqs = wavelengths


def exact_wavelengths(
    dims: int,
    base: float,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
    **_others: object,
) -> np.ndarray:
    """Return tokens per radian for each pair of dimensions, float32 ``[dims / 2]``.

    Source: YaRN, arXiv:2309.00071, section 3.2.
    """

    def dimension(turns: float) -> float:
        """Return the dimension that turns so often within the original context."""
        wavelength = original_max_position_embeddings / (2 * math.pi * turns)
        return dims * math.log(wavelength) / (2 * math.log(base))

    low, high = max(dimension(beta_fast), 0), min(dimension(beta_slow), dims - 1)
    own = base ** (np.arange(0, dims, 2) / dims)
    span = high - low or 0.001
    stretched = np.clip((np.arange(dims // 2) - low) / span, 0, 1)
    return (1 / ((1 - stretched) / own + stretched / (factor * own))).astype(np.float32)


#: ``EXTENDED_DECODERS``: the classes of models and of their fields, by ``model_type``.
EXTENDED_DECODERS: Mapping[str, tuple[type, type]] = {
    "falcon_h1": (FalconH1, falcon_h1.ModelArgs),
    "gemma2": (Gemma2, Gemma2Args),
    "glm": (Glm, GlmArgs),
    "gpt2": (Gpt2, Gpt2Args),
    "gpt_oss": (GptOss, gpt_oss.ModelArgs),
}
