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

from mlx_parallm.models.bert_layers import (
    AttentionMask,
    Pooler,
    activation,
    check_heads,
    key_mask,
)
from mlx_parallm.models.checkpoint_names import Weights, modern_names, with_decoder, without
from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.models.heads import decoded
from mlx_parallm.models.rotary_layers import Rotary, attend_rotary, join_rows
from mlx_parallm.types.errors import ModelLoadError

DECODER = "lm_head.decoder"
WORDS = "new.embeddings.word_embeddings.weight"

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
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048
    type_vocab_size: int = 1
    layer_norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "rope"
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    logn_attention_scale: bool = False

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_attention_heads)
        if self.position_embedding_type not in ("rope", "absolute"):
            raise ModelLoadError(
                f"position_embedding_type {self.position_embedding_type!r} is not known."
            )
        if self.layer_norm_type not in ("layer_norm", "rms_norm"):
            raise ModelLoadError(f"layer_norm_type {self.layer_norm_type!r} is not known.")
        if self.logn_attention_scale:
            raise ModelLoadError("logn_attention_scale is not supported.")

    @property
    def max_length(self) -> int:
        """The longest input, in tokens."""
        return self.max_position_embeddings

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


class Embeddings(nn.Module):
    """Word embeddings the config's position and type embeddings, and a layer norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        dims = args.hidden_size
        self.types = args.type_vocab_size
        self.word_embeddings = nn.Embedding(args.vocab_size, dims)
        if args.position_embedding_type == "absolute":
            self.position_embeddings = nn.Embedding(args.max_position_embeddings, dims)
        if self.types > 0:
            self.token_type_embeddings = nn.Embedding(self.types, dims)
        self.LayerNorm = nn.LayerNorm(dims, eps=args.layer_norm_eps)

    def __call__(self, input_ids: mx.array, token_type_ids: mx.array | None) -> mx.array:
        """Embed int32 ``[batch, length]``; missing token types are 0."""
        hidden = self.word_embeddings(input_ids)
        if self.types > 0:
            # Tokenizers of models with a single type still give a second text type 1.
            single = token_type_ids is None or self.types == 1
            types = mx.zeros((1, 1), mx.int32) if single else token_type_ids
            hidden = hidden + self.token_type_embeddings(types)
        if "position_embeddings" in self:
            hidden = hidden + self.position_embeddings(mx.arange(input_ids.shape[1])[None])
        return self.LayerNorm(hidden)


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


class Encoder(nn.Module):
    """A stack of layers."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.layer = [Layer(args) for _ in range(args.num_hidden_layers)]

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the last hidden states."""
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return hidden


class Trunk(nn.Module):
    """The "new" BERT without its heads."""

    def __init__(self, args: ModelArgs, *, pooler: bool) -> None:
        super().__init__()
        self.embeddings = Embeddings(args)
        self.encoder = Encoder(args)
        if pooler:
            self.pooler = Pooler(args.hidden_size)


class MaskedLMHead(nn.Module):
    """The head of the masked LM; its decoder is the table of word embeddings if tied."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.hidden_size, args.hidden_size)
        self.norm = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)
        self.activation = activation(args.hidden_act)
        self.bias = mx.zeros((args.vocab_size,))
        if not args.tie_word_embeddings:
            self.decoder = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(
        self, hidden: mx.array, words: nn.Embedding, ids: mx.array | None = None
    ) -> mx.array:
        """Return logits ``[..., vocabulary]``; with ``ids`` ``[..., len(ids)]``."""
        hidden = self.norm(self.activation(self.dense(hidden)))
        return decoded(self, hidden, words, ids)


class Model(nn.Module):
    """The "new" BERT with the head of its first architecture."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.has_pooler = args.head == "sequence" or (args.head is None and args.add_pooling_layer)
        self.new = Trunk(args, pooler=self.has_pooler)
        if args.head == "masked_lm":
            self.lm_head = MaskedLMHead(args)
        elif args.head is not None:
            self.classifier = nn.Linear(args.hidden_size, args.num_labels)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None = None,
        token_type_ids: mx.array | None = None,
    ) -> mx.array:
        """Return the last hidden states ``[B, L, D]`` of right-padded int32 ids ``[B, L]``.

        Args:
            input_ids: within the vocabulary.
            attention_mask: ``[B, L]``, 1 or true for tokens, at least one a row; None: no padding.
            token_type_ids: int32 ``[B, L]``; None: all are 0.
        """
        hidden = self.new.embeddings(input_ids, token_type_ids)
        return self.new.encoder(hidden, key_mask(attention_mask))

    def pooled(self, hidden: mx.array) -> mx.array:
        """Pool ``[B, L, D]`` to ``[B, D]``, by the first token."""
        return self.new.pooler(hidden)

    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        """Return logits ``[..., vocabulary]`` of ``[..., D]``; with ``ids`` ``[..., len(ids)]``."""
        return self.lm_head(hidden, self.new.embeddings.word_embeddings, ids)

    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        """Return logits ``[B, labels]`` of ``[B, L, D]``; the mask is not used."""
        return self.classifier(self.pooled(hidden))

    def token_logits(self, hidden: mx.array) -> mx.array:
        """Return logits ``[..., labels]`` of ``[..., D]``."""
        return self.classifier(hidden)

    def sanitize(self, weights: Weights) -> Weights:
        """Return the weights under this model's names, without heads of other tasks."""
        weights = modern_names(
            {_own_name(name): array for name, array in weights.items()},
            "new",
            ("embeddings", "encoder", "pooler"),
        )
        projections = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
        weights = join_rows(weights, projections, "attention.qkv_proj")
        weights = join_rows(weights, ("mlp.up_proj", "mlp.gate_proj"), "mlp.up_gate_proj")
        if not self.has_pooler:
            weights = without(weights, "new.pooler.")
        unused = [part for part in ("classifier", "lm_head") if part not in self]
        weights = without(weights, *(f"{part}." for part in unused))
        if self.args.head != "masked_lm":
            return weights
        table = WORDS if self.args.tie_word_embeddings else None
        return with_decoder(weights, DECODER, "lm_head.bias", table=table)


def _own_name(name: str) -> str:
    """Return a name of transformers 5's format as it is here; other names stay."""
    name = name.removeprefix("gte.")
    for part, own in OWN_NAMES.items():
        name = name.replace(part, own)
    return f"encoder.layer.{name.removeprefix('layers.')}" if name.startswith("layers.") else name
