"""Parts that the models of the BERT family share (Devlin et al., 2019, arXiv:1810.04805).

Names of parameters are those of Hugging Face's checkpoints, so that adapters made for them match.
Arrays are ``[batch, length, dims]`` unless a docstring gives another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.numerics.attention import softmax_attention
from mlx_parallm.numerics.elementary import gelu, is_exp_slow, silu
from mlx_parallm.types.errors import ModelLoadError

Activation = Callable[[mx.array], mx.array]
AttentionMask = mx.array | None


@dataclass
class BertArgs(EncoderArgs):
    """The config of BERT and of the models that keep its layers; defaults are Hugging Face's."""

    pad_token_id: int | None = 0
    is_decoder: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_decoder:
            raise ModelLoadError("is_decoder is true: only encoders are supported here.")


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
    """Word embeddings, those of token types and positions where there are any, and a layer norm.

    With a ``padding_id`` positions are RoBERTa's: they start after it and skip padding. Without an
    ``eps`` there is no norm.
    """

    def __init__(
        self,
        vocab_size: int,
        dims: int,
        *,
        positions: int,
        token_types: int,
        eps: float | None,
        padding_id: int | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, dims)
        if positions:
            self.position_embeddings = nn.Embedding(positions, dims)
        if token_types:
            self.token_type_embeddings = nn.Embedding(token_types, dims)
        if eps is not None:
            self.LayerNorm = nn.LayerNorm(dims, eps=eps)
        self.padding_id = padding_id

    def __call__(self, input_ids: mx.array, token_type_ids: mx.array | None = None) -> mx.array:
        """Embed int32 ``[batch, length]``; missing token types are 0."""
        hidden = self.word_embeddings(input_ids)
        if "token_type_embeddings" in self:
            types = mx.zeros((1, 1), mx.int32) if token_type_ids is None else token_type_ids
            hidden = hidden + self.token_type_embeddings(types)
        if "position_embeddings" in self:
            hidden = hidden + self.position_embeddings(self._positions(input_ids))
        return self.LayerNorm(hidden) if "LayerNorm" in self else hidden

    def _positions(self, input_ids: mx.array) -> mx.array:
        if self.padding_id is None:
            return mx.arange(input_ids.shape[1])[None]
        is_token = (input_ids != self.padding_id).astype(mx.int32)
        return mx.cumsum(is_token, axis=1) * is_token + self.padding_id


class SelfAttention(nn.Module):
    """Attention of all tokens to all tokens, without the output projection."""

    def __init__(self, args: EncoderArgs) -> None:
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


class DenseActivation(nn.Module):
    """A linear layer and an activation."""

    def __init__(self, inputs: int, outputs: int, activation: Activation) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)
        self.activation = activation

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return ``[..., outputs]`` of ``[..., inputs]``."""
        return self.activation(self.dense(hidden))


class Attention(nn.Module):
    """Self-attention, its output projection and the layer norm after it.

    Args:
        args: the config.
        mixing: self-attention, without the output projection.
    """

    def __init__(self, args: EncoderArgs, mixing: nn.Module) -> None:
        super().__init__()
        self.self = mixing
        self.output = DenseNorm(args.hidden_size, args.hidden_size, args.layer_norm_eps)

    def __call__(self, hidden: mx.array, *context: Any) -> mx.array:
        """Return the input of the feed-forward part; ``context`` is what self-attention takes."""
        return self.output(self.self(hidden, *context), hidden)


class Layer(nn.Module):
    """A transformer layer with norms after the residual connections.

    Args:
        args: the config.
        attention: an ``Attention``, or a module like it.
    """

    def __init__(self, args: EncoderArgs, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.intermediate = DenseActivation(
            args.hidden_size, args.intermediate_size, activation(args.hidden_act)
        )
        self.output = DenseNorm(args.intermediate_size, args.hidden_size, args.layer_norm_eps)

    def __call__(self, hidden: mx.array, *context: Any) -> mx.array:
        """Return the hidden states after this layer; ``context`` is what self-attention takes."""
        hidden = self.attention(hidden, *context)
        return self.output(self.intermediate(hidden), hidden)


def bert_layers(args: EncoderArgs) -> list[Layer]:
    """Return the layers of BERT."""
    return [
        Layer(args, Attention(args, SelfAttention(args))) for _ in range(args.num_hidden_layers)
    ]


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
        self.encoder = Encoder(bert_layers(args))
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
