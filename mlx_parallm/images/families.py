"""Notation of an image in a prompt, for each family of models.

The forms are those of transformers' processors (``replace_image_token`` of each
``models/*/processing_*.py``), by which these models were trained; tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mlx_parallm.models.vision.anyres import tile_grid

# IMAGENET_MEAN, IMAGENET_STD: of the colours of images, by which InternVL's are normalised.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

#: ``Arrays``: what an image processor makes of one image, by transformers' names.
Arrays = Mapping[str, np.ndarray]


class WrittenImage(NamedTuple):
    """An image as text.

    Attributes:
        text: has one feature token in place of each run of them.
        runs: the length of each run.
    """

    text: str
    runs: tuple[int, ...]


class ImageFamily(Protocol):
    """Notation of an image in the prompts of one family of models.

    Attributes:
        placeholder: what chat templates write for an image.
        feature_token: the token in whose place features stand.
        options: arguments of the image processor.
        processor: class and settings of the image processor, if the folder does not have them.
        may_cut: False if the rows of an image attend to later ones, and so run in one step.
        num_added_layers: text layers that add further rows of the tower to an image's.
        counts_pixels: True if the image processor resizes to a number of pixels.
        fixes_shorter_side: True if it may resize to a length of the shorter side, whatever the
            longer one becomes.
    """

    @property
    def placeholder(self) -> str:
        """See the class."""
        ...

    @property
    def feature_token(self) -> str:
        """See the class."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """See the class."""
        ...

    @property
    def processor(self) -> Mapping[str, Any]:
        """See the class."""
        ...

    @property
    def may_cut(self) -> bool:
        """See the class."""
        ...

    @property
    def num_added_layers(self) -> int:
        """See the class."""
        ...

    @property
    def counts_pixels(self) -> bool:
        """See the class."""
        ...

    @property
    def fixes_shorter_side(self) -> bool:
        """See the class."""
        ...

    def written(self, arrays: Arrays) -> WrittenImage:
        """Return an image as text, from what the processor made of it."""
        ...

    def positions(self, arrays: Arrays) -> np.ndarray | None:
        """Return the position ids of an image's rows, counted from its first one's.

        Returns:
            int32 ``[rows, axes]``; None if they are places.
        """
        ...


class _Usual:
    """The answers that most families give."""

    __slots__ = ()

    @property
    def options(self) -> Mapping[str, Any]:
        """See ``ImageFamily``."""
        return {}

    @property
    def processor(self) -> Mapping[str, Any]:
        """See ``ImageFamily``."""
        return {}

    @property
    def may_cut(self) -> bool:
        """See ``ImageFamily``."""
        return True

    @property
    def num_added_layers(self) -> int:
        """See ``ImageFamily``."""
        return 0

    @property
    def counts_pixels(self) -> bool:
        """See ``ImageFamily``."""
        return False

    @property
    def fixes_shorter_side(self) -> bool:
        """See ``ImageFamily``."""
        return False

    def positions(self, arrays: Arrays) -> np.ndarray | None:
        """See ``ImageFamily``."""
        del arrays


@dataclass(frozen=True, slots=True)
class OneRun(_Usual):
    """An image is one run of feature tokens, of equal length for all images.

    Attributes:
        num_tokens: length of the run.
        token: the feature token, which templates write too.
    """

    num_tokens: int
    token: str = "<image>"

    @property
    def placeholder(self) -> str:
        """See ``ImageFamily``."""
        return self.token

    @property
    def feature_token(self) -> str:
        """See ``ImageFamily``."""
        return self.token

    @property
    def fixes_shorter_side(self) -> bool:
        """See ``ImageFamily``: CLIP's processor cuts the middle out of the longer side."""
        return True

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        return WrittenImage(self.token, (self.num_tokens,))


@dataclass(frozen=True, slots=True)
class LlavaNextFamily(_Usual):
    """LLaVA-NeXT: one run, of the whole image and then of its tiles.

    Attributes:
        num_whole: features of the whole image.
        tile: pixels along each side of a tile.
        side: patches along each side of a tile.
        resolutions: heights and widths of grids of tiles.
    """

    num_whole: int
    tile: int
    side: int
    resolutions: tuple[tuple[int, int], ...]

    placeholder = "<image>"
    feature_token = "<image>"

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        height, width = (int(size) for size in arrays["image_sizes"][0])
        grid = tile_grid((height, width), self.resolutions, self.tile, self.side)
        return WrittenImage(self.feature_token, (self.num_whole + grid.num_features,))


@dataclass(frozen=True, slots=True)
class Idefics3Family(_Usual):
    """Idefics3 and SmolVLM: tiles by rows and columns, each a run, then the whole image.

    Attributes:
        num_tokens: length of each run.
    """

    num_tokens: int

    placeholder = "<image>"
    feature_token = "<image>"

    @property
    def options(self) -> Mapping[str, Any]:
        """See ``ImageFamily``."""
        return {"return_row_col_info": True}

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        num_rows, num_columns = int(arrays["rows"][0][0]), int(arrays["cols"][0][0])
        begin, token = "<fake_token_around_image>", self.feature_token
        rows = [
            "".join(
                f"{begin}<row_{row}_col_{column}>{token}" for column in range(1, num_columns + 1)
            )
            for row in range(1, num_rows + 1)
        ]
        tiles = "".join(f"{row}\n" for row in rows)
        whole = f"{begin}<global-img>{token}{begin}"
        num_runs = num_rows * num_columns + 1
        text = f"{tiles}\n{whole}" if tiles else whole
        return WrittenImage(text, (self.num_tokens,) * num_runs)


@dataclass(frozen=True, slots=True)
class QwenFamily(_Usual):
    """Qwen2-VL and later: a run whose length follows from the grid of patches.

    Attributes:
        merge_size: patches along each side of the square that becomes one token.
        num_deepstack: rows of each token besides its own, for as many text layers.
    """

    merge_size: int
    num_deepstack: int = 0

    placeholder = "<|image_pad|>"
    feature_token = "<|image_pad|>"

    @property
    def num_added_layers(self) -> int:
        """See ``ImageFamily``."""
        return self.num_deepstack

    @property
    def counts_pixels(self) -> bool:
        """See ``ImageFamily``."""
        return True

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        num_patches = int(np.prod(arrays["image_grid_thw"][0]))
        return WrittenImage(self.feature_token, (num_patches // self.merge_size**2,))

    def positions(self, arrays: Arrays) -> np.ndarray | None:
        """See ``ImageFamily``: time, row and column of the merged patches."""
        _, height, width = (int(size) for size in arrays["image_grid_thw"][0])
        rows, columns = height // self.merge_size, width // self.merge_size
        places = np.indices((1, rows, columns), np.int32)
        return places.reshape(3, -1).T


@dataclass(frozen=True, slots=True)
class Gemma3Family(_Usual):
    """Gemma 3: a run between marks, on lines of its own.

    Attributes:
        num_tokens: length of the run.
    """

    num_tokens: int

    placeholder = "<start_of_image>"
    feature_token = "<image_soft_token>"

    @property
    def options(self) -> Mapping[str, Any]:
        """See ``ImageFamily``."""
        return {"do_pan_and_scan": False}

    @property
    def may_cut(self) -> bool:
        """See ``ImageFamily``."""
        return False

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        text = f"\n\n{self.placeholder}{self.feature_token}<end_of_image>\n\n"
        return WrittenImage(text, (self.num_tokens,))


@dataclass(frozen=True, slots=True)
class Gemma4Family(_Usual):
    """Gemma 4: a run between marks, whose length follows from the image's size.

    Attributes:
        sees_both_ways: True if some layers let rows of an image attend to later ones.
    """

    sees_both_ways: bool

    placeholder = "<|image|>"
    feature_token = "<|image|>"

    @property
    def may_cut(self) -> bool:
        """See ``ImageFamily``."""
        return not self.sees_both_ways

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        num_tokens = int(arrays["num_soft_tokens_per_image"][0])
        return WrittenImage(f"<|image>{self.feature_token}<image|>", (num_tokens,))


@dataclass(frozen=True, slots=True)
class InternVLFamily(_Usual):
    """InternVL 3: one run between marks, of tiles and then of the whole image.

    Attributes:
        num_tokens: features of a tile.
        placeholder: what chat templates write for an image.
        tiles: in the authors' own folders, pixels of a tile's side, and least and most tiles.
    """

    num_tokens: int
    placeholder: str = "<IMG_CONTEXT>"
    tiles: tuple[int, int, int] | None = None

    feature_token = "<IMG_CONTEXT>"

    @property
    def options(self) -> Mapping[str, Any]:
        """See ``ImageFamily``."""
        return {"crop_to_patches": True}

    @property
    def processor(self) -> Mapping[str, Any]:
        """See ``ImageFamily``; the authors cut tiles by code of their own."""
        if self.tiles is None:
            return {}
        side, least, most = self.tiles
        return {
            "image_processor_type": "GotOcr2ImageProcessorPil",
            "size": {"height": side, "width": side},
            "min_patches": least,
            "max_patches": most,
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
        }

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        num_tiles = int(arrays["num_patches"][0])
        return WrittenImage(f"<img>{self.feature_token}</img>", (self.num_tokens * num_tiles,))


@dataclass(frozen=True, slots=True)
class PixtralFamily(_Usual):
    """Pixtral and Mistral 3: a run for each row of patches, each with a mark behind it.

    Attributes:
        patch_size: pixels along each side of the square that becomes one token.
    """

    patch_size: int

    placeholder = "[IMG]"
    feature_token = "[IMG]"

    @property
    def options(self) -> Mapping[str, Any]:
        """See ``ImageFamily``: sides become multiples of what is one token."""
        return {"patch_size": {"height": self.patch_size, "width": self.patch_size}}

    def written(self, arrays: Arrays) -> WrittenImage:
        """See ``ImageFamily``."""
        height, width = (int(size) // self.patch_size for size in arrays["image_sizes"][0])
        text = f"{self.feature_token}[IMG_BREAK]" * (height - 1) + f"{self.feature_token}[IMG_END]"
        return WrittenImage(text, (width,) * height)


def _llava(config: Mapping[str, Any]) -> ImageFamily:
    vision = config["vision_config"]
    side = int(vision.get("image_size", 336)) // int(vision.get("patch_size", 14))
    # The tower of CLIP has a class token before the patches, which "full" keeps.
    is_full = config.get("vision_feature_select_strategy", "default") == "full"
    return OneRun(side * side + is_full)


def _llava_next(config: Mapping[str, Any]) -> ImageFamily:
    vision = config["vision_config"]
    tile = int(vision.get("image_size", 336))
    side = tile // int(vision.get("patch_size", 14))
    is_full = config.get("vision_feature_select_strategy", "default") == "full"
    resolutions = tuple(
        (int(height), int(width)) for height, width in config["image_grid_pinpoints"]
    )
    return LlavaNextFamily(side * side + is_full, tile, side, resolutions)


def _idefics3(config: Mapping[str, Any]) -> ImageFamily:
    vision = config["vision_config"]
    side = int(vision.get("image_size", 364)) // int(vision.get("patch_size", 14))
    return Idefics3Family(side * side // int(config.get("scale_factor", 2)) ** 2)


def _qwen(config: Mapping[str, Any]) -> ImageFamily:
    return QwenFamily(int(config["vision_config"].get("spatial_merge_size", 2)))


def _qwen3(config: Mapping[str, Any]) -> ImageFamily:
    vision = config["vision_config"]
    num_deepstack = len(vision.get("deepstack_visual_indexes", ()))
    return QwenFamily(int(vision.get("spatial_merge_size", 2)), num_deepstack)


def _gemma3(config: Mapping[str, Any]) -> ImageFamily:
    return Gemma3Family(int(config.get("mm_tokens_per_image", 256)))


def _gemma4(config: Mapping[str, Any]) -> ImageFamily:
    text = config.get("text_config", {})
    return Gemma4Family(text.get("use_bidirectional_attention") == "vision")


def _internvl(config: Mapping[str, Any]) -> InternVLFamily:
    return InternVLFamily(_tile_tokens(config, _tile_side(config)))


def _internvl_chat(config: Mapping[str, Any]) -> ImageFamily:
    """Return the family of the authors' own folders."""
    side = int(config.get("force_image_size") or _tile_side(config))
    is_cut = config.get("dynamic_image_size", True)
    least = int(config.get("min_dynamic_patch", 1)) if is_cut else 1
    most = int(config.get("max_dynamic_patch", 12)) if is_cut else 1
    return InternVLFamily(_tile_tokens(config, side), "<image>", (side, least, most))


def _tile_side(config: Mapping[str, Any]) -> int:
    size = config["vision_config"].get("image_size", 448)
    return int(size[0] if isinstance(size, list) else size)


def _tile_tokens(config: Mapping[str, Any], side: int) -> int:
    patch = config["vision_config"].get("patch_size", 14)
    patches = side // int(patch[0] if isinstance(patch, list) else patch)
    return patches**2 // round(1 / config.get("downsample_ratio", 0.5)) ** 2


def _pixtral(config: Mapping[str, Any]) -> ImageFamily:
    patch_size = int(config["vision_config"].get("patch_size", 16))
    return PixtralFamily(patch_size * int(config.get("spatial_merge_size", 1)))


def _mistral_or_llava(config: Mapping[str, Any]) -> ImageFamily:
    """Return the family of ``llava`` folders: with Pixtral's tower they are Pixtral."""
    is_pixtral = config["vision_config"].get("model_type") == "pixtral"
    return _pixtral(config) if is_pixtral else _llava(config)


#: ``FAMILIES``: makes a family from ``config.json``, by its ``model_type``.
FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ImageFamily]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "internvl_chat": _internvl_chat,
    "llava": _mistral_or_llava,
    "llava_next": _llava_next,
    "mistral3": _pixtral,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "smolvlm": _idefics3,
}
