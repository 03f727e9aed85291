"""OPT (Zhang et al. 2022), a decoder that mlx_lm lacks, in the form of mlx_lm's models.

Names of parameters are Hugging Face's. OPT-350m alone has norms after its blocks, and word
embeddings that are narrower than its hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    scaled_dot_product_attention,
)

from mlx_parallm.models.checkpoint_names import Weights

#: ``POSITION_OFFSET``: the first rows of the position table are never used. Fairseq, where OPT's
#: weights come from, counted positions from the padding id on.
POSITION_OFFSET = 2
#: ``NORM_EPS``: OPT's config has no field for it.
NORM_EPS = 1e-5
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {"relu": nn.relu, "gelu": nn.gelu}
TRUNK = "model."
TABLE = "model.decoder.embed_tokens"
HEAD = "lm_head"


@dataclass
class ModelArgs(BaseModelArgs):
    """Fields of ``config.json``; the defaults are transformers'."""

    model_type: str = "opt"
    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    word_embed_proj_dim: int | None = None
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        """Check the fields that not every checkpoint can have.

        Raises:
            ValueError: the heads do not divide the hidden size, or the activation is unknown.
        """
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_attention_heads}."
            )
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function {self.activation_function!r} is not one of "
                f"{', '.join(ACTIVATIONS)}."
            )

    @property
    def table_size(self) -> int:
        """The width of word embeddings."""
        return self.word_embed_proj_dim or self.hidden_size

    @property
    def has_final_norm(self) -> bool:
        """True if the trunk ends with a norm."""
        return self.do_layer_norm_before and not self._remove_final_layer_norm

    def norm(self) -> nn.LayerNorm:
        """Return a new norm of hidden states."""
        return nn.LayerNorm(self.hidden_size, NORM_EPS, affine=self.layer_norm_elementwise_affine)

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """Return a new linear layer of a block."""
        return nn.Linear(inputs, outputs, bias=self.enable_bias)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size = args.hidden_size
        self.num_heads = args.num_attention_heads
        self.scale = (size // self.num_heads) ** -0.5
        self.q_proj = args.linear(size, size)
        self.k_proj = args.linear(size, size)
        self.v_proj = args.linear(size, size)
        self.out_proj = args.linear(size, size)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Return the attention's output ``[B, L, D]`` for normed or plain hidden states."""
        queries, keys, values = map(self._heads, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.out_proj(output.transpose(0, 2, 1, 3).reshape(x.shape))

    def _heads(self, x: mx.array) -> mx.array:
        """Return ``[B, heads, L, D / heads]``."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)


class Layer(nn.Module):
    """One block; its norms are before attention and the feed-forward part, or after them."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.norms_before = args.do_layer_norm_before
        self.activation = ACTIVATIONS[args.activation_function]
        self.self_attn = Attention(args)
        self.self_attn_layer_norm = args.norm()
        self.fc1 = args.linear(args.hidden_size, args.ffn_dim)
        self.fc2 = args.linear(args.ffn_dim, args.hidden_size)
        self.final_layer_norm = args.norm()

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Return the block's output ``[B, L, D]``."""
        if self.norms_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x), mask, cache)
            return x + self._feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, mask, cache))
        return self.final_layer_norm(x + self._feed_forward(x))

    def _feed_forward(self, x: mx.array) -> mx.array:
        return self.fc2(self.activation(self.fc1(x)))


class Decoder(nn.Module):
    """Embeddings, blocks, and the last norm or projection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.table_size)
        self.embed_positions = nn.Embedding(
            args.max_position_embeddings + POSITION_OFFSET, args.hidden_size
        )
        if args.table_size != args.hidden_size:
            self.project_in = nn.Linear(args.table_size, args.hidden_size, bias=False)
            self.project_out = nn.Linear(args.hidden_size, args.table_size, bias=False)
        self.layers = [Layer(args) for _ in range(args.num_hidden_layers)]
        if args.has_final_norm:
            self.final_layer_norm = args.norm()

    def __call__(self, token_ids: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return last hidden states, as wide as word embeddings, ``[B, L, E]``."""
        caches = cache or [None] * len(self.layers)
        offset = 0 if caches[0] is None else caches[0].offset
        # Rows of a packed forward have offsets of their own.
        positions = mx.arange(token_ids.shape[1]) + mx.array(offset)[..., None]
        x = self.embed_tokens(token_ids)
        if "project_in" in self:
            x = self.project_in(x)
        x = x + self.embed_positions(positions + POSITION_OFFSET)
        mask = create_attention_mask(x, caches[0])
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask, layer_cache)
        if "final_layer_norm" in self:
            x = self.final_layer_norm(x)
        return self.project_out(x) if "project_out" in self else x


class Trunk(nn.Module):
    """The model without its head."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.decoder = Decoder(args)

    def __call__(self, token_ids: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """See ``Decoder``."""
        return self.decoder(token_ids, cache)

    @property
    def embed_tokens(self) -> nn.Module:
        """The table of word embeddings, by the name that it has in most of mlx_lm's trunks."""
        return self.decoder.embed_tokens


class Model(nn.Module):
    """OPT with the head of a language model."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Trunk(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.table_size, args.vocab_size, bias=False)

    def __call__(self, token_ids: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return logits ``[B, L, vocab]`` of token ids ``[B, L]``."""
        hidden = self.model(token_ids, cache)
        if "lm_head" in self:
            return self.lm_head(hidden)
        return self.model.decoder.embed_tokens.as_linear(hidden)

    @property
    def layers(self) -> list[Layer]:
        """The blocks, each with a cache."""
        return self.model.decoder.layers

    def sanitize(self, weights: Weights) -> Weights:
        """Return a checkpoint's weights by the names of this module.

        The first checkpoints are of the bare model, without ``model.``, and have a version number
        of Fairseq. A checkpoint with a tied head has it, the table, or both.
        """
        named = {
            f"{TRUNK}{name}" if name.startswith("decoder.") else name: array
            for name, array in weights.items()
            if not name.endswith("decoder.version")
        }
        if not self.args.tie_word_embeddings:
            return named
        for part in ("weight", "scales", "biases"):
            head = named.pop(f"{HEAD}.{part}", None)
            if head is not None:
                named.setdefault(f"{TABLE}.{part}", head)
        return named
