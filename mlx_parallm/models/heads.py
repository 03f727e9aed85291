"""The model of every encoder, a trunk with the head of its first architecture, and shared heads.

BERT's classifier of sequences takes its pooler's output (Devlin et al., 2019, arXiv:1810.04805),
RoBERTa's the hidden states (Liu et al., 2019, arXiv:1907.11692).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.models.bert_layers import Activation, BertArgs
from mlx_parallm.models.checkpoint_names import Weights, modern_names, with_decoder, without
from mlx_parallm.models.encoder_args import EncoderArgs
from mlx_parallm.numerics.elementary import gelu

#: ``PLAIN_TABLES``: classes of decoders that give logits by their weight and bias alone.
PLAIN_TABLES = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)


class Transform(nn.Module):
    """A linear layer, an activation and a layer norm: what a masked LM has before its decoder.

    Args:
        inputs: dimensions of hidden states.
        outputs: dimensions of the table of word embeddings.
        activation: between the two layers.
        eps: epsilon of the norm.
        norm: name of the norm in checkpoints.
        bias: True if the linear layer has a bias.
        norm_bias: True if the norm has one.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation,
        *,
        eps: float,
        norm: str = "LayerNorm",
        bias: bool = True,
        norm_bias: bool = True,
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs, bias=bias)
        self[norm] = nn.LayerNorm(outputs, eps=eps, bias=norm_bias)
        self.norm_name = norm
        self.activation = activation

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return ``[..., outputs]`` of ``[..., inputs]``."""
        return self[self.norm_name](self.activation(self.dense(hidden)))


class LMHead(Transform):
    """RoBERTa's head of a masked LM; its decoder is the table of word embeddings if tied."""

    def __init__(
        self,
        dims: int,
        vocab_size: int,
        activation: Activation,
        *,
        tied: bool,
        eps: float,
        norm: str = "layer_norm",
    ) -> None:
        super().__init__(dims, dims, activation, eps=eps, norm=norm)
        self.bias = mx.zeros((vocab_size,))
        if not tied:
            self.decoder = nn.Linear(dims, vocab_size, bias=False)


class Predictions(nn.Module):
    """BERT's head of a masked LM; its decoder is the table of word embeddings if tied."""

    def __init__(
        self, transform: Transform, dims: int, vocab_size: int, *, tied: bool, bias: bool = True
    ) -> None:
        super().__init__()
        self.transform = transform
        if bias:
            self.bias = mx.zeros((vocab_size,))
        if not tied:
            self.decoder = nn.Linear(dims, vocab_size, bias=False)


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

    def __init__(self, dims: int, labels: int, activation: Activation = mx.tanh) -> None:
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


class EncoderModel(nn.Module):
    """A trunk under its name in checkpoints, and the head of its first architecture.

    The heads are BERT's, but for a masked LM under RoBERTa's name; a family overrides what it has
    otherwise.

    Attributes:
        trunk_name: the prefix of the trunk's weights.
        trunk_parts: the modules directly in the trunk, by which weights without it are recognised.
        table_name: the table of word embeddings, in the trunk's ``embeddings``.
        mlm_prefix: what the names of the masked LM's head begin with.
        decoder_name: the last linear layer of that head.
        bias_name: the bias of that layer.
    """

    trunk_name: ClassVar[str]
    trunk_parts: ClassVar[tuple[str, ...]] = ("embeddings", "encoder", "pooler")
    table_name: ClassVar[str] = "word_embeddings"
    mlm_prefix: ClassVar[str] = "lm_head."
    decoder_name: ClassVar[str] = "lm_head.decoder"
    bias_name: ClassVar[str] = "lm_head.bias"

    def __init__(self, args: EncoderArgs, trunk: nn.Module) -> None:
        """Begin without a head.

        Args:
            args: the config.
            trunk: takes ids, mask and token types; it has ``embeddings``, and ``pooler`` if
                ``pooled`` is called.
        """
        super().__init__()
        self.args: Any = args
        self[self.trunk_name] = trunk

    @property
    def trunk(self) -> Any:
        """The model without its head."""
        return self[self.trunk_name]

    @property
    def words(self) -> nn.Embedding:
        """The table of word embeddings."""
        return self.trunk.embeddings[self.table_name]

    @property
    def has_pooler(self) -> bool:
        """True if ``pooled`` can be called."""
        return "pooler" in self.trunk

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
        return self.trunk(input_ids, attention_mask, token_type_ids)

    def pooled(self, hidden: mx.array) -> mx.array:
        """Pool ``[B, L, D]`` to ``[B, D]``, by the first token."""
        return self.trunk.pooler(hidden)

    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        """Return logits ``[..., vocabulary]`` of ``[..., D]``; with ``ids`` ``[..., len(ids)]``."""
        head = self["lm_head"]
        return decoded(head, head(hidden), self.words, ids)

    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        """Return logits ``[B, labels]`` of ``[B, L, D]``; most classifiers do not use the mask."""
        return self["classifier"](self.pooled(hidden))

    def token_logits(self, hidden: mx.array) -> mx.array:
        """Return logits ``[..., labels]`` of ``[..., D]``."""
        return self["classifier"](hidden)

    def first_weight(self, path: str, shape: Sequence[int], key: mx.array) -> mx.array:
        """Return the weight of a new linear layer of a head, drawn as transformers draws it."""
        del path
        return self.args.initializer_range * mx.random.normal(shape, key=key)

    def sanitize(self, weights: Weights) -> Weights:
        """Return the weights under the names of this model's parameters."""
        weights = without(self.renamed(weights), *self.unused())
        if self.args.head != "masked_lm":
            return without(weights, self.mlm_prefix)
        words = f"{self.trunk_name}.embeddings.{self.table_name}.weight"
        table = words if self.args.tie_word_embeddings else None
        return with_decoder(weights, self.decoder_name, self.bias_name, table=table)

    def renamed(self, weights: Weights) -> Weights:
        """Return the weights by today's names, with the trunk's prefix."""
        return modern_names(weights, self.trunk_name, self.trunk_parts)

    def unused(self) -> list[str]:
        """Return what the names of weights begin with that this model leaves out."""
        leaves_pooler = "pooler" in self.trunk_parts and not self.has_pooler
        return [f"{self.trunk_name}.pooler."] if leaves_pooler else []


def uses_pooler(args: EncoderArgs) -> bool:
    """True if BERT's heads need a pooler, or the checkpoint of a bare model has one."""
    return args.head == "sequence" or (args.head is None and args.add_pooling_layer)


class BertHeads(EncoderModel):
    """A trunk with BERT's heads; see ``uses_pooler``."""

    mlm_prefix = "cls."
    decoder_name = "cls.predictions.decoder"
    bias_name = "cls.predictions.bias"

    def __init__(
        self, args: EncoderArgs, trunk: nn.Module, predictions: Callable[[], Predictions]
    ) -> None:
        """Build the head of the config.

        Args:
            args: see ``EncoderModel``.
            trunk: see ``EncoderModel``.
            predictions: makes the head of a masked LM.
        """
        super().__init__(args, trunk)
        if args.head == "masked_lm":
            self.cls = PreTrainingHeads(predictions())
        elif args.head is not None:
            self.classifier = nn.Linear(args.hidden_size, args.num_labels)

    @override
    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        head = self.cls.predictions
        return decoded(head, head.transform(hidden), self.words, ids)


class RobertaHeads(EncoderModel):
    """A trunk with RoBERTa's heads, which take hidden states; only a bare model has a pooler."""

    def __init__(self, args: BertArgs, trunk: nn.Module) -> None:
        super().__init__(args, trunk)
        if args.head == "masked_lm":
            self.lm_head = LMHead(
                args.hidden_size,
                args.vocab_size,
                gelu,
                tied=args.tie_word_embeddings,
                eps=args.layer_norm_eps,
            )
        elif args.head == "sequence":
            self.classifier = ClassificationHead(args.hidden_size, args.num_labels)
        elif args.head == "token":
            self.classifier = nn.Linear(args.hidden_size, args.num_labels)

    @override
    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        return self.classifier(hidden)
