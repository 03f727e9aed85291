"""ModernBERT (Warner et al., 2024, arXiv:2412.13663): layers with local and with global attention.

Names of parameters are those of Hugging Face's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.models.bert_layers import AttentionMask, activation, key_mask
from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.models.heads import EncoderModel, Transform, VocabularyBias, vocabulary_logits
from mlx_parallm.models.local_attention import attend_near
from mlx_parallm.models.rotary_layers import Rotary, attend_rotary
from mlx_parallm.types.errors import ModelLoadError

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass
class ModelArgs(EncoderArgs):
    """The config of ModernBERT; defaults are Hugging Face's.

    ``layer_types`` and ``rope_parameters`` are transformers 5's; older configs have
    ``global_attn_every_n_layers`` and a theta each for global and local layers.
    """

    vocab_size: int = 50368
    initializer_cutoff_factor: float | None = 2.0
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decoder_bias: bool = True
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    classifier_pooling: str = "cls"
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: list[LayerType] = field(default_factory=list)
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classifier_pooling not in ("cls", "mean"):
            raise ModelLoadError(f"classifier_pooling {self.classifier_pooling!r} is not known.")
        if not self.layer_types:
            every = self.global_attn_every_n_layers
            self.layer_types = [
                "sliding_attention" if number % every else "full_attention"
                for number in range(self.num_hidden_layers)
            ]
        if self.local_attention < 2:
            raise ModelLoadError(f"local_attention {self.local_attention} is less than 2.")
        if unknown := set(self.layer_types) - set(get_args(LayerType)):
            raise ModelLoadError(f"layer_types has unknown types: {', '.join(sorted(unknown))}.")

    def rotary(self, layer_type: LayerType) -> Rotary:
        """Return how layers of this type rotate queries and keys.

        Raises:
            ModelLoadError: positions are scaled in a way that is not supported.
        """
        theta = self.global_rope_theta
        if layer_type == "sliding_attention" and self.local_rope_theta is not None:
            theta = self.local_rope_theta
        settings = (self.rope_parameters or {}).get(layer_type) or {}
        if (kind := settings.get("rope_type", "default")) != "default":
            raise ModelLoadError(f"rope_type {kind!r} is not supported for ModernBERT.")
        dims = self.hidden_size // self.num_attention_heads
        return Rotary(dims, float(settings.get("rope_theta", theta)))


def norm(args: ModelArgs) -> nn.LayerNorm:
    """Return a layer norm with the config's settings."""
    return nn.LayerNorm(args.hidden_size, eps=args.norm_eps, bias=args.norm_bias)


class Embeddings(nn.Module):
    """Word embeddings and a layer norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.norm = norm(args)

    def __call__(self, input_ids: mx.array) -> mx.array:
        """Embed int32 ``[batch, length]``."""
        return self.norm(self.tok_embeddings(input_ids))


class Attention(nn.Module):
    """Attention with rotary positions and its output projection."""

    def __init__(self, args: ModelArgs, layer_type: LayerType) -> None:
        super().__init__()
        dims = args.hidden_size
        self.heads = args.num_attention_heads
        self.rotary = args.rotary(layer_type)
        self.reach = args.local_attention // 2 if layer_type == "sliding_attention" else None
        self.Wqkv = nn.Linear(dims, 3 * dims, bias=args.attention_bias)
        self.Wo = nn.Linear(dims, dims, bias=args.attention_bias)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Mix nearby tokens that the mask, boolean ``[B, 1, 1, L]``, allows."""
        packed = self.Wqkv(hidden)
        if self.reach is None:
            return self.Wo(attend_rotary(packed, self.heads, self.rotary, mask))
        return self.Wo(attend_near(packed, self.heads, self.rotary, mask, self.reach))


class GatedMLP(nn.Module):
    """The feed-forward part: one half of the first projection gates the other."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.Wi = nn.Linear(args.hidden_size, 2 * args.intermediate_size, bias=args.mlp_bias)
        self.Wo = nn.Linear(args.intermediate_size, args.hidden_size, bias=args.mlp_bias)
        self.activation = activation(args.hidden_activation)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return hidden states of the same shape."""
        inputs, gate = mx.split(self.Wi(hidden), 2, axis=-1)
        return self.Wo(self.activation(inputs) * gate)


class Layer(nn.Module):
    """A transformer layer with norms before attention and feed-forward."""

    def __init__(self, args: ModelArgs, number: int) -> None:
        super().__init__()
        # In the first layer, the norm of the embeddings takes this place.
        self.attn_norm = norm(args) if number else nn.Identity()
        self.attn = Attention(args, args.layer_types[number])
        self.mlp_norm = norm(args)
        self.mlp = GatedMLP(args)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the hidden states after this layer."""
        hidden = hidden + self.attn(self.attn_norm(hidden), mask)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Trunk(nn.Module):
    """ModernBERT without its heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embeddings = Embeddings(args)
        self.layers = [Layer(args, number) for number in range(args.num_hidden_layers)]
        self.final_norm = norm(args)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids; there are no token types."""
        hidden, mask = self.embeddings(input_ids), key_mask(attention_mask)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.final_norm(hidden)


class Model(EncoderModel):
    """ModernBERT with the head of its first architecture; it has no pooler."""

    trunk_name = "model"
    trunk_parts = ("embeddings", "layers", "final_norm")
    table_name = "tok_embeddings"
    mlm_prefix = "decoder."
    decoder_name = "decoder"
    bias_name = "decoder.bias"

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, Trunk(args))
        if args.head is not None:
            self.head = Transform(
                args.hidden_size,
                args.hidden_size,
                activation(args.classifier_activation),
                eps=args.norm_eps,
                norm="norm",
                bias=args.classifier_bias,
                norm_bias=args.norm_bias,
            )
        if args.head in ("sequence", "token"):
            self.classifier = nn.Linear(args.hidden_size, args.num_labels)
        elif args.head == "masked_lm" and args.tie_word_embeddings:
            self.decoder = VocabularyBias(args.vocab_size, bias=args.decoder_bias)
        elif args.head == "masked_lm":
            self.decoder = nn.Linear(args.hidden_size, args.vocab_size, bias=args.decoder_bias)

    @override
    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        return vocabulary_logits(self.decoder, self.head(hidden), self.words, ids)

    @override
    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        """Return logits ``[B, labels]`` of ``[B, L, D]``.

        ``classifier_pooling`` selects the first token or the mean of all tokens. The mean needs the
        mask of a ragged batch and is computed in float32.
        """
        if self.args.classifier_pooling == "cls":
            return self.classifier(self.head(hidden[:, 0]))
        weights = mx.ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        weights = weights.astype(mx.float32)[..., None]
        mean = (hidden.astype(mx.float32) * weights).sum(axis=1) / weights.sum(axis=1)
        return self.classifier(self.head(mean.astype(hidden.dtype)))

    @override
    def first_weight(self, path: str, shape: Sequence[int], key: mx.array) -> mx.array:
        args = self.args
        deviation = args.initializer_range / math.sqrt(2 * args.num_hidden_layers)
        if path == "classifier":
            deviation = args.hidden_size**-0.5
        most = args.initializer_cutoff_factor or 3.0
        return deviation * mx.random.truncated_normal(-most, most, shape, key=key)

    @override
    def token_logits(self, hidden: mx.array) -> mx.array:
        return self.classifier(self.head(hidden))

    @override
    def unused(self) -> list[str]:
        return [f"{part}." for part in ("head", "classifier") if part not in self]
