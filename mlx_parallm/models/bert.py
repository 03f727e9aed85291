"""BERT (Devlin et al., 2019, arXiv:1810.04805), and models of its shape such as MiniLM."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.bert_layers import BertArgs, BertTrunk, activation
from mlx_parallm.models.checkpoint_names import (
    Weights,
    modern_names,
    with_decoder,
    without,
)
from mlx_parallm.models.heads import Predictions, PreTrainingHeads

DECODER = "cls.predictions.decoder"
WORDS = "bert.embeddings.word_embeddings.weight"


@dataclass
class ModelArgs(BertArgs):
    """The config of BERT."""


class Transform(nn.Module):
    """The layers between the trunk and the decoder."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.hidden_size, args.hidden_size)
        self.LayerNorm = nn.LayerNorm(args.hidden_size, eps=args.layer_norm_eps)
        self.activation = activation(args.hidden_act)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return hidden states of the same shape."""
        return self.LayerNorm(self.activation(self.dense(hidden)))


class Model(nn.Module):
    """BERT with the head of its first architecture.

    The classifier of sequences uses the pooler; a masked LM and a classifier of tokens have none.
    The weights of the next-sentence task are dropped.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.has_pooler = args.head == "sequence" or (args.head is None and args.add_pooling_layer)
        self.bert = BertTrunk(args, pooler=self.has_pooler)
        if args.head == "masked_lm":
            self.cls = PreTrainingHeads(
                Predictions(
                    Transform(args),
                    args.hidden_size,
                    args.vocab_size,
                    tied=args.tie_word_embeddings,
                )
            )
        elif args.head is not None:
            self.classifier = nn.Linear(args.hidden_size, args.num_labels)

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
            token_type_ids: int32 ``[B, L]``; None: all are 0.
        """
        return self.bert(input_ids, attention_mask, token_type_ids)

    def pooled(self, hidden: mx.array) -> mx.array:
        """Pool ``[B, L, D]`` to ``[B, D]``."""
        return self.bert.pooler(hidden)

    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        """Return logits ``[..., vocabulary]`` of ``[..., D]``; with ``ids`` ``[..., len(ids)]``."""
        return self.cls.predictions(hidden, self.bert.embeddings.word_embeddings, ids)

    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        """Return logits ``[B, labels]`` of ``[B, L, D]``; the mask is not used."""
        return self.classifier(self.pooled(hidden))

    def token_logits(self, hidden: mx.array) -> mx.array:
        """Return logits ``[..., labels]`` of ``[..., D]``."""
        return self.classifier(hidden)

    def sanitize(self, weights: Weights) -> Weights:
        """Return the weights under the names of this model's parameters."""
        weights = modern_names(weights, "bert", ("embeddings", "encoder", "pooler"))
        weights = without(weights, "cls.seq_relationship.")
        if not self.has_pooler:
            weights = without(weights, "bert.pooler.")
        if self.args.head != "masked_lm":
            return without(weights, "cls.")
        table = WORDS if self.args.tie_word_embeddings else None
        return with_decoder(weights, DECODER, "cls.predictions.bias", table=table)
