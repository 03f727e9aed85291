"""BART (Lewis et al., 2020, arXiv:1910.13461) and its kin, in the form of mlx_lm's models.

These are mBART and mBART-50 (arXiv:2001.08210, arXiv:2008.00401), Pegasus (arXiv:1912.08777),
M2M-100 and NLLB (arXiv:2010.11125, arXiv:2207.04672) and Marian (arXiv:1804.00344). Names of
parameters are Hugging Face's. ``model_type`` alone says what a family has: older configs have
fields for it, which transformers does not read either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs

from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.seq2seq.dense_cache import DenseSourceCache
from mlx_parallm.models.seq2seq.interface import Arrays, EncoderStages, SourceCache, SourceKV
from mlx_parallm.models.seq2seq.packed_rows import (
    attend_each,
    join_heads,
    source_kv,
    split_heads,
)
from mlx_parallm.models.seq2seq.positions import (
    SinusoidalPositions,
    m2m_sinusoids,
    marian_sinusoids,
)
from mlx_parallm.models.seq2seq.tables import HEAD, LOGITS_BIAS, one_table
from mlx_parallm.numerics.elementary import gelu
from mlx_parallm.types.model_input import TOKEN_IDS

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
}
#: ``LEARNED_OFFSET``: the first rows of a learned table are never used. Fairseq, where the weights
#: come from, counted positions from the padding id on.
LEARNED_OFFSET = 2
#: ``FLOAT16_BOUND``: the largest hidden states of an encoder in float16, as in transformers.
FLOAT16_BOUND = 65504 - 1000
TRUNK = "model."
#: ``PARTS``: what a checkpoint of a bare model has without the trunk's name.
PARTS = ("shared.", "encoder.", "decoder.")


@dataclass(frozen=True, slots=True)
class Family:
    """The difference of a family from BART.

    Attributes:
        norms_before: True if norms are before attention and the feed-forward part, and one is
            behind the last layer; False if they are behind each part.
        norms_embeddings: True if there is a norm of embeddings.
        positions: "learned", with rows that are not used, or "table" without these; or whose
            sinusoids: "marian" or "m2m".
        has_bias: True if logits have a bias.
        has_key_bias: True if keys have one.
        is_one_length: True if all sources are equally long.
        scales: True if embeddings are multiplied by the root of their width unless the config says
            otherwise.
        activation: the one that it has unless the config names another.
    """

    norms_before: bool = False
    norms_embeddings: bool = False
    positions: str = "learned"
    has_bias: bool = True
    has_key_bias: bool = True
    is_one_length: bool = False
    scales: bool = False
    activation: str = "gelu"


FAMILIES = {
    "bart": Family(norms_embeddings=True),
    "m2m_100": Family(
        norms_before=True, positions="m2m", has_bias=False, scales=True, activation="relu"
    ),
    "marian": Family(positions="marian"),
    "mbart": Family(norms_before=True, norms_embeddings=True),
    "pegasus": Family(norms_before=True, positions="marian"),
}


@dataclass
class ModelArgs(BaseModelArgs):
    """Fields of ``config.json``; sizes have transformers' defaults for BART.

    Attributes:
        tie_word_embeddings: True if the head is the decoder's table of word embeddings. The loader
            sets it by the files, as transformers does.
        has_final_logits_bias: True if the files have a bias of the logits, set so too; a file
            without one has zeros.
        has_position_tables: True if the files have the sinusoids of Marian or Pegasus, set so too.
    """

    model_type: str = "bart"
    vocab_size: int = 50265
    decoder_vocab_size: int | None = None
    d_model: int = 1024
    encoder_layers: int = 12
    decoder_layers: int = 12
    encoder_attention_heads: int = 16
    decoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    decoder_ffn_dim: int = 4096
    max_position_embeddings: int = 1024
    activation_function: str | None = None
    scale_embedding: bool | None = None
    pad_token_id: int = 1
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    has_final_logits_bias: bool = True
    has_position_tables: bool = False

    def __post_init__(self) -> None:
        """Fill in what depends on the family.

        Raises:
            ValueError: the heads do not divide the hidden size, or the activation is unknown.
        """
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            if self.d_model % getattr(self, name):
                raise ValueError(
                    f"d_model {self.d_model} is no multiple of {name} {getattr(self, name)}."
                )
        self.activation_function = self.activation_function or self.family.activation
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function {self.activation_function!r} is not one of "
                f"{', '.join(ACTIVATIONS)}."
            )
        if self.scale_embedding is None:
            self.scale_embedding = self.family.scales
        if not self.family.has_bias:
            self.has_final_logits_bias = False

    @property
    def family(self) -> Family:
        """The entry of ``FAMILIES``."""
        return FAMILIES[self.model_type]

    @property
    def has_two_tables(self) -> bool:
        """True if source and target have vocabularies of their own."""
        return self.model_type == "marian" and not self.share_encoder_decoder_embeddings

    @property
    def target_vocab_size(self) -> int:
        """The number of logits."""
        return (self.has_two_tables and self.decoder_vocab_size) or self.vocab_size

    def table(self, vocab_size: int) -> nn.Embedding:
        """Return a new table of word embeddings."""
        return nn.Embedding(vocab_size, self.d_model)

    def attention(self, num_heads: int) -> Attention:
        """Return new projections."""
        return Attention(self.d_model, num_heads, self.family)

    @property
    def computes_positions(self) -> bool:
        """True if positions are no parameters."""
        kind = self.family.positions
        return kind == "m2m" or (kind == "marian" and not self.has_position_tables)

    @property
    def position_offset(self) -> int:
        """The row of the first position in a table of parameters."""
        return LEARNED_OFFSET if self.family.positions == "learned" else 0

    def sinusoids(self) -> SinusoidalPositions:
        """Return new sinusoids of the encoder or the decoder."""
        count, size = self.max_position_embeddings, self.d_model
        if self.family.positions == "marian":
            return SinusoidalPositions(partial(marian_sinusoids, size=size), count)
        pad = self.pad_token_id
        return SinusoidalPositions(partial(m2m_sinusoids, size=size, padding_id=pad), count, pad)


class Attention(nn.Module):
    """The projections of attention."""

    def __init__(self, size: int, num_heads: int, family: Family) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_one_length = family.is_one_length
        self.scale = (size // num_heads) ** -0.5
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size, bias=family.has_key_bias)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def encode(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        """Return the output ``[1, T, E]`` for packed rows, each source's attending to its own."""
        output = attend_each(
            *self._projected(x), lengths, scale=self.scale, is_one_length=self.is_one_length
        )
        return self.out_proj(join_heads(output))

    def decode(self, x: mx.array, cache: SourceCache) -> mx.array:
        """Return the output ``[B, L, E]`` for decoder tokens, which attend to earlier ones."""
        output = cache.attend(*self._projected(x), scale=self.scale)
        return self.out_proj(join_heads(output))

    def look(self, x: mx.array, cache: SourceCache) -> mx.array:
        """Return the output ``[B, L, E]`` for decoder tokens, which attend to their source."""
        queries = split_heads(self.q_proj(x), self.num_heads)
        return self.out_proj(join_heads(cache.attend_source(queries, scale=self.scale)))

    def source_kv(self, memory: mx.array) -> SourceKV:
        """Return keys and values of the encoder's output ``[1, T, E]``."""
        return source_kv(self.k_proj(memory), self.v_proj(memory), self.num_heads)

    def _projected(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        heads = self.num_heads
        return (
            split_heads(self.q_proj(x), heads),
            split_heads(self.k_proj(x), heads),
            split_heads(self.v_proj(x), heads),
        )


class Layer(nn.Module):
    """Self-attention and the feed-forward part, which layers of both sides have."""

    def __init__(self, args: ModelArgs, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        self.norms_before = args.family.norms_before
        self.activation = ACTIVATIONS[str(args.activation_function)]
        self.self_attn = args.attention(num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(args.d_model)
        self.fc1 = nn.Linear(args.d_model, hidden_size)
        self.fc2 = nn.Linear(hidden_size, args.d_model)
        self.final_layer_norm = nn.LayerNorm(args.d_model)

    def residual(
        self, x: mx.array, norm: nn.LayerNorm, part: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Return hidden states after a part, with its norm before or behind it."""
        if self.norms_before:
            return x + part(norm(x))
        return norm(x + part(x))

    def feed_forward(self, x: mx.array) -> mx.array:
        """Return hidden states after the feed-forward part."""
        return self.residual(
            x, self.final_layer_norm, lambda rows: self.fc2(self.activation(self.fc1(rows)))
        )


class EncoderLayer(Layer):
    """One layer of the encoder."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, args.encoder_attention_heads, args.encoder_ffn_dim)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        """Return hidden states of packed rows ``[1, T, E]``."""
        attend = partial(self.self_attn.encode, lengths=lengths)
        x = self.feed_forward(self.residual(x, self.self_attn_layer_norm, attend))
        return mx.clip(x, -FLOAT16_BOUND, FLOAT16_BOUND) if x.dtype == mx.float16 else x


class DecoderLayer(Layer):
    """One layer of the decoder."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, args.decoder_attention_heads, args.decoder_ffn_dim)
        self.encoder_attn = args.attention(args.decoder_attention_heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(args.d_model)

    def __call__(self, x: mx.array, cache: SourceCache) -> mx.array:
        """Return hidden states ``[B, L, E]`` of decoder tokens."""
        attend = partial(self.self_attn.decode, cache=cache)
        look = partial(self.encoder_attn.look, cache=cache)
        x = self.residual(x, self.self_attn_layer_norm, attend)
        return self.feed_forward(self.residual(x, self.encoder_attn_layer_norm, look))


class Stack(nn.Module):
    """Positions, layers and norms of the encoder or the decoder.

    It has a table of word embeddings if source and target have their own.
    """

    def __init__(self, args: ModelArgs, layers: list[Any], vocab_size: int) -> None:
        super().__init__()
        self.embedding_scale = args.d_model**0.5 if args.scale_embedding else 1.0
        if args.has_two_tables:
            self.embed_tokens = args.table(vocab_size)
        if args.computes_positions:
            self.sinusoids = args.sinusoids()
        else:
            self.position_offset = args.position_offset
            rows = args.max_position_embeddings + args.position_offset
            self.embed_positions = nn.Embedding(rows, args.d_model)
        if args.family.norms_embeddings:
            self.layernorm_embedding = nn.LayerNorm(args.d_model)
        self.layers = layers
        if args.family.norms_before:
            self.layer_norm = nn.LayerNorm(args.d_model)

    def embed(
        self, table: nn.Embedding, tokens: mx.array, positions: mx.array, end: int = 0
    ) -> mx.array:
        """Return the input of the first layer ``[B, L, E]``: word embeddings and positions.

        Args:
            table: the word embeddings.
            tokens: ``[B, L]``.
            positions: those of the tokens, from 0 on.
            end: larger than any position; 0 if the config's positions suffice.
        """
        words = table(tokens)
        if "embed_positions" in self:
            rows = self.embed_positions(positions + self.position_offset)
        else:
            rows = self.sinusoids.rows(positions, tokens, end)
        x = words * self.embedding_scale + rows.astype(words.dtype)
        return self.layernorm_embedding(x) if "layernorm_embedding" in self else x

    def finish(self, x: mx.array) -> mx.array:
        """Return the output of the last layer behind the norm, if there is one."""
        return self.layer_norm(x) if "layer_norm" in self else x


class Trunk(nn.Module):
    """The model without its head."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if not args.has_two_tables:
            self.shared = args.table(args.vocab_size)
        encoder = [EncoderLayer(args) for _ in range(args.encoder_layers)]
        decoder = [DecoderLayer(args) for _ in range(args.decoder_layers)]
        self.encoder = Stack(args, encoder, args.vocab_size)
        self.decoder = Stack(args, decoder, args.target_vocab_size)

    @property
    def source_table(self) -> nn.Embedding:
        """The word embeddings of sources."""
        return self.shared if "shared" in self else self.encoder.embed_tokens

    @property
    def target_table(self) -> nn.Embedding:
        """The word embeddings of decoder tokens."""
        return self.shared if "shared" in self else self.decoder.embed_tokens


class Model(nn.Module):
    """An encoder, a decoder, and the head of a language model."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        # M2M-100 computes the positions of any source.
        is_endless = args.family.positions == "m2m"
        self.max_source_len = None if is_endless else args.max_position_embeddings
        self.source_vocab_size = args.vocab_size
        self.model = Trunk(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.d_model, args.target_vocab_size, bias=False)
        if args.has_final_logits_bias:
            self.final_logits_bias = mx.zeros((1, args.target_vocab_size))

    @property
    def layers(self) -> list[DecoderLayer]:
        """The decoder's layers, each with a cache."""
        return self.model.decoder.layers

    @property
    def num_encoder_stages(self) -> int:
        """See ``EncoderDecoder``: a stage for each layer, and one for the decoder's layers."""
        return len(self.model.encoder.layers) + 1

    def make_cache(self) -> list[Any]:
        """See ``EncoderDecoder``."""
        return [DenseSourceCache() for _ in self.layers]

    def encode(self, sources: Sequence[Arrays]) -> EncoderStages:
        """See ``EncoderDecoder``."""
        x, lengths = self.embed_sources(sources)
        for layer in self.model.encoder.layers:
            x = layer(x, lengths)
            yield x
        memory = self.model.encoder.finish(x)
        return [layer.encoder_attn.source_kv(memory) for layer in self.layers]

    def embed_sources(self, sources: Sequence[Arrays]) -> tuple[mx.array, list[int]]:
        """Return the input of the encoder's first layer ``[1, T, E]``, and each source's rows."""
        ids = [source[TOKEN_IDS] for source in sources]
        lengths = [len(each) for each in ids]
        tokens = mx.concatenate(ids)[None]
        places = mx.concatenate([self._source_positions(each) for each in ids])[None]
        table = self.model.source_table
        return self.model.encoder.embed(table, tokens, places, max(lengths)), lengths

    def __call__(self, tokens: mx.array, cache: Sequence[SourceCache] | None = None) -> mx.array:
        """See ``EncoderDecoder``."""
        caches: Sequence[SourceCache] = cache or self.make_cache()
        decoder, table = self.model.decoder, self.model.target_table
        # Rows of a packed forward have offsets of their own.
        places = mx.arange(tokens.shape[1]) + mx.array(caches[0].offset)[..., None]
        x = decoder.embed(table, tokens, places)
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x = layer(x, layer_cache)
        x = decoder.finish(x)
        logits = self.lm_head(x) if HEAD in self else table.as_linear(x)
        return logits + self.final_logits_bias if LOGITS_BIAS in self else logits

    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights by the names of this module.

        Some checkpoints are of the bare model, without ``model.``, and have a version number of
        Fairseq; most have the table of word embeddings under several names, and older ones
        sinusoids.
        """
        named = {
            f"{TRUNK}{name}" if name.startswith(PARTS) else name: array
            for name, array in weights.items()
        }
        dropped = [name for name in named if name.endswith(self._unused())]
        for name in dropped:
            del named[name]
        copies = [HEAD] if self.args.tie_word_embeddings else []
        if self.args.has_two_tables:
            return one_table(named, "model.decoder.embed_tokens", copies)
        copies += ["model.decoder.embed_tokens", "model.encoder.embed_tokens"]
        return one_table(named, "model.shared", copies)

    def _unused(self) -> tuple[str, ...]:
        """Return the ends of names of weights that this model computes or does not have."""
        unused = [".version"]
        if not self.args.has_final_logits_bias:
            unused.append(LOGITS_BIAS)
        if self.args.computes_positions:
            unused += ["embed_positions.weight", "embed_positions.weights"]
        return tuple(unused)

    def _source_positions(self, ids: mx.array) -> mx.array:
        """Return the positions ``[S]`` of a source's tokens; M2M-100 does not count padding."""
        if self.args.family.positions == "m2m":
            return mx.cumsum((ids != self.args.pad_token_id).astype(mx.int32)) - 1
        return mx.arange(len(ids))
