"""MPNet (Song et al., 2020, arXiv:2004.09297): RoBERTa with a bias by relative position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.bert_layers import (
    AttentionMask,
    BertArgs,
    Embeddings,
    Encoder,
    Layer,
    Pooler,
    attend,
    key_mask,
)
from mlx_parallm.models.heads import RobertaHeads

#: ``PADDING_ID``: the padding id, which the config does not have.
PADDING_ID = 1
#: ``BUCKETS``: number of relative positions, which the config does not have; half of them are for
#: later tokens.
BUCKETS = 32


@dataclass
class ModelArgs(BertArgs):
    """The config of MPNet."""

    vocab_size: int = 30527
    type_vocab_size: int = 0
    pad_token_id: int | None = PADDING_ID
    relative_attention_num_buckets: int = BUCKETS

    @property
    def max_length(self) -> int:
        """The longest input, in tokens; positions up to the padding id are not used."""
        return self.max_position_embeddings - PADDING_ID - 1


class SelfAttention(nn.Module):
    """Attention of all tokens to all tokens, with its output projection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.heads = args.num_attention_heads
        self.q = nn.Linear(args.hidden_size, args.hidden_size)
        self.k = nn.Linear(args.hidden_size, args.hidden_size)
        self.v = nn.Linear(args.hidden_size, args.hidden_size)
        self.o = nn.Linear(args.hidden_size, args.hidden_size)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Mix tokens; ``mask`` is added to the scores and holds bias and padding."""
        queries, keys, values = self.q(hidden), self.k(hidden), self.v(hidden)
        return self.o(attend(queries, keys, values, self.heads, mask))


class Attention(nn.Module):
    """Self-attention and the layer norm behind the residual connection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attn = SelfAttention(args)
        self.LayerNorm = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the input of the feed-forward part."""
        return self.LayerNorm(self.attn(hidden, mask) + hidden)


class BiasedEncoder(Encoder):
    """A stack of layers with a common bias of attention scores, by head and relative position."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__([Layer(args, Attention(args)) for _ in range(args.num_hidden_layers)])
        self.relative_attention_bias = nn.Embedding(
            args.relative_attention_num_buckets, args.num_attention_heads
        )

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the last hidden states."""
        bias = self._bias(hidden.shape[1]).astype(hidden.dtype)
        if mask is not None:
            bias = mx.where(mask, bias, mx.array(-math.inf, bias.dtype))
        return super().__call__(hidden, bias)

    def _bias(self, length: int) -> mx.array:
        """Return the bias of the scores, ``[1, heads, length, length]``."""
        distances = range(1 - length, length)
        buckets = mx.array([relative_bucket(distance) for distance in distances], mx.int32)
        positions = mx.arange(length)
        index = positions[None, :] - positions[:, None] + (length - 1)
        by_distance = self.relative_attention_bias(buckets)
        return by_distance[index].transpose(2, 0, 1)[None]


def relative_bucket(distance: int) -> int:
    """Return the bucket of a key ``distance`` tokens after its query; before it if negative.

    The 8 nearest distances have a bucket each. Farther buckets grow by the square root of 2, up to
    a distance of 128. Integer arithmetic avoids rounding.
    """
    half = BUCKETS // 2
    first, away = (half, distance) if distance > 0 else (0, -distance)
    exact = half // 2
    if away < exact:
        return first + away
    # The largest n with exact * sqrt(2)^n <= away.
    steps = ((away * away) // (exact * exact)).bit_length() - 1
    return first + min(exact + steps, half - 1)


class Trunk(nn.Module):
    """MPNet without its heads."""

    def __init__(self, args: ModelArgs, *, pooler: bool) -> None:
        super().__init__()
        self.embeddings = Embeddings(
            args.vocab_size,
            args.hidden_size,
            positions=args.max_position_embeddings,
            token_types=0,
            eps=args.layer_norm_eps,
            padding_id=PADDING_ID,
        )
        self.encoder = BiasedEncoder(args)
        if pooler:
            self.pooler = Pooler(args.hidden_size)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids; there are no token types."""
        return self.encoder(self.embeddings(input_ids), key_mask(attention_mask))


class Model(RobertaHeads):
    """MPNet with the head of its first architecture; only the bare model has a pooler."""

    trunk_name = "mpnet"

    def __init__(self, args: ModelArgs) -> None:
        pooler = args.head is None and args.add_pooling_layer
        super().__init__(args, Trunk(args, pooler=pooler))
