"""A checkpoint's weights, each from the file that the index names for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.models.checkpoints.weight_files import weight_files, weight_map
from mlx_parallm.types.errors import ModelLoadError


def read_weights(folder: Path) -> Weights:
    """Return a checkpoint's weights by name, not evaluated; none if it has no files.

    Files may also have weights that the index does not name, or names for another file: those of an
    overlay beside the files that it changes, for example. They are left out.

    Raises:
        ModelLoadError: see ``weight_files``; or a file is broken.
    """
    placed = weight_map(folder)
    weights: Weights = {}
    for file in weight_files(folder):
        arrays = _loaded(file)
        if file.name in placed.values():
            arrays = {key: each for key, each in arrays.items() if placed.get(key) == file.name}
        weights |= arrays
    return weights


def reading_index(model_class: type, folder: Path) -> type:
    """Return a class of mlx_lm that is loaded with ``read_weights``, whatever mlx_lm reads."""
    own = read_weights(folder)
    if sum(len(_loaded(file)) for file in weight_files(folder)) == len(own):
        return model_class

    class IndexedModel(model_class):
        """A model whose checkpoint has weights that are not its own."""

        def sanitize(self, weights: Weights) -> Weights:
            """Return the weights of the checkpoint by this model's names."""
            del weights
            parent: Any = super()
            return parent.sanitize(own) if hasattr(parent, "sanitize") else own

        def renamed(self, weights: Weights) -> Weights:
            """Return some weights of a checkpoint by this model's names."""
            parent: Any = super()
            rename = getattr(parent, "renamed", getattr(parent, "sanitize", None))
            return weights if rename is None else rename(weights)

    return IndexedModel


def _loaded(file: Path) -> Weights:
    try:
        return cast("Weights", mx.load(str(file)))
    except (OSError, RuntimeError, ValueError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause
