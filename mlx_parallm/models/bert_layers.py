"""Parts that the models of the BERT family share (Devlin et al., 2019, arXiv:1810.04805).

Names of parameters are those of Hugging Face's checkpoints, so that adapters made for them match.
Arrays are ``[batch, length, dims]`` unless a docstring gives another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.numerics.attention import softmax_attention
from mlx_parallm.numerics.exp2 import is_exp_slow, silu
from mlx_parallm.numerics.gelu import gelu
from mlx_parallm.types.errors import ModelLoadError

Activation = Callable[[mx.array], mx.array]
AttentionMask = mx.array | None


@dataclass
class BertArgs(EncoderArgs):
    """The config of BERT and of the models that keep its names; defaults are Hugging Face's."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    is_decoder: bool = False

    def __post_init__(self) -> None:
        if self.is_decoder:
            raise ModelLoadError("is_decoder is true: only encoders are supported here.")
        check_heads(self.hidden_size, self.num_attention_heads)

    @property
    def max_length(self) -> int:
        """The longest input, in tokens."""
        return self.max_position_embeddings


def check_heads(dims: int, heads: int) -> None:
    """Refuse a config whose heads do not divide its dimensions.

    Raises:
        ModelLoadError: they do not.
    """
    if heads < 1 or dims % heads:
        raise ModelLoadError(f"{dims} dimensions cannot be divided among {heads} attention heads.")


def activation(name: str) -> Activation:
    """Return the activation of that name in Hugging Face's configs.

    Raises:
        ModelLoadError: no activation has this name.
    """
    activations: dict[str, Activation] = {
        "gelu": gelu,
        "gelu_new": nn.gelu_approx,
        "gelu_fast": nn.gelu_approx,
        "gelu_pytorch_tanh": nn.gelu_approx,
        "relu": nn.relu,
        "silu": _silu,
        "swish": _silu,
        "tanh": mx.tanh,
    }
    if name not in activations:
        raise ModelLoadError(f"Activation {name!r} is not one of {', '.join(activations)}.")
    return activations[name]


def _silu(values: mx.array) -> mx.array:
    is_own = values.dtype == mx.float32 and is_exp_slow()
    return silu(values) if is_own else nn.silu(values)


def key_mask(attention_mask: mx.array | None) -> AttentionMask:
    """Return a mask ``[batch, 1, 1, length]``, true for tokens, from ``[batch, length]``.

    Every row needs a token, because the softmax of an empty row is NaN.
    """
    return None if attention_mask is None else attention_mask.astype(mx.bool_)[:, None, None, :]


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, heads: int, mask: AttentionMask
) -> mx.array:
    """Return softmax attention of several heads, with scale 1 / sqrt(dims of a head).

    Args:
        queries: ``[batch, length, dims]``.
        keys: ``[batch, length, dims]``.
        values: ``[batch, length, dims]``.
        heads: number of heads.
        mask: None, boolean (true: attended to) or added to the scores; it broadcasts to
            ``[batch, heads, length, length]``.

    Returns:
        ``[batch, length, dims]``.
    """
    batch, length, dims = queries.shape
    shape = (batch, length, heads, dims // heads)
    per_head = [array.reshape(shape).swapaxes(1, 2) for array in (queries, keys, values)]
    mixed = softmax_attention(*per_head, scale=(dims // heads) ** -0.5, mask=mask)
    return mixed.swapaxes(1, 2).reshape(batch, length, dims)


class Embeddings(nn.Module):
    """Word, position and, if there are types, token type embeddings, then a layer norm.

    With a ``padding_id`` positions are RoBERTa's: they start after it and skip padding.
    """

    def __init__(
        self,
        vocab_size: int,
        dims: int,
        *,
        positions: int,
        token_types: int,
        eps: float,
        padding_id: int | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, dims)
        self.position_embeddings = nn.Embedding(positions, dims)
        if token_types:
            self.token_type_embeddings = nn.Embedding(token_types, dims)
        self.LayerNorm = nn.LayerNorm(dims, eps=eps)
        self.padding_id = padding_id

    def __call__(self, input_ids: mx.array, token_type_ids: mx.array | None = None) -> mx.array:
        """Embed int32 ``[batch, length]``; missing token types are 0."""
        hidden = self.word_embeddings(input_ids)
        if "token_type_embeddings" in self:
            types = mx.zeros((1, 1), mx.int32) if token_type_ids is None else token_type_ids
            hidden = hidden + self.token_type_embeddings(types)
        return self.LayerNorm(hidden + self.position_embeddings(self._positions(input_ids)))

    def _positions(self, input_ids: mx.array) -> mx.array:
        if self.padding_id is None:
            return mx.arange(input_ids.shape[1])[None]
        is_token = (input_ids != self.padding_id).astype(mx.int32)
        return mx.cumsum(is_token, axis=1) * is_token + self.padding_id


class SelfAttention(nn.Module):
    """Attention of all tokens to all tokens, without the output projection."""

    def __init__(self, args: BertArgs) -> None:
        super().__init__()
        self.heads = args.num_attention_heads
        self.query = nn.Linear(args.hidden_size, args.hidden_size)
        self.key = nn.Linear(args.hidden_size, args.hidden_size)
        self.value = nn.Linear(args.hidden_size, args.hidden_size)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Mix the tokens that the mask allows."""
        return attend(self.query(hidden), self.key(hidden), self.value(hidden), self.heads, mask)


class DenseNorm(nn.Module):
    """A linear layer, the residual connection and a layer norm."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)
        self.LayerNorm = nn.LayerNorm(outputs, eps=eps)

    def __call__(self, inputs: mx.array, residual: mx.array) -> mx.array:
        """Return the normalised sum of the layer's output and ``residual``."""
        return self.LayerNorm(self.dense(inputs) + residual)


class Attention(nn.Module):
    """Self-attention, its output projection and the layer norm after it."""

    def __init__(self, args: BertArgs) -> None:
        super().__init__()
        self.self = SelfAttention(args)
        self.output = DenseNorm(args.hidden_size, args.hidden_size, args.layer_norm_eps)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the input of the feed-forward part."""
        return self.output(self.self(hidden, mask), hidden)


class Intermediate(nn.Module):
    """The first linear layer of the feed-forward part and its activation."""

    def __init__(self, args: BertArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.hidden_size, args.intermediate_size)
        self.activation = activation(args.hidden_act)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return ``[batch, length, intermediate size]``."""
        return self.activation(self.dense(hidden))


class Layer(nn.Module):
    """A transformer layer with norms after the residual connections."""

    def __init__(self, args: BertArgs, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.intermediate = Intermediate(args)
        self.output = DenseNorm(args.intermediate_size, args.hidden_size, args.layer_norm_eps)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the hidden states after this layer."""
        hidden = self.attention(hidden, mask)
        return self.output(self.intermediate(hidden), hidden)


class Encoder(nn.Module):
    """A stack of layers."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layer = list(layers)

    def __call__(self, hidden: mx.array, mask: AttentionMask) -> mx.array:
        """Return the last hidden states."""
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return hidden


class Pooler(nn.Module):
    """The first token's hidden state through a linear layer and tanh."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dims, dims)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Pool ``[batch, length, dims]`` to ``[batch, dims]``."""
        return mx.tanh(self.dense(hidden[:, 0]))


class BertTrunk(nn.Module):
    """BERT without its heads.

    Args:
        args: the config.
        pooler: True if the model has a pooler.
        padding_id: the padding id that positions skip, as in RoBERTa; None: positions skip none.
    """

    def __init__(self, args: BertArgs, *, pooler: bool, padding_id: int | None = None) -> None:
        super().__init__()
        self.embeddings = Embeddings(
            args.vocab_size,
            args.hidden_size,
            positions=args.max_position_embeddings,
            token_types=args.type_vocab_size,
            eps=args.layer_norm_eps,
            padding_id=padding_id,
        )
        self.encoder = Encoder(Layer(args, Attention(args)) for _ in range(args.num_hidden_layers))
        if pooler:
            self.pooler = Pooler(args.hidden_size)

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids."""
        return self.encoder(self.embeddings(input_ids, token_type_ids), key_mask(attention_mask))
