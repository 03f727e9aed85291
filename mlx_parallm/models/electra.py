"""ELECTRA (Clark et al., 2020, arXiv:2003.10555): its generator and its discriminator."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.models.bert_layers import BertArgs, Embeddings, Encoder, bert_layers, key_mask
from mlx_parallm.models.encoder_args import Head
from mlx_parallm.models.heads import (
    ClassificationHead,
    EncoderModel,
    Transform,
    vocabulary_decoder,
    vocabulary_logits,
)
from mlx_parallm.numerics.elementary import gelu


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
        self.encoder = Encoder(bert_layers(args))

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


class Model(EncoderModel):
    """ELECTRA with the head of its first architecture; it has no pooler.

    The discriminator is a bare model or a classifier, the generator a masked LM.
    """

    trunk_name = "electra"
    trunk_parts = ("embeddings", "embeddings_project", "encoder")
    mlm_prefix = "generator_"
    decoder_name = "generator_lm_head"
    bias_name = "generator_lm_head.bias"

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, Trunk(args))
        dims, table_dims = args.hidden_size, args.embedding_size
        if args.head == "masked_lm":
            self.generator_predictions = Transform(dims, table_dims, gelu, eps=args.layer_norm_eps)
            self.generator_lm_head = vocabulary_decoder(
                table_dims, args.vocab_size, tied=args.tie_word_embeddings
            )
        elif args.head == "sequence":
            self.classifier = ClassificationHead(dims, args.num_labels, gelu)
        elif args.head == "token":
            self.classifier = nn.Linear(dims, args.num_labels)

    @override
    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        hidden = self.generator_predictions(hidden)
        return vocabulary_logits(self.generator_lm_head, hidden, self.words, ids)

    @override
    def sequence_logits(self, hidden: mx.array, attention_mask: mx.array | None = None) -> mx.array:
        return self.classifier(hidden)

    @override
    def unused(self) -> list[str]:
        return ["discriminator_predictions."]
