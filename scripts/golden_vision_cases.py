"""The vision-language models with golden values: tiny configs, and the prompts they continue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCAB = 96
#: ``SPECIALS``: the tokens that pictures are written with, by id; words follow.
SPECIALS = (
    *("<pad>", "<unk>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]"),
    *("[IMG_END]", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
#: ``SHOWN_ROWS``: rows of a prompt's features that are kept.
SHOWN_ROWS = (0, 1, -1)


def golden_picture(seed: int, height: int, width: int) -> np.ndarray:
    """Return a picture, uint8 ``[height, width, 3]``: noise over a slope, so that it is no grey."""
    random = np.random.RandomState(seed)
    noise = random.randint(0, 128, (height, width, 3))
    slope = np.linspace(0, 127, width)[None, :, None] * random.rand(1, 1, 3)
    return (noise + slope).astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCase:
    """A tiny model.

    Attributes:
        name: of its file.
        architecture: its class in transformers.
        config: its ``config.json``.
        processor: its ``preprocessor_config.json``.
        before: text that templates write before a picture.
        after: text that they write behind it.
        sizes: heights and widths of the pictures of each prompt.
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
LLAVA = VisionCase(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    config={
        "model_type": "llava",
        "image_token_index": SPECIALS.index("<image>"),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": CLIP,
    },
    processor={
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    },
)

CASES = (LLAVA,)
