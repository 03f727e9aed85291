"""The text half of Idefics3 and SmolVLM, which mlx_lm lacks: mlx_lm's Llama by their names."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models import mistral3

# NAMES: prefixes of the text model's weights in checkpoints, and mlx_lm's. Those of mlx-community
# begin with "language_model."; the first prefix that fits counts.
NAMES = {
    "model.text_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "language_model.lm_head.": "language_model.lm_head.",
    "language_model.model.": "language_model.model.",
    "language_model.": "language_model.model.",
}


@dataclass
class ModelArgs(mistral3.ModelArgs):
    """Fields of ``config.json``."""

    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Read fields of the text model that are beside its config."""
        self.text_config.setdefault("tie_word_embeddings", self.tie_word_embeddings)
        self.text_config.setdefault("model_type", "llama")
        super().__post_init__()


class Model(mistral3.Model):
    """Llama with the interface of mlx_lm's vision-language models."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the text model's weights by mlx_lm's names; the tower's are left out."""
        own: dict[str, mx.array] = {}
        for name, array in weights.items():
            prefix = next((prefix for prefix in NAMES if name.startswith(prefix)), None)
            if prefix is not None:
                own[NAMES[prefix] + name.removeprefix(prefix)] = array
        return super().sanitize(own)
