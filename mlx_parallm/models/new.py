"""GTE's "new" BERT (Zhang et al., 2024, mGTE, arXiv:2407.19669): rotary positions, a gated MLP.

Two formats of checkpoints load: that of the Alibaba-NLP/gte models, whose code came with the
checkpoint, and transformers 5's own, ``gte``. Names of parameters are those of the former.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.models.bert_layers import (
    AttentionMask,
    Embeddings,
    Encoder,
    Pooler,
    activation,
    key_mask,
)
from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.models.heads import EncoderModel, LMHead, uses_pooler
from mlx_parallm.models.rotary_layers import Rotary, attend_rotary, join_rows
from mlx_parallm.types.errors import ModelLoadError

#: ``OWN_NAMES``: parts of names in transformers 5's format, and their names here.
OWN_NAMES = {
    "self_attn.": "attention.",
    "post_attention_layernorm.": "attn_ln.",
    "post_mlp_layernorm.": "mlp_ln.",
    "lm_head.layer_norm.": "lm_head.norm.",
}


@dataclass
class ModelArgs(EncoderArgs):
    """The config of the "new" BERT, in either format; defaults are its own.

    ``rope_parameters`` is transformers 5's; the other format has ``rope_theta``, ``rope_scaling``.
    """

    model_type: str = "new"
    vocab_size: int = 30528
    max_position_embeddings: int = 2048
    type_vocab_size: int = 1
    layer_norm_type: str = "layer_norm"
    position_embedding_type: str = "rope"
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    logn_attention_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position_embedding_type not in ("rope", "absolute"):
            raise ModelLoadError(
                f"position_embedding_type {self.position_embedding_type!r} is not known."
            )
        if self.layer_norm_type not in ("layer_norm", "rms_norm"):
            raise ModelLoadError(f"layer_norm_type {self.layer_norm_type!r} is not known.")
        if self.logn_attention_scale:
            raise ModelLoadError("logn_attention_scale is not supported.")

    @property
    def rotary(self) -> Rotary | None:
        """The rotation of queries and keys; None: positions are embedded instead.

        Raises:
            ModelLoadError: positions are scaled in a way that is not supported.
        """
        if self.position_embedding_type == "absolute":
            return None
        dims = self.hidden_size // self.num_attention_heads
        settings = self.rope_parameters or {}
        default = 160_000.0 if self.model_type == "gte" else 10_000.0
        theta = float(settings.get("rope_theta") or self.rope_theta or default)
        scaling = self.rope_scaling or settings
        kind = scaling.get("type") or scaling.get("rope_type") or "default"
        if kind == "default":
            return Rotary(dims, theta)
        if kind != "ntk":
            raise ModelLoadError(f"rope_scaling of type {kind!r} is not default or ntk.")
        return Rotary(
            dims,
            wavelengths=ntk_wavelengths(
                dims, theta, float(scaling["factor"]), scaling.get("mixed_b")
            ),
        )


def ntk_wavelengths(dims: int, theta: float, factor: float, mixed: float | None) -> mx.array:
    """Return wavelengths for texts longer than in training, by the fixed or mixed NTK rule.

    Su Jianlin, "Transformer upgrade road, 16" (https://kexue.fm/archives/9706), formulas 6 and 10
    to 13; GTE applies them to texts of every length.

    Args:
        dims: dimensions of a head.
        theta: base of the wavelengths in training.
        factor: factor by which texts may be longer; 1 or less changes nothing.
        mixed: the exponent of the mixed rule; None: the fixed rule.

    Returns:
        float32 ``[dims / 2]``.
    """
    pairs = np.arange(dims // 2)
    if factor <= 1:
        waves = theta ** (2 * pairs / dims)
    elif mixed is None:
        waves = (theta * factor) ** (2 * pairs / dims) * factor ** (2 / dims)
    else:
        growth = math.log(factor) / (dims / 2) ** mixed
        waves = theta ** (2 * pairs / dims) * np.exp(growth * (pairs + 1) ** mixed)
    return mx.array(waves.astype(np.float32))


def norm(args: ModelArgs) -> nn.LayerNorm | nn.RMSNorm:
    """Return a layer's norm with the config's settings."""
    kind = nn.RMSNorm if args.layer_norm_type == "rms_norm" else nn.LayerNorm
    return kind(args.hidden_size, eps=args.layer_norm_eps)


class Attention(nn.Module):
    """Attention and its output projection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        dims = args.hidden_size
        self.heads = args.num_attention_heads
        self.rotary = args.rotary
        self.qkv_proj = nn.Linear(dims, 3 * dims)
        self.o_proj = nn.Linear(dims, dims)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Mix the tokens that the mask allows."""
        return self.o_proj(attend_rotary(self.qkv_proj(hidden), self.heads, self.rotary, mask))


class GatedMLP(nn.Module):
    """The feed-forward part: the second half of the first projection gates the first."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.up_gate_proj = nn.Linear(args.hidden_size, 2 * args.intermediate_size, bias=False)
        self.down_proj = nn.Linear(args.intermediate_size, args.hidden_size)
        self.activation = activation(args.hidden_act)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return hidden states of the same shape."""
        up, gate = mx.split(self.up_gate_proj(hidden), 2, axis=-1)
        return self.down_proj(up * self.activation(gate))


class Layer(nn.Module):
    """A transformer layer with norms after the residual connections."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.mlp = GatedMLP(args)
        self.attn_ln = norm(args)
        self.mlp_ln = norm(args)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the hidden states after this layer."""
        hidden = self.attn_ln(hidden + self.attention(hidden, mask))
        return self.mlp_ln(hidden + self.mlp(hidden))


class Trunk(nn.Module):
    """The "new" BERT without its heads."""

    def __init__(self, args: ModelArgs, *, pooler: bool) -> None:
        super().__init__()
        self.num_types = args.type_vocab_size
        is_absolute = args.position_embedding_type == "absolute"
        self.embeddings = Embeddings(
            args.vocab_size,
            args.hidden_size,
            positions=args.max_position_embeddings if is_absolute else 0,
            token_types=self.num_types,
            eps=args.layer_norm_eps,
        )
        self.encoder = Encoder(Layer(args) for _ in range(args.num_hidden_layers))
        if pooler:
            self.pooler = Pooler(args.hidden_size)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids."""
        # Tokenizers of models with a single type still give a second text type 1.
        types = None if self.num_types == 1 else token_type_ids
        return self.encoder(self.embeddings(input_ids, types), key_mask(attention_mask))


class Model(EncoderModel):
    """The "new" BERT with the head of its first architecture."""

    trunk_name = "new"

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, Trunk(args, pooler=uses_pooler(args)))
        if args.head == "masked_lm":
            self.lm_head = LMHead(
                args.hidden_size,
                args.vocab_size,
                activation(args.hidden_act),
                tied=args.tie_word_embeddings,
                eps=args.layer_norm_eps,
                norm="norm",
            )
        elif args.head is not None:
            self.classifier = nn.Linear(args.hidden_size, args.num_labels)

    @override
    def renamed(self, weights: Weights) -> Weights:
        weights = super().renamed({_own_name(name): array for name, array in weights.items()})
        projections = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
        weights = join_rows(weights, projections, "attention.qkv_proj")
        return join_rows(weights, ("mlp.up_proj", "mlp.gate_proj"), "mlp.up_gate_proj")

    @override
    def unused(self) -> list[str]:
        return [*super().unused(), *(() if "classifier" in self else ("classifier.",))]


def _own_name(name: str) -> str:
    """Return a name of transformers 5's format as it is here; other names stay."""
    name = name.removeprefix("gte.")
    for part, own in OWN_NAMES.items():
        name = name.replace(part, own)
    return f"encoder.layer.{name.removeprefix('layers.')}" if name.startswith("layers.") else name
