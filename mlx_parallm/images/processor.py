"""Pixels as a model's image processor prepares them: transformers' own, on Pillow and NumPy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.images.families import WrittenImage
from mlx_parallm.images.form import ImageForm
from mlx_parallm.types.content import digest_of
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import HostArray


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image that a model can take.

    Attributes:
        written: the image as text.
        arrays: what the tower computes its features from, by transformers' names.
        content: digest of its pixels and of the processor's settings.
        positions: see ``ImageFamily.positions``.
    """

    written: WrittenImage
    arrays: Mapping[str, HostArray]
    content: str
    positions: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return sum(len(array.data) for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Bounds of an image's pixels after resizing; None: those of the model's processor."""

    least: int | None = None
    most: int | None = None


#: ``AS_CONFIGURED``: images are resized as the model's folder says.
AS_CONFIGURED = PixelRange()
PIXELS_PARAM = "mm_processor_kwargs"


class ImageProcessor:
    """Prepares the images of one model. Its methods may be called from any thread."""

    def __init__(self, form: ImageForm) -> None:
        """``form`` says where the processor's settings are."""
        self._form = form
        self._lock = Lock()

    def check(self, pixel_range: PixelRange) -> None:
        """Refuse a range that the model's processor does not take.

        Raises:
            InvalidRequestError: the model has images of fixed sizes, or the range exceeds its own
                (param "mm_processor_kwargs").
        """
        if pixel_range != AS_CONFIGURED:
            self._size(pixel_range)

    def prepare(
        self, pixels: NDArray[np.uint8], pixel_range: PixelRange = AS_CONFIGURED
    ) -> PreparedImage:
        """Return an image as its model takes it.

        Args:
            pixels: ``[height, width, 3]``.
            pixel_range: of the resized image.

        Raises:
            InvalidRequestError: the processor refuses the image, as one that is too narrow, or
                the range, see ``check``.
        """
        height, width, _ = pixels.shape
        size = {} if pixel_range == AS_CONFIGURED else {"size": self._size(pixel_range)}
        settings = (f"{height} {width}", self._form.fingerprint, repr(size))
        family = self._form.family
        try:
            made = self._processor(
                images=[pixels],
                return_tensors="np",
                input_data_format="channels_last",
                **family.options,
                **size,
            )
        except (ValueError, OverflowError, MemoryError) as refusal:
            raise InvalidRequestError(
                f"The model's image processor refuses an image of {width} x {height} pixels: "
                f"{str(refusal) or type(refusal).__name__}"
            ) from refusal
        arrays = {name: np.asarray(value) for name, value in made.items()}
        return PreparedImage(
            family.written(arrays),
            {name: host_array(array) for name, array in arrays.items()},
            digest_of("image", *settings, pixels.tobytes()),
            family.positions(arrays),
        )

    def least_tokens(self, width: int, height: int, pixel_range: PixelRange = AS_CONFIGURED) -> int:
        """Return the feature tokens of an image by its size; 0 if the family needs its pixels."""
        if not self._form.family.counts_pixels:
            return 0
        return self._num_patches(width, height, pixel_range) // self._processor.merge_size**2

    def resized_pixels(
        self, width: int, height: int, pixel_range: PixelRange = AS_CONFIGURED
    ) -> int:
        """Return how many pixels an image will have after it was resized.

        It is 0 in families whose settings bound that for images of all shapes.
        """
        family = self._form.family
        if family.counts_pixels:
            patches = self._num_patches(width, height, pixel_range)
            return patches * self._processor.patch_size**2
        side = self._processor.size.get("shortest_edge") if family.fixes_shorter_side else None
        return side * side * max(width, height) // min(width, height) if side else 0

    def _num_patches(self, width: int, height: int, pixel_range: PixelRange) -> int:
        """Return how many patches an image is cut into, in families that count pixels."""
        size = self._processor.size if pixel_range == AS_CONFIGURED else self._size(pixel_range)
        bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        try:
            return self._processor.get_number_of_image_patches(height, width, bounds)
        except ValueError:
            # The image is too narrow, which ``prepare`` says.
            return 0

    def _size(self, pixel_range: PixelRange) -> dict[str, int]:
        """Return the processor's ``size`` for a range; see ``check``."""
        if not self._form.family.counts_pixels:
            raise InvalidRequestError(
                "This model's image processor takes neither min_pixels nor max_pixels.",
                param=PIXELS_PARAM,
            )
        own = dict(self._processor.size)
        most = pixel_range.most or own["longest_edge"]
        least = pixel_range.least or min(own["shortest_edge"], most)
        # A larger image would take more memory and time than the operator reckons with.
        if not least <= most <= own["longest_edge"]:
            raise InvalidRequestError(
                f"min_pixels ({least}) and max_pixels ({most}) must be in order, and at most the "
                f"model's {own['longest_edge']}.",
                param=PIXELS_PARAM,
            )
        return {"shortest_edge": least, "longest_edge": most}

    @property
    def _processor(self) -> Any:
        # functools.cached_property has no lock, and importing transformers twice at once fails.
        with self._lock:
            return self._loaded

    @functools.cached_property
    def _loaded(self) -> Any:
        # transformers takes 40 MB, so a process imports it with the first image.
        import transformers  # noqa: PLC0415
        from transformers import AutoImageProcessor  # noqa: PLC0415

        settings = dict(self._form.family.processor)
        if settings:
            return getattr(transformers, settings.pop("image_processor_type"))(**settings)
        return AutoImageProcessor.from_pretrained(
            self._form.folder, backend="pil", local_files_only=True
        )


def host_array(array: np.ndarray) -> HostArray:
    """Return an array in the form in which inputs carry it."""
    return HostArray(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())
