"""Pixels as a model's image processor prepares them: transformers' own, on Pillow and NumPy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.pictures.families import WrittenPicture
from mlx_parallm.pictures.form import PictureForm
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import HostArray


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture that a model can take.

    Attributes:
        written: the picture as text.
        arrays: what the tower computes its features from, by transformers' names.
        content: digest of its pixels and of the processor's settings.
        positions: see ``PictureFamily.positions``.
    """

    written: WrittenPicture
    arrays: Mapping[str, HostArray]
    content: str
    positions: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return sum(len(array.data) for array in self.arrays.values())


class PictureProcessor:
    """Prepares the pictures of one model. Its methods may be called from any thread."""

    def __init__(self, form: PictureForm) -> None:
        """``form`` says where the processor's settings are."""
        self._form = form
        self._lock = Lock()

    def prepare(self, pixels: NDArray[np.uint8]) -> PreparedPicture:
        """Return a picture as its model takes it.

        Args:
            pixels: ``[height, width, 3]``.

        Raises:
            InvalidRequestError: the processor refuses the picture, as one that is too narrow.
        """
        height, width, _ = pixels.shape
        digest = sha256(f"{height} {width} {self._form.fingerprint} ".encode())
        digest.update(pixels.tobytes())
        family = self._form.family
        try:
            made = self._processor(
                images=[pixels],
                return_tensors="np",
                input_data_format="channels_last",
                **family.options,
            )
        except ValueError as refusal:
            raise InvalidRequestError(
                f"The model's image processor refuses a picture of {width} x {height} pixels: "
                f"{refusal}"
            ) from refusal
        arrays = {name: np.asarray(value) for name, value in made.items()}
        return PreparedPicture(
            family.written(arrays),
            {name: host_array(array) for name, array in arrays.items()},
            digest.hexdigest(),
            family.positions(arrays),
        )

    @property
    def _processor(self) -> Any:
        # functools.cached_property has no lock, and importing transformers twice at once fails.
        with self._lock:
            return self._loaded

    @functools.cached_property
    def _loaded(self) -> Any:
        # transformers takes 40 MB, so a process imports it with the first picture.
        from transformers import AutoImageProcessor  # noqa: PLC0415

        return AutoImageProcessor.from_pretrained(
            self._form.folder, backend="pil", local_files_only=True
        )


def host_array(array: np.ndarray) -> HostArray:
    """Return an array in the form in which inputs carry it."""
    return HostArray(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())
