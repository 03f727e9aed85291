"""ELECTRA (Clark et al., 2020, arXiv:2003.10555): its generator and its discriminator."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.bert_layers import Attention, BertArgs, Embeddings, Encoder, Layer, key_mask
from mlx_parallm.models.checkpoint_names import Weights, modern_names, with_decoder, without
from mlx_parallm.models.encoder_args import Head
from mlx_parallm.models.heads import ClassificationHead, vocabulary_decoder, vocabulary_logits
from mlx_parallm.numerics.gelu import gelu

WORDS = "electra.embeddings.word_embeddings.weight"


@dataclass
class ModelArgs(BertArgs):
    """The config of ELECTRA."""

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024

    @property
    def head(self) -> Head | None:
        """The head; None for a discriminator, whose task (replaced tokens) is not supported."""
        names = self.architectures or [""]
        return None if names[0].endswith("ForPreTraining") else super().head


class Trunk(nn.Module):
    """ELECTRA without its heads: BERT whose embeddings may be narrower than its layers."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embeddings = Embeddings(
            args.vocab_size,
            args.embedding_size,
            positions=args.max_position_embeddings,
            token_types=args.type_vocab_size,
            eps=args.layer_norm_eps,
        )
        if args.embedding_size != args.hidden_size:
            self.embeddings_project = nn.Linear(args.embedding_size, args.hidden_size)
        self.encoder = Encoder(
            [Layer(args, Attention(args)) for _ in range(args.num_hidden_layers)]
        )

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None,
        token_type_ids: mx.array | None,
    ) -> mx.array:
        """Return the last hidden states of right-padded ids."""
        hidden = self.embeddings(input_ids, token_type_ids)
        if "embeddings_project" in self:
            hidden = self.embeddings_project(hidden)
        return self.encoder(hidden, key_mask(attention_mask))


class GeneratorPredictions(nn.Module):
    """The layers between the generator's trunk and its decoder."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.hidden_size, args.embedding_size)
        self.LayerNorm = nn.LayerNorm(args.embedding_size, eps=args.layer_norm_eps)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return ``[..., embedding size]``."""
        return self.LayerNorm(gelu(self.dense(hidden)))


class Model(nn.Module):
    """ELECTRA with the head of its first architecture; it has no pooler.

    The discriminator is a bare model or a classifier, the generator a masked LM.
    """

    has_pooler = False

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.electra = Trunk(args)
        if args.head == "masked_lm":
            self.generator_predictions = GeneratorPredictions(args)
            self.generator_lm_head = vocabulary_decoder(
                args.embedding_size, args.vocab_size, tied=args.tie_word_embeddings
            )
        elif args.head == "sequence":
            self.classifier = ClassificationHead(args.hidden_size, args.num_labels, gelu)
        elif args.head == "token":
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
        return self.electra(input_ids, attention_mask, token_type_ids)

    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        """Return logits ``[..., vocabulary]`` of ``[..., D]``; with ``ids`` ``[..., len(ids)]``."""
        words = self.electra.embeddings.word_embeddings
        return vocabulary_logits(
            self.generator_lm_head, self.generator_predictions(hidden), words, ids
        )

    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        """Return logits ``[B, labels]`` of ``[B, L, D]``; the mask is not used."""
        return self.classifier(hidden)

    def token_logits(self, hidden: mx.array) -> mx.array:
        """Return logits ``[..., labels]`` of ``[..., D]``."""
        return self.classifier(hidden)

    def sanitize(self, weights: Weights) -> Weights:
        """Return the weights under the names of this model's parameters."""
        parts = ("embeddings", "embeddings_project", "encoder")
        weights = without(modern_names(weights, "electra", parts), "discriminator_predictions.")
        if self.args.head != "masked_lm":
            return without(weights, "generator_")
        table = WORDS if self.args.tie_word_embeddings else None
        bias = "generator_lm_head.bias"
        return with_decoder(weights, "generator_lm_head", bias, table=table)
