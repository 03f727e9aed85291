"""The parts that vision-language models with golden values share: tokens, images, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCAB = 96
#: ``SPECIALS``: the tokens that images are written with, by id; words follow.
SPECIALS = (
    *("<pad>", "<unk>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]"),
    *("[IMG_END]", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
    *("<|image>", "<|image|>", "<image|>", "<img>", "<IMG_CONTEXT>", "</img>"),
)
#: ``SHOWN_ROWS``: rows of a prompt's features that are kept.
SHOWN_ROWS = (0, 1, -1)


def golden_image(seed: int, height: int, width: int) -> np.ndarray:
    """Return an image, uint8 ``[height, width, 3]``: noise over a slope, so that it is no grey."""
    random = np.random.RandomState(seed)
    noise = random.randint(0, 128, (height, width, 3))
    slope = np.linspace(0, 127, width)[None, :, None] * random.rand(1, 1, 3)
    return (noise + slope).astype(np.uint8)


#: ``BASE``: RoPE's base, in the fields that transformers 5 writes; no model has it by default.
BASE = 3e4
LOCAL_BASE = 5e3
#: ``Shapes``: the shapes of weights by their names in a checkpoint.
Shapes = dict[str, list[int]]


def as_saved(shapes: Shapes) -> Shapes:
    """Return the weights that transformers saves: published checkpoints have the same."""
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCase:
    """A tiny model.

    Attributes:
        name: of its file.
        architecture: its class in transformers.
        config: its ``config.json``.
        processor: its ``preprocessor_config.json``.
        before: text that templates write before an image.
        after: text that they write behind it.
        sizes: heights and widths of the images of each prompt.
        published: returns the weights of published checkpoints for those that transformers saves.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    processor: dict[str, Any]
    before: str = ""
    after: str = ""
    sizes: tuple[tuple[tuple[int, int], ...], ...] = field(
        default=(((40, 50),), ((50, 40), (20, 70)), ())
    )
    published: Callable[[Shapes], Shapes] = as_saved


TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
}
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
