"""Files of images reach a model as transformers' own image processors make them of Pillow's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, LlavaNextProcessor

from mlx_parallm.images.families import FAMILIES, ImageFamily
from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.processor import ImageProcessor
from mlx_parallm.media.decode import decode_image, read_image
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError
from tests.golden_images import read_vision
from tests.internvl_folders import authors_config
from tests.unit.media.images import exif_of, file_of, gif_of_frames, noise

CHAT, SMOL = "internvl_chat", "smolvlm"
#: ``PUBLISHED``: the golden models whose settings others have, whose processors differ.
PUBLISHED = {CHAT: "internvl", SMOL: "idefics3"}
FAMILY_NAMES = (
    *("gemma3", "gemma4", "idefics3", "internvl", CHAT, "llava", "llava_next", "mistral3"),
    *("pixtral", "qwen2_vl", "qwen3_vl", SMOL),
)
#: ``OPTIONS``: arguments that transformers' processors give their image processors.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "idefics3": {"return_row_col_info": True},
    SMOL: {"return_row_col_info": True},
    "internvl": {"crop_to_patches": True},
    CHAT: {"crop_to_patches": True},
    "mistral3": {"patch_size": 8},
    "pixtral": {"patch_size": 4},
}
Arrays = Mapping[str, np.ndarray]
# COUNTS: the features of an image in the golden models, by what transformers makes of it.
COUNTS: Mapping[str, Callable[[Arrays], int]] = {
    "gemma3": lambda arrays: 16,
    "gemma4": lambda arrays: int(arrays["num_soft_tokens_per_image"][0]),
    "idefics3": lambda arrays: 4 * arrays["pixel_values"].shape[1],
    SMOL: lambda arrays: 4 * arrays["pixel_values"].shape[1],
    "internvl": lambda arrays: 4 * len(arrays["pixel_values"]),
    CHAT: lambda arrays: 4 * len(arrays["pixel_values"]),
    "llava": lambda arrays: 16,
    "llava_next": lambda arrays: next_features(*arrays["image_sizes"][0].tolist()),
    "mistral3": lambda arrays: int(np.prod(arrays["image_sizes"][0] // 8)),
    "pixtral": lambda arrays: int(np.prod(arrays["image_sizes"][0] // 4)),
    "qwen2_vl": lambda arrays: int(np.prod(arrays["image_grid_thw"][0]) // 4),
    "qwen3_vl": lambda arrays: int(np.prod(arrays["image_grid_thw"][0]) // 4),
}


def next_features(height: int, width: int) -> int:
    """Return the features of an image in the golden LLaVA-NeXT, by transformers."""
    # Its constructor wants a tokenizer.
    processor: Any = LlavaNextProcessor.__new__(LlavaNextProcessor)
    points = read_vision("llava_next")["processor"]["image_grid_pinpoints"]
    vars(processor).update(
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_processor=SimpleNamespace(image_grid_pinpoints=points),
    )
    # The class token of the tower is left out.
    return int(processor._get_number_of_features(height, width, 32, 32)) - 1


def files() -> Iterator[tuple[str, bytes]]:
    """Yield the names and bytes of the images."""
    sizes = [(1, 1), (20, 4000), (200, 1), (3, 3), (2, 3), (3, 2), (1, 3), (33, 17), (17, 33)]
    sizes += [(64, 64), (50, 40), (300, 20), (20, 300), (101, 99), (65, 31), (224, 160)]
    for width, height in sizes:
        yield f"{width} x {height}", file_of(noise(size=(width, height)))
    for mode in ("1", "L", "LA", "P", "RGBA"):
        yield f"png {mode}", file_of(noise("RGB", (41, 37)).convert(mode))
    transparent = noise("RGB", (41, 37)).quantize(16)
    yield "png, a transparent entry of its palette", file_of(transparent, transparency=3)
    yield "gif, a transparent entry", file_of(transparent, "gif", transparency=3)
    yield "gif", file_of(noise("RGB", (41, 37)).quantize(16), "gif")
    yield "gif of frames", gif_of_frames(3)
    for mode in ("L", "RGB", "CMYK"):
        yield f"jpeg {mode}", file_of(noise(mode, (41, 37)), "jpeg")
    yield "progressive jpeg", file_of(noise(size=(41, 37)), "jpeg", progressive=True)
    yield "webp", file_of(noise(size=(41, 37)), "webp", lossless=False)
    yield "webp RGBA", file_of(noise("RGBA", (41, 37)), "webp")
    yield "bmp", file_of(noise(size=(41, 37)), "bmp")
    for orientation in range(1, 9):
        data = file_of(noise(size=(61, 23)), "jpeg", exif=exif_of(orientation))
        yield f"jpeg, orientation {orientation}", data
    yield "png, orientation 6", file_of(noise(size=(61, 23)), exif=exif_of(6))


FILES = dict(files())
# SMALL_PIXELS: more than the golden models' settings allow, which have sides of 64 pixels, 6 tiles
# of 32, and 70 tokens of 12 at most.
SMALL_PIXELS = 128 * 128
# LINES: the longest shapes that are decoded.
LINES = ((1, 200), (200, 1), (3, 600), (20, 4000), (163, 32_600), (32_600, 163))


def as_seen(data: bytes) -> Image.Image:
    """Return a file's image by Pillow alone: turned, with white behind it."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(colours, mask=colours.getchannel("A"))
    return white


def config_of(name: str) -> dict[str, Any]:
    """Return a golden model's config."""
    published = read_vision(PUBLISHED.get(name, name))["config"]
    if name == CHAT:
        return authors_config(published)
    return published | {"model_type": SMOL} if name == SMOL else published


@cache
def processors(name: str) -> tuple[ImageProcessor, Any]:
    """Return this package's processor of a family, and transformers'."""
    folder = Path(mkdtemp())
    # The authors' folders of InternVL do not say how their images are prepared.
    published = read_vision(PUBLISHED.get(name, name))["processor"]
    if name == SMOL:
        published["image_processor_type"] = "SmolVLMImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(published))
    theirs = AutoImageProcessor.from_pretrained(folder, backend="pil")
    family: ImageFamily = FAMILIES[config_of(name)["model_type"]](config_of(name))
    form = ImageForm(
        family=family,
        folder=Path("/none") if name == CHAT else folder,
        feature_id=0,
        template_reads_parts=True,
        row_bytes=1,
        fingerprint="",
    )
    return ImageProcessor(form), theirs


def test_there_are_forty_images() -> None:
    assert len(FILES) >= 40


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_pixels_grids_and_counts_are_those_of_transformers(name: str) -> None:
    own, theirs = processors(name)
    for title, data in FILES.items():
        try:
            options = OPTIONS.get(name, {})
            expected = theirs(images=[as_seen(data)], return_tensors="np", **options)
        except ValueError:
            with pytest.raises(InvalidRequestError):
                own.prepare(decode_image(read_image(data, MediaLimits())))
            continue
        pixels = decode_image(read_image(data, MediaLimits()))
        made = own.prepare(pixels)
        assert made.arrays.keys() == dict(expected).keys(), title
        for key, array in made.arrays.items():
            actual = np.frombuffer(array.data, array.dtype).reshape(array.shape)
            np.testing.assert_array_equal(actual, np.asarray(expected[key]), err_msg=title)
        assert sum(made.written.runs) == COUNTS[name](expected), title
        height, width, _ = pixels.shape
        counted = own.least_tokens(width, height)
        assert counted == (COUNTS[name](expected) if "qwen" in name else 0), title


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_sizes_are_known_before_images_are_resized(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare ``resized_pixels`` with a processor's result, or with its settings' bound."""
    own, _ = processors(name)
    resize, sizes = Image.Image.resize, list[tuple[int, int]]()

    def recorded(image: Image.Image, size: Any, *args: Any, **kwargs: Any) -> Image.Image:
        sizes.append(tuple(size))
        return resize(image, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", recorded)
    for width, height in LINES:
        sizes.clear()
        pixels = own.resized_pixels(width, height)
        with contextlib.suppress(InvalidRequestError):
            own.prepare(np.zeros((height, width, 3), np.uint8))
        made = max((columns * rows for columns, rows in sizes), default=0)
        # Lengths are rounded to whole pixels.
        assert made <= 1.02 * pixels if pixels else made <= SMALL_PIXELS, (width, height, sizes)
