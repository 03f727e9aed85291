"""The text halves of vision-language models that mlx_lm lacks, with its interface for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import mistral3
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import KVCache

from mlx_parallm.models.checkpoint_names import Weights

# PREFIX: of InternVL's text weights here, and in checkpoints of mlx-community.
PREFIX = "language_model."
# INTERNVL_NAMES, IDEFICS3_NAMES: prefixes of the text model's weights in checkpoints, and here.
# Idefics3's of mlx-community begin with "language_model.".
INTERNVL_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "language_model.": "language_model.",
}
IDEFICS3_NAMES = {
    "model.text_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "language_model.lm_head.": "language_model.lm_head.",
    "language_model.model.": "language_model.model.",
    "language_model.": "language_model.model.",
}
#: ``NEWLINE``: LLaVA-NeXT's mark behind a row of patches, a weight of the tower.
NEWLINE = "image_newline"


def _renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Return the weights that have one of the prefixes, with its new one; the first that fits."""
    own: Weights = {}
    for name, array in weights.items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), None)
        if prefix is not None:
            own[names[prefix] + name.removeprefix(prefix)] = array
    return own


@dataclass
class InternVLArgs(BaseModelArgs):
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


class InternVL(nn.Module):
    """InternVL: a model of mlx_lm that the config names."""

    def __init__(self, args: InternVLArgs) -> None:
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

    def sanitize(self, weights: Weights) -> Weights:
        """Return the text model's weights by its own names; the tower's are left out."""
        own = {
            name.removeprefix(PREFIX): array
            for name, array in _renamed(weights, INTERNVL_NAMES).items()
        }
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


@dataclass
class Idefics3Args(mistral3.ModelArgs):
    """Fields of ``config.json``."""

    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Read fields of the text model that are beside its config."""
        self.text_config.setdefault("tie_word_embeddings", self.tie_word_embeddings)
        self.text_config.setdefault("model_type", "llama")
        super().__post_init__()


class Idefics3(mistral3.Model):
    """Idefics3 and SmolVLM: mlx_lm's Llama."""

    def sanitize(self, weights: Weights) -> Weights:
        """Return the text model's weights by mlx_lm's names; the tower's are left out."""
        return super().sanitize(_renamed(weights, IDEFICS3_NAMES))


class LlavaNext(mistral3.Model):
    """LLaVA-NeXT: a Mistral or Llama, as in mlx_lm's LLaVA."""

    def sanitize(self, weights: Weights) -> Weights:
        """Return the text model's weights by mlx_lm's names; the tower's are left out."""
        return super().sanitize(
            {name: array for name, array in weights.items() if not name.endswith(NEWLINE)}
        )


#: ``TEXT_HALVES``: the classes of models and of their fields, by ``model_type``.
TEXT_HALVES: Mapping[str, tuple[type, type]] = {
    "idefics3": (Idefics3, Idefics3Args),
    "internvl": (InternVL, InternVLArgs),
    "internvl_chat": (InternVL, InternVLArgs),
    "llava_next": (LlavaNext, mistral3.ModelArgs),
    "smolvlm": (Idefics3, Idefics3Args),
}
