"""The tiny encoders with golden values, with every head."""

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
    """A checkpoint with the names of its own code.

    Attributes:
        config: its config.json without the architecture.
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
        name: name of the file.
        model_type: ``model_type`` in the config.
        architecture: a class of transformers, whose ending decides the head.
        config: fields of the config that are not defaults.
        lengths: lengths of the batch's sequences, in tokens.
        token_types: True if the model has two token types.
        pad_id: the padding id of the batch.
        seed: seed of the inputs.
        remote: the checkpoint in the format of a model with its own code, which transformers
            renames; None: the checkpoint is in transformers' format.
        logits: the results' field with the head's logits; None: no head is tested.
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
    logits: str | None = "logits"

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return self.config["vocab_size"]


BERT = {**SIZES, "type_vocab_size": 2}
ROBERTA = {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}
DISTILBERT: dict[str, Any] = {
    "vocab_size": 99,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 40,
}
ELECTRA = {**BERT, "embedding_size": 16}
UNTIED = {"tie_word_embeddings": False}

OF_BERT = [
    GoldenCase("bert", "bert", "BertModel", BERT, token_types=True),
    GoldenCase("bert_masked_lm", "bert", "BertForMaskedLM", BERT, token_types=True),
    GoldenCase("bert_pretraining", "bert", "BertForPreTraining", BERT, logits="prediction_logits"),
    GoldenCase(
        "bert_untied", "bert", "BertForMaskedLM", {**BERT, **UNTIED, "hidden_act": "gelu_new"}
    ),
    GoldenCase("bert_sequence", "bert", "BertForSequenceClassification", {**BERT, **LABELS}),
    GoldenCase("bert_token", "bert", "BertForTokenClassification", {**BERT, **LABELS}),
]


def of_family(
    model_type: str,
    classes: str,
    config: dict[str, Any],
    heads: tuple[str, ...] = ("masked_lm", "sequence", "token", "untied"),
    **settings: Any,
) -> list[GoldenCase]:
    """Return the bare model of a family, and one with each of these heads.

    Args:
        model_type: ``model_type`` in the config.
        classes: the prefix of the family's class names.
        config: the config of all cases; classifiers also have three labels.
        heads: ``masked_lm``, ``sequence``, ``token``; ``untied``: a masked LM with a decoder.
        **settings: further fields of ``GoldenCase``.
    """
    kinds = {
        "masked_lm": ("ForMaskedLM", {}),
        "untied": ("ForMaskedLM", UNTIED),
        "sequence": ("ForSequenceClassification", LABELS),
        "token": ("ForTokenClassification", LABELS),
    }
    name = model_type.replace("-", "_")
    cases = [GoldenCase(name, model_type, f"{classes}Model", config, **settings)]
    for head in heads:
        ending, head_config = kinds[head]
        case = GoldenCase(
            f"{name}_{head}", model_type, classes + ending, {**config, **head_config}, **settings
        )
        cases.append(case)
    return cases


CASES = [
    *OF_BERT,
    *of_family("roberta", "Roberta", ROBERTA, pad_id=1),
    *of_family("xlm-roberta", "XLMRoberta", ROBERTA, ("masked_lm", "sequence"), pad_id=1),
    *of_family("distilbert", "DistilBert", DISTILBERT),
    *of_family("mpnet", "MPNet", {**SIZES, "pad_token_id": 1}, pad_id=1, lengths=(29, 3, 17)),
    *of_family("electra", "Electra", ELECTRA, token_types=True),
    GoldenCase("electra_pretraining", "electra", "ElectraForPreTraining", BERT, logits=None),
]
