"""DistilBERT (Sanh et al., 2019, arXiv:1910.01108): BERT without token types and pooler."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.models.bert_layers import (
    AttentionMask,
    Embeddings,
    Encoder,
    activation,
    attend,
    key_mask,
)
from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.models.heads import EncoderModel, vocabulary_decoder, vocabulary_logits

#: ``EPS``: the epsilon of layer norms, which the config does not have.
EPS = 1e-12


@dataclass
class ModelArgs(EncoderArgs):
    """The config of DistilBERT, whose fields have other names than BERT's."""

    n_layers: int = 6
    n_heads: int = 12
    dim: int = 768
    hidden_dim: int = 3072
    activation: str = "gelu"
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        self.num_hidden_layers, self.num_attention_heads = self.n_layers, self.n_heads
        self.hidden_size = self.dim
        super().__post_init__()


class Attention(nn.Module):
    """Attention of all tokens to all tokens, with its output projection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.heads = args.n_heads
        self.q_lin = nn.Linear(args.dim, args.dim)
        self.k_lin = nn.Linear(args.dim, args.dim)
        self.v_lin = nn.Linear(args.dim, args.dim)
        self.out_lin = nn.Linear(args.dim, args.dim)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Mix the tokens that the mask allows."""
        queries, keys, values = self.q_lin(hidden), self.k_lin(hidden), self.v_lin(hidden)
        return self.out_lin(attend(queries, keys, values, self.heads, mask))


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.lin1 = nn.Linear(args.dim, args.hidden_dim)
        self.lin2 = nn.Linear(args.hidden_dim, args.dim)
        self.activation = activation(args.activation)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return hidden states of the same shape."""
        return self.lin2(self.activation(self.lin1(hidden)))


class Layer(nn.Module):
    """A transformer layer with norms after the residual connections."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.sa_layer_norm = nn.LayerNorm(args.dim, eps=EPS)
        self.ffn = FeedForward(args)
        self.output_layer_norm = nn.LayerNorm(args.dim, eps=EPS)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the hidden states after this layer."""
        hidden = self.sa_layer_norm(self.attention(hidden, mask) + hidden)
        return self.output_layer_norm(self.ffn(hidden) + hidden)


class Trunk(nn.Module):
    """DistilBERT without its heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embeddings = Embeddings(
            args.vocab_size,
            args.dim,
            positions=args.max_position_embeddings,
            token_types=0,
            eps=EPS,
        )
        self.transformer = Encoder(Layer(args) for _ in range(args.n_layers))

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids; there are no token types."""
        return self.transformer(self.embeddings(input_ids), key_mask(attention_mask))


class Model(EncoderModel):
    """DistilBERT with the head of its first architecture; it has no pooler."""

    trunk_name = "distilbert"
    trunk_parts = ("embeddings", "transformer")
    mlm_prefix = "vocab_"
    decoder_name = "vocab_projector"
    bias_name = "vocab_projector.bias"

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, Trunk(args))
        if args.head == "masked_lm":
            self.vocab_transform = nn.Linear(args.dim, args.dim)
            self.vocab_layer_norm = nn.LayerNorm(args.dim, eps=EPS)
            self.vocab_projector = vocabulary_decoder(
                args.dim, args.vocab_size, tied=args.tie_word_embeddings
            )
        elif args.head is not None:
            self.classifier = nn.Linear(args.dim, args.num_labels)
        if args.head == "sequence":
            self.pre_classifier = nn.Linear(args.dim, args.dim)
        self.activation = activation(args.activation)

    @override
    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        hidden = self.vocab_layer_norm(self.activation(self.vocab_transform(hidden)))
        return vocabulary_logits(self.vocab_projector, hidden, self.words, ids)

    @override
    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        return self.classifier(nn.relu(self.pre_classifier(hidden[:, 0])))
