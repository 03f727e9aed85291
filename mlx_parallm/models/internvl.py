"""The text half of InternVL, which mlx_lm lacks: a model of mlx_lm that the config names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import KVCache

# PREFIX: of the text model's weights here, and in checkpoints of mlx-community.
PREFIX = "language_model."
# NAMES: prefixes of its weights in other checkpoints, and here; the first that fits counts.
NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "language_model.": "language_model.",
}


@dataclass
class ModelArgs(BaseModelArgs):
    """Fields of ``config.json``; ``llm_config`` is the authors' name of ``text_config``."""

    model_type: str
    text_config: dict[str, Any] | None = None
    llm_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None

    @property
    def text(self) -> dict[str, Any]:
        """The text model's fields.

        Raises:
            ValueError: there are none.
        """
        text = self.text_config or self.llm_config
        if not text:
            raise ValueError("text_config is missing")
        if self.tie_word_embeddings is None:
            return text
        return {"tie_word_embeddings": self.tie_word_embeddings, **text}


class Model(nn.Module):
    """A text model with the interface of mlx_lm's vision-language models."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        classes: tuple[Any, Any] = mlx_lm_utils._get_classes(args.text)
        self.language_model = classes[0](classes[1].from_dict(args.text))

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Return logits ``[batch, length, vocab]``."""
        return self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the text model's weights by its own names; the tower's are left out."""
        own: dict[str, mx.array] = {}
        for name, array in weights.items():
            prefix = next((prefix for prefix in NAMES if name.startswith(prefix)), None)
            if prefix is not None:
                full = NAMES[prefix] + name.removeprefix(prefix)
                own[full.removeprefix(PREFIX)] = array
        text: Any = self.language_model
        own = text.sanitize(own) if hasattr(text, "sanitize") else own
        return {PREFIX + name: array for name, array in own.items()}

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the text model."""
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        """Return a cache for each layer."""
        if hasattr(self.language_model, "make_cache"):
            return self.language_model.make_cache()
        return [KVCache() for _ in self.layers]
