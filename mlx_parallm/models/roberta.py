"""RoBERTa (Liu et al., 2019, arXiv:1907.11692): BERT with positions after the padding id."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.models.bert_layers import BertArgs, BertTrunk
from mlx_parallm.models.heads import RobertaHeads
from mlx_parallm.types.errors import ModelLoadError


@dataclass
class ModelArgs(BertArgs):
    """The config of RoBERTa."""

    vocab_size: int = 50265
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token_id is None:
            raise ModelLoadError("pad_token_id must not be null, because positions start after it.")

    @property
    def padding_id(self) -> int:
        """The padding id, which positions skip."""
        return self.pad_token_id or 0

    @property
    def max_length(self) -> int:
        """The longest input, in tokens; positions up to the padding id are not used."""
        return self.max_position_embeddings - self.padding_id - 1


class Model(RobertaHeads):
    """RoBERTa with the head of its first architecture; only the bare model has a pooler."""

    trunk_name = "roberta"

    def __init__(self, args: ModelArgs) -> None:
        pooler = args.head is None and args.add_pooling_layer
        super().__init__(args, BertTrunk(args, pooler=pooler, padding_id=args.padding_id))
