"""mlx_lm's Gemma 2, with the window that every other layer of transformers' has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma2
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

SLIDING = "sliding_attention"


@dataclass
class ModelArgs(gemma2.ModelArgs):
    """Fields of ``config.json``; ``layer_types`` are alternating if there are none."""

    sliding_window: int | None = 4096
    max_position_embeddings: int = 8192
    layer_types: Sequence[str] | None = None

    @property
    def slides(self) -> list[bool]:
        """True for each layer that attends to the latest tokens only."""
        window = self.sliding_window
        if window is None or window >= self.max_position_embeddings:
            return [False] * self.num_hidden_layers
        if self.layer_types is None:
            return [number % 2 == 0 for number in range(self.num_hidden_layers)]
        return [kind == SLIDING for kind in self.layer_types]


class WindowedTrunk(gemma2.GemmaModel):
    """The layers, each with the mask of its kind."""

    args: ModelArgs

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Return hidden states ``[batch, length, size]``."""
        h = self.embed_tokens(inputs) * self.args.hidden_size**0.5
        caches = cache or [None] * len(self.layers)
        slides = self.args.slides
        masks: dict[bool, Any] = {
            kind: create_attention_mask(
                h,
                caches[slides.index(kind)],
                window_size=self.args.sliding_window if kind else None,
                return_array=True,
            )
            for kind in set(slides)
        }
        for layer, kind, each in zip(self.layers, slides, caches, strict=True):
            h = layer(h, masks[kind], each)
        return self.norm(h)


class Model(gemma2.Model):
    """mlx_lm's model, in which all layers attend to all tokens."""

    args: ModelArgs

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.model = WindowedTrunk(args)

    def make_cache(self) -> list[Any]:
        """Return a cache for each layer."""
        window = self.args.sliding_window
        return [
            RotatingKVCache(max_size=window) if kind else KVCache() for kind in self.args.slides
        ]
