"""The config fields that encoders share: sizes, head, labels and pooler."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from mlx_parallm.types.errors import ModelLoadError

Head = Literal["masked_lm", "sequence", "token"]

#: ``HEADS``: endings of Hugging Face's class names, and the head of such a class.
HEADS: dict[str, Head | None] = {
    "ForMaskedLM": "masked_lm",
    "ForPreTraining": "masked_lm",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "Model": None,
    # In Stanford's class, the dense layer is no part of the architecture.
    "HF_ColBERT": None,
}


@dataclass
class EncoderArgs:
    """Fields of ``config.json`` under BERT's names; defaults are BERT's.

    Attributes:
        architectures: Hugging Face's class names; the first one decides the head.
        num_labels: number of a classifier's labels; from ``id2label`` if the config has it.
        initializer_range: standard deviation of the weights of new layers.
        tie_word_embeddings: the decoder of a masked LM is the table of word embeddings.
        add_pooling_layer: True if the checkpoint of a bare model has a pooler. It is Hugging
            Face's constructor argument and not in their files; the loader sets it from the weights.
    """

    architectures: list[str] | None = None
    num_labels: int = 2
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    add_pooling_layer: bool = True
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        """Refuse a config whose heads do not divide its dimensions.

        Raises:
            ModelLoadError: they do not.
        """
        dims, heads = self.hidden_size, self.num_attention_heads
        if heads < 1 or dims % heads:
            raise ModelLoadError(
                f"{dims} dimensions cannot be divided among {heads} attention heads."
            )

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read ``config.json``; fields that this class does not have are ignored."""
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in config.items() if name in names}
        if labels := config.get("id2label"):
            values["num_labels"] = len(labels)
        return cls(**values)

    @property
    def max_length(self) -> int:
        """The longest input, in tokens."""
        return self.max_position_embeddings

    @property
    def head(self) -> Head | None:
        """The head of the first architecture; None: the bare model.

        Raises:
            ModelLoadError: the class has none of the heads in ``HEADS``.
        """
        name = self.architectures[0] if self.architectures else "Model"
        for ending, head in HEADS.items():
            if name.endswith(ending):
                return head
        raise ModelLoadError(
            f"{name} is not supported: its name ends in none of {', '.join(HEADS)}."
        )
