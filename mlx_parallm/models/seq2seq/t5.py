"""T5 (Raffel et al., 2020, arXiv:1910.10683) and its kin, in the form of mlx_lm's models.

These are T5, v1.1 and Flan (gated, arXiv:2002.05202), MADLAD-400, ByT5, mT5 (arXiv:2010.11934) and
UMT5 (arXiv:2304.09151). Names of parameters are Hugging Face's. Scores are not scaled; they have a
bias by distance, which the first layer has for all, or each layer of UMT5 its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import BaseModelArgs

from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.seq2seq.dense_cache import DenseSourceCache
from mlx_parallm.models.seq2seq.interface import Arrays, EncoderStages, SourceCache, SourceKV
from mlx_parallm.models.seq2seq.packed_rows import (
    RelativeBias,
    attend_each,
    join_heads,
    source_kv,
    split_heads,
)
from mlx_parallm.models.seq2seq.tables import one_table
from mlx_parallm.numerics.elementary import gelu
from mlx_parallm.types.model_input import TOKEN_IDS

GATED = "gated-"
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": nn.relu,
    "gelu": gelu,
    "gelu_new": nn.gelu_approx,
    "silu": nn.silu,
    "swish": nn.silu,
}
#: ``SCALE``: the scale of scores. The weights' initial numbers hold what others divide by.
SCALE = 1.0
FAMILIES = ("mt5", "t5", "umt5")
#: ``UNUSED``: a bias that the first checkpoints have and no version of the model used.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@dataclass
class ModelArgs(BaseModelArgs):
    """Fields of ``config.json``; the defaults are transformers' of T5.

    Attributes:
        tie_word_embeddings: True if the head is the table of word embeddings. The loader sets it by
            the files, as transformers does; config.json says something else with it, see below.
        scale_decoder_outputs: True if the head's inputs are divided by the root of their width.
            None: config.json is older than the field, and scaled unless it unties the head.
    """

    model_type: str = "t5"
    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str | None = None
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None

    def __post_init__(self) -> None:
        """Fill in what depends on the family.

        Raises:
            ValueError: the activation is unknown.
        """
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_layers
        if self.feed_forward_proj is None:
            self.feed_forward_proj = "relu" if self.model_type == "t5" else "gated-gelu"
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"feed_forward_proj {self.feed_forward_proj!r} is not one of "
                f"{', '.join(ACTIVATIONS)}, or gated- and one of these."
            )

    @property
    def is_gated(self) -> bool:
        """True if a second projection multiplies what the activation returns."""
        return str(self.feed_forward_proj).startswith(GATED)

    @property
    def activation(self) -> str:
        """The name of the activation; "gated-gelu" is the approximation by tanh."""
        name = str(self.feed_forward_proj)
        return "gelu_new" if name == "gated-gelu" else name.removeprefix(GATED)

    @property
    def scales_outputs(self) -> bool:
        """True if the head's inputs are divided by the root of their width."""
        if self.model_type != "t5":
            return self.model_type == "umt5"
        if self.scale_decoder_outputs is None:
            return self.tie_word_embeddings
        return self.scale_decoder_outputs

    def norm(self) -> nn.RMSNorm:
        """Return a new norm of hidden states."""
        return nn.RMSNorm(self.d_model, self.layer_norm_epsilon)


def bucket_of(distances: np.ndarray, args: ModelArgs, *, is_causal: bool) -> np.ndarray:
    """Return the buckets, int32, of distances: position of the key minus that of the query.

    The nearest have a bucket each; farther buckets grow by a factor up to the longest distance.
    Their edges come from float32 logarithms, as in the code that models were trained with: exact
    ones would move some distances into another bucket.
    """
    buckets, first = args.relative_attention_num_buckets, np.zeros_like(distances)
    if is_causal:
        distances = np.maximum(-distances, 0)
    else:
        buckets //= 2
        first = np.where(distances > 0, buckets, 0)
        distances = np.abs(distances)
    exact = buckets // 2
    factor = np.float32(math.log(args.relative_attention_max_distance / exact))
    steps = np.log(np.maximum(distances, exact).astype(np.float32) / np.float32(exact)) / factor
    far = exact + (steps * np.float32(buckets - exact)).astype(np.int32)
    near = distances < exact
    return (first + np.where(near, distances, np.minimum(far, buckets - 1))).astype(np.int32)


class Attention(nn.Module):
    """The projections of attention, and its table of biases by bucket if the layer has one."""

    def __init__(self, args: ModelArgs, *, has_bias: bool = False) -> None:
        super().__init__()
        self.num_heads = args.num_heads
        inner = args.num_heads * args.d_kv
        self.q = nn.Linear(args.d_model, inner, bias=False)
        self.k = nn.Linear(args.d_model, inner, bias=False)
        self.v = nn.Linear(args.d_model, inner, bias=False)
        self.o = nn.Linear(inner, args.d_model, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(
                args.relative_attention_num_buckets, args.num_heads
            )

    @property
    def has_bias(self) -> bool:
        """True if later blocks without a table of their own have this one's biases too."""
        return "relative_attention_bias" in self

    def bias_of(self, buckets: np.ndarray) -> mx.array:
        """Return the bias ``[H, ...]`` of buckets ``[...]``."""
        return mx.moveaxis(self.relative_attention_bias(mx.array(buckets)), -1, 0)


class SelfAttention(nn.Module):
    """The first part of a block."""

    def __init__(self, args: ModelArgs, *, has_bias: bool) -> None:
        super().__init__()
        self.SelfAttention = Attention(args, has_bias=has_bias)
        self.layer_norm = args.norm()

    def encode(self, x: mx.array, lengths: Sequence[int], bias: RelativeBias) -> mx.array:
        """Return hidden states of packed rows ``[1, T, E]``."""
        queries, keys, values = self._projected(x)
        output = attend_each(queries, keys, values, lengths, scale=SCALE, bias=bias)
        return x + self.SelfAttention.o(join_heads(output))

    def decode(self, x: mx.array, cache: SourceCache, bias: mx.array) -> mx.array:
        """Return hidden states ``[B, L, E]`` of decoder tokens."""
        queries, keys, values = self._projected(x)
        output = cache.attend(queries, keys, values, scale=SCALE, distance_bias=bias)
        return x + self.SelfAttention.o(join_heads(output))

    def _projected(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        own, normed = self.SelfAttention, self.layer_norm(x)
        heads = own.num_heads
        return (
            split_heads(own.q(normed), heads),
            split_heads(own.k(normed), heads),
            split_heads(own.v(normed), heads),
        )


class CrossAttention(nn.Module):
    """The second part of a decoder's block."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.EncDecAttention = Attention(args)
        self.layer_norm = args.norm()

    def __call__(self, x: mx.array, cache: SourceCache) -> mx.array:
        """Return hidden states ``[B, L, E]`` of decoder tokens."""
        own = self.EncDecAttention
        queries = split_heads(own.q(self.layer_norm(x)), own.num_heads)
        return x + own.o(join_heads(cache.attend_source(queries, scale=SCALE)))

    def source_kv(self, memory: mx.array) -> SourceKV:
        """Return this layer's keys and values of the encoder's output ``[1, T, E]``."""
        own = self.EncDecAttention
        return source_kv(own.k(memory), own.v(memory), own.num_heads)


class Dense(nn.Module):
    """The projections of a feed-forward part."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[args.activation]
        if args.is_gated:
            self.wi_0 = nn.Linear(args.d_model, args.d_ff, bias=False)
            self.wi_1 = nn.Linear(args.d_model, args.d_ff, bias=False)
        else:
            self.wi = nn.Linear(args.d_model, args.d_ff, bias=False)
        self.wo = nn.Linear(args.d_ff, args.d_model, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output ``[B, L, E]`` for normed hidden states."""
        if "wi" in self:
            return self.wo(self.activation(self.wi(x)))
        return self.wo(self.activation(self.wi_0(x)) * self.wi_1(x))


class FeedForward(nn.Module):
    """The last part of a block."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.DenseReluDense = Dense(args)
        self.layer_norm = args.norm()

    def __call__(self, x: mx.array) -> mx.array:
        """Return hidden states ``[B, L, E]``."""
        return x + self.DenseReluDense(self.layer_norm(x))


class EncoderBlock(nn.Module):
    """One layer of the encoder."""

    def __init__(self, args: ModelArgs, *, has_bias: bool) -> None:
        super().__init__()
        self.layer = [SelfAttention(args, has_bias=has_bias), FeedForward(args)]

    def __call__(self, x: mx.array, lengths: Sequence[int], bias: RelativeBias) -> mx.array:
        """Return hidden states of packed rows ``[1, T, E]``."""
        attention, feed_forward = self.layer
        return feed_forward(attention.encode(x, lengths, bias))


class DecoderBlock(nn.Module):
    """One layer of the decoder."""

    def __init__(self, args: ModelArgs, *, has_bias: bool) -> None:
        super().__init__()
        self.layer = [
            SelfAttention(args, has_bias=has_bias),
            CrossAttention(args),
            FeedForward(args),
        ]

    def __call__(self, x: mx.array, cache: SourceCache, bias: mx.array) -> mx.array:
        """Return hidden states ``[B, L, E]`` of decoder tokens."""
        attention, cross, feed_forward = self.layer
        return feed_forward(cross(attention.decode(x, cache, bias), cache))


class Stack(nn.Module):
    """The blocks of the encoder or the decoder, and the norm behind them."""

    def __init__(self, args: ModelArgs, count: int, block: type) -> None:
        super().__init__()
        has_biases = args.model_type == "umt5"
        self.block = [block(args, has_bias=has_biases or not i) for i in range(count)]
        self.final_layer_norm = args.norm()


class Model(nn.Module):
    """An encoder, a decoder, and the head of a language model."""

    #: Biases by distance have no end.
    max_source_len: int | None = None
    #: The feed-forward parts of trained models write numbers beyond float16 into hidden states.
    overflows_in_float16 = True

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.shared = nn.Embedding(args.vocab_size, args.d_model)
        self.encoder = Stack(args, args.num_layers, EncoderBlock)
        self.decoder = Stack(args, args.num_decoder_layers or args.num_layers, DecoderBlock)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.d_model, args.vocab_size, bias=False)
        # Every step needs these buckets; the biases themselves may change with the weights.
        before = -np.arange(args.relative_attention_max_distance + 1)
        self._buckets_before = bucket_of(before, args, is_causal=True)

    @property
    def layers(self) -> list[DecoderBlock]:
        """The decoder's blocks, each with a cache."""
        return self.decoder.block

    @property
    def num_encoder_stages(self) -> int:
        """See ``EncoderDecoder``: a stage for each block, and one for the decoder's layers."""
        return len(self.encoder.block) + 1

    def make_cache(self) -> list[Any]:
        """See ``EncoderDecoder``."""
        return [DenseSourceCache() for _ in self.layers]

    def encode(self, sources: Sequence[Arrays]) -> EncoderStages:
        """See ``EncoderDecoder``."""
        ids = [source[TOKEN_IDS] for source in sources]
        lengths = [len(each) for each in ids]
        x = self.shared(mx.concatenate(ids)[None])
        bias: Any = None
        for block in self.encoder.block:
            own: Attention = block.layer[0].SelfAttention
            if own.has_bias:
                bias = self._relative_bias(own, max(lengths), x.dtype)
            x = block(x, lengths, bias)
            yield x
        memory = self.encoder.final_layer_norm(x)
        return [block.layer[1].source_kv(memory) for block in self.layers]

    def __call__(self, tokens: mx.array, cache: Sequence[SourceCache] | None = None) -> mx.array:
        """See ``EncoderDecoder``."""
        caches: Sequence[SourceCache] = cache or self.make_cache()
        x = self.shared(tokens)
        bias: Any = None
        for block, layer_cache in zip(self.layers, caches, strict=True):
            own: Attention = block.layer[0].SelfAttention
            if own.has_bias:
                bias = self._distance_bias(own)
            x = block(x, layer_cache, bias)
        x = self.decoder.final_layer_norm(x)
        if self.args.scales_outputs:
            x = x * self.args.d_model**-0.5
        return self.lm_head(x) if "lm_head" in self else self.shared.as_linear(x)

    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights by the names of this module.

        A checkpoint has the table of word embeddings under up to four names.
        """
        copies = ["decoder.embed_tokens", "encoder.embed_tokens"]
        if self.args.tie_word_embeddings:
            copies.append("lm_head")
        kept = {name: array for name, array in weights.items() if name != UNUSED}
        return one_table(kept, "shared", copies)

    def _relative_bias(self, own: Attention, longest: int, dtype: mx.Dtype) -> RelativeBias:
        def bias_of(distances: np.ndarray) -> mx.array:
            return own.bias_of(bucket_of(distances, self.args, is_causal=False))

        return RelativeBias(bias_of, longest, own.num_heads, dtype)

    def _distance_bias(self, own: Attention) -> mx.array:
        """Return float32 biases ``[H, N]`` of keys 0 to N - 1 tokens before the query."""
        return own.bias_of(self._buckets_before).astype(mx.float32)
