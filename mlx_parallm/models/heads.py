"""Heads that several families share: BERT's masked LM, and RoBERTa's heads.

RoBERTa's heads (Liu et al., 2019, arXiv:1907.11692) take hidden states, never a pooler's output.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.bert_layers import BertArgs
from mlx_parallm.models.checkpoint_names import Weights, modern_names, with_decoder, without
from mlx_parallm.numerics.gelu import gelu

#: ``PLAIN_TABLES``: classes of decoders that give logits by their weight and bias alone.
PLAIN_TABLES = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)


class LMHead(nn.Module):
    """The head of a masked LM; its decoder is the table of word embeddings if tied."""

    def __init__(self, args: BertArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.hidden_size, args.hidden_size)
        self.layer_norm = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)
        self.bias = mx.zeros((args.vocab_size,))
        if not args.tie_word_embeddings:
            self.decoder = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(
        self, hidden: mx.array, words: nn.Embedding, ids: mx.array | None = None
    ) -> mx.array:
        """Return logits ``[..., vocabulary]``; with ``ids`` ``[..., len(ids)]``."""
        hidden = self.layer_norm(gelu(self.dense(hidden)))
        return decoded(self, hidden, words, ids)


class Predictions(nn.Module):
    """The head of BERT's masked LM; its decoder is the table of word embeddings if tied."""

    def __init__(
        self, transform: nn.Module, dims: int, vocab_size: int, *, tied: bool, bias: bool = True
    ) -> None:
        super().__init__()
        self.transform = transform
        if bias:
            self.bias = mx.zeros((vocab_size,))
        if not tied:
            self.decoder = nn.Linear(dims, vocab_size, bias=False)

    def __call__(
        self, hidden: mx.array, words: nn.Embedding, ids: mx.array | None = None
    ) -> mx.array:
        """Return logits ``[..., vocabulary]``; with ``ids`` ``[..., len(ids)]``."""
        return decoded(self, self.transform(hidden), words, ids)


class PreTrainingHeads(nn.Module):
    """A container that gives BERT's masked LM its name in checkpoints."""

    def __init__(self, predictions: Predictions) -> None:
        super().__init__()
        self.predictions = predictions


def decoded(
    head: nn.Module, hidden: mx.array, words: nn.Embedding, ids: mx.array | None = None
) -> mx.array:
    """Return logits by a head's decoder and bias, or by ``words`` if it has no decoder.

    Args:
        head: may have ``decoder`` and ``bias``.
        hidden: ``[..., D]``.
        words: the table of word embeddings.
        ids: ids whose logits are wanted, at least one; None: the whole vocabulary.

    Returns:
        ``[..., vocabulary]`` or ``[..., len(ids)]``.
    """
    logits = table_logits(head.get("decoder", words), hidden, ids)
    if "bias" not in head:
        return logits
    return logits + (head["bias"] if ids is None else head["bias"][ids])


def table_logits(table: nn.Module, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
    """Return logits by a table of embeddings or a linear layer, quantised or not; see ``decoded``.

    With ``ids`` only these rows of the weight are read, unless an adapter changes the layer.
    """
    if ids is None or type(table) not in PLAIN_TABLES:
        is_embedding = isinstance(table, (nn.Embedding, nn.QuantizedEmbedding))
        logits = table.as_linear(hidden) if is_embedding else table(hidden)
        return logits if ids is None else logits[..., ids]
    logits = hidden @ weight_rows(table, ids).T
    return logits + table["bias"][ids] if "bias" in table else logits


def weight_rows(layer: nn.Module, ids: mx.array) -> mx.array:
    """Return rows ``[len(ids), D]`` of the weight of a linear layer or an embedding."""
    if not isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        return layer["weight"][ids]
    biases = layer.get("biases")
    return mx.dequantize(
        layer["weight"][ids],
        layer["scales"][ids],
        None if biases is None else biases[ids],
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


class ClassificationHead(nn.Module):
    """A classifier of sequences by the hidden state of the first token."""

    def __init__(
        self, dims: int, labels: int, activation: Callable[[mx.array], mx.array] = mx.tanh
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(dims, dims)
        self.out_proj = nn.Linear(dims, labels)
        self.activation = activation

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return logits ``[batch, labels]`` of ``[batch, length, dims]``."""
        return self.out_proj(self.activation(self.dense(hidden[:, 0])))


class VocabularyBias(nn.Module):
    """A tied decoder, whose weight is the table of word embeddings and whose bias is its own."""

    def __init__(self, vocab_size: int, *, bias: bool = True) -> None:
        super().__init__()
        if bias:
            self.bias = mx.zeros((vocab_size,))


def vocabulary_logits(
    decoder: nn.Module, hidden: mx.array, words: nn.Embedding, ids: mx.array | None = None
) -> mx.array:
    """Return logits by a tied decoder or by a linear layer; see ``decoded``."""
    if isinstance(decoder, VocabularyBias):
        return decoded(decoder, hidden, words, ids)
    return table_logits(decoder, hidden, ids)


def vocabulary_decoder(dims: int, vocab_size: int, *, tied: bool) -> nn.Module:
    """Return a decoder for ``vocabulary_logits``."""
    return VocabularyBias(vocab_size) if tied else nn.Linear(dims, vocab_size)


class RobertaHeads(nn.Module):
    """A trunk under its name in checkpoints, and RoBERTa's heads.

    Args:
        args: the config.
        trunk: a module that takes ids, mask and token types; it has ``embeddings`` and may have a
            ``pooler``.
        name: the prefix of the trunk's weights.
    """

    def __init__(self, args: BertArgs, trunk: nn.Module, name: str) -> None:
        super().__init__()
        self.args = args
        self.trunk_name = name
        self[name] = trunk
        if args.head == "masked_lm":
            self.lm_head = LMHead(args)
        elif args.head == "sequence":
            self.classifier = ClassificationHead(args.hidden_size, args.num_labels)
        elif args.head == "token":
            self.classifier = nn.Linear(args.hidden_size, args.num_labels)

    @property
    def has_pooler(self) -> bool:
        """True if ``pooled`` can be called."""
        return "pooler" in self[self.trunk_name]

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None = None,
        token_type_ids: mx.array | None = None,
    ) -> mx.array:
        """Return the last hidden states ``[B, L, D]`` of right-padded int32 ids ``[B, L]``.

        Args:
            input_ids: within the vocabulary, at most ``args.max_length`` a row.
            attention_mask: ``[B, L]``, 1 or true for tokens, at least one a row; None: no padding.
            token_type_ids: int32 ``[B, L]``; None: all are 0. Without types they are ignored.
        """
        return self[self.trunk_name](input_ids, attention_mask, token_type_ids)

    def pooled(self, hidden: mx.array) -> mx.array:
        """Pool ``[B, L, D]`` to ``[B, D]``."""
        return self[self.trunk_name].pooler(hidden)

    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        """Return logits ``[..., vocabulary]`` of ``[..., D]``; with ``ids`` ``[..., len(ids)]``."""
        return self.lm_head(hidden, self[self.trunk_name].embeddings.word_embeddings, ids)

    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        """Return logits ``[B, labels]`` of ``[B, L, D]``; the mask is not used."""
        return self.classifier(hidden)

    def token_logits(self, hidden: mx.array) -> mx.array:
        """Return logits ``[..., labels]`` of ``[..., D]``."""
        return self.classifier(hidden)

    def sanitize(self, weights: Weights) -> Weights:
        """Return the weights under the names of this model's parameters."""
        weights = modern_names(weights, self.trunk_name, ("embeddings", "encoder", "pooler"))
        if not self.has_pooler:
            weights = without(weights, f"{self.trunk_name}.pooler.")
        if self.args.head != "masked_lm":
            return without(weights, "lm_head.")
        words = f"{self.trunk_name}.embeddings.word_embeddings.weight"
        table = words if self.args.tie_word_embeddings else None
        return with_decoder(weights, "lm_head.decoder", "lm_head.bias", table=table)
