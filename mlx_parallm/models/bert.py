"""BERT (Devlin et al., 2019, arXiv:1810.04805), and models of its shape such as MiniLM."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from mlx_parallm.models.bert_layers import BertArgs, BertTrunk, activation
from mlx_parallm.models.heads import BertHeads, Predictions, Transform, uses_pooler


@dataclass
class ModelArgs(BertArgs):
    """The config of BERT."""


class Model(BertHeads):
    """BERT with the head of its first architecture.

    The weights of the next-sentence task are dropped.
    """

    trunk_name = "bert"

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, BertTrunk(args, pooler=uses_pooler(args)), self._predictions)

    def _predictions(self) -> Predictions:
        args, dims = self.args, self.args.hidden_size
        transform = Transform(dims, dims, activation(args.hidden_act), eps=args.layer_norm_eps)
        return Predictions(transform, dims, args.vocab_size, tied=args.tie_word_embeddings)

    @override
    def unused(self) -> list[str]:
        return [*super().unused(), "cls.seq_relationship."]
