"""Images are written as transformers' processors write them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import (
    AutoImageProcessor,
    Gemma3Processor,
    Gemma4Processor,
    Idefics3Processor,
    InternVLProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)

from mlx_parallm.images.families import FAMILIES, Arrays, ImageFamily

SIZES = [(40, 50), (1, 1), (300, 500), (700, 90), (1024, 768)]
GEMMA = "<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>"
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "llava": (
        {"vision_config": {"image_size": 336, "patch_size": 14}},
        LlavaProcessor,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
    ),
    "llava_next": (
        {
            "vision_config": {"image_size": 336, "patch_size": 14},
            "image_grid_pinpoints": PINPOINTS,
        },
        LlavaNextProcessor,
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "image_grid_pinpoints": PINPOINTS,
        },
    ),
    "idefics3": (
        {"vision_config": {"image_size": 364, "patch_size": 14}, "scale_factor": 2},
        Idefics3Processor,
        {"image_processor_type": "Idefics3ImageProcessor"},
    ),
    "qwen2_vl": (
        {"vision_config": {"spatial_merge_size": 2}},
        Qwen2VLProcessor,
        {"image_processor_type": "Qwen2VLImageProcessor"},
    ),
    "qwen3_vl": (
        {"vision_config": {"spatial_merge_size": 2}},
        Qwen3VLProcessor,
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16},
    ),
    "gemma4": (
        {"text_config": {}},
        Gemma4Processor,
        {"image_processor_type": "Gemma4ImageProcessor"},
    ),
    "internvl": (
        {"vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}},
        InternVLProcessor,
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 448, "width": 448},
        },
    ),
    "gemma3": (
        {"mm_tokens_per_image": 256},
        Gemma3Processor,
        {"image_processor_type": "Gemma3ImageProcessor"},
    ),
}
#: What the processors read of themselves.
PROCESSOR: dict[str, Any] = {
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
    "image_seq_len": 169,
    "image_seq_length": 256,
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "full_image_sequence": f"\n\n{GEMMA}\n\n",
}


def expanded(family: ImageFamily, arrays: Arrays) -> str:
    """Return the text of an image with each run written out."""
    written = family.written(arrays)
    first, *rest = written.text.split(family.feature_token)
    assert len(rest) == len(written.runs)
    return first + "".join(
        family.feature_token * run + text for run, text in zip(written.runs, rest, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_images_are_written_as_transformers_writes_them(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    config, processor_class, settings = CASES[name]
    family = FAMILIES[name]({**config, "model_type": name})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    prepare: Any = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    pixels = np.zeros((*size, 3), np.uint8)
    try:
        arrays = prepare(
            images=[pixels],
            return_tensors="np",
            input_data_format="channels_last",
            **family.options,
        )
    except ValueError:
        pytest.skip("The image processor refuses an image of this size.")
    # Its constructor wants a tokenizer.
    processor = processor_class.__new__(processor_class)
    vars(processor).update(
        PROCESSOR,
        image_token=family.feature_token,
        image_processor=SimpleNamespace(merge_size=2, image_grid_pinpoints=PINPOINTS),
    )
    assert expanded(family, arrays) == processor.replace_image_token(arrays, 0)


def test_folders_of_pixtral_are_told_from_those_of_clip() -> None:
    vision = {"model_type": "pixtral", "patch_size": 16}
    family = FAMILIES["llava"]({"model_type": "llava", "vision_config": vision})
    assert family.written({"image_sizes": np.array([[32, 48]])}) == (
        "[IMG][IMG_BREAK][IMG][IMG_END]",
        (3, 3),
    )


def test_mistral_3_writes_a_run_for_each_row_of_merged_patches() -> None:
    # transformers' PixtralProcessor writes the same, but cannot be imported without torch.
    config = {
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", "patch_size": 14},
    }
    family = FAMILIES["mistral3"](config)
    assert family.options == {"patch_size": {"height": 28, "width": 28}}
    assert family.written({"image_sizes": np.array([[84, 56]])}) == (
        "[IMG][IMG_BREAK][IMG][IMG_BREAK][IMG][IMG_END]",
        (2, 2, 2),
    )
