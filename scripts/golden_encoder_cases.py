"""The encoders that golden values are written for: tiny, and with every head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
LABELS: dict[str, Any] = {
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
}


@dataclass(frozen=True, slots=True)
class RemoteFormat:
    """A checkpoint by the names that its own code has for it.

    Attributes:
        config: all of its config.json but the architecture.
        architecture: its own class.
        weights: shapes by name.
    """

    config: dict[str, Any]
    architecture: str
    weights: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """An encoder that transformers can build.

    Attributes:
        name: of the file.
        model_type: of the config.
        architecture: a class of transformers; its ending says which head there is.
        config: fields of the config that are not defaults.
        lengths: tokens of the sequences in the batch.
        token_types: whether the model has two types of tokens.
        pad_id: what the batch is padded with.
        seed: of the inputs.
        remote: the checkpoint in the format of a model whose code came with it; transformers
            reads it by its own renaming. None: the checkpoint is in transformers' format.
    """

    name: str
    model_type: str
    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (11, 3, 7)
    token_types: bool = False
    pad_id: int = 0
    seed: int = 1
    remote: RemoteFormat | None = None

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.config["vocab_size"]


BERT = {**SIZES, "type_vocab_size": 2}

CASES = [
    GoldenCase("bert", "bert", "BertModel", BERT, token_types=True),
    GoldenCase("bert_masked_lm", "bert", "BertForMaskedLM", BERT, token_types=True),
    GoldenCase("bert_pretraining", "bert", "BertForPreTraining", BERT, token_types=True),
    GoldenCase(
        "bert_untied",
        "bert",
        "BertForMaskedLM",
        {**BERT, "tie_word_embeddings": False, "hidden_act": "gelu_new"},
    ),
    GoldenCase("bert_sequence", "bert", "BertForSequenceClassification", {**BERT, **LABELS}),
    GoldenCase("bert_token", "bert", "BertForTokenClassification", {**BERT, **LABELS}),
]
