"""The features of an image, and the towers that compute them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

#: ``Arrays``: what transformers' image processor makes of one image, by its names.
Arrays = Mapping[str, mx.array]


class TwoWay(Enum):
    """Where the rows of an image attend to later ones of the same image."""

    #: In all layers. In those with a window a row sees the whole image too.
    ALL_LAYERS = "all layers"
    #: In layers with a window, which bounds what a row sees before itself.
    SLIDING_LAYERS = "sliding layers"


class Features(NamedTuple):
    """The features of one image.

    Attributes:
        rows: ``[n, text width]``, in the order of the feature tokens in the prompt.
        layers: rows that are added to the hidden states after the first text layers, one array for
            each (deepstack, arXiv:2406.04334).
        scale: what the text model multiplies embeddings by, and rows in their place; ``rows`` must
            be divided by it.
    """

    rows: mx.array
    layers: tuple[mx.array, ...] = ()
    scale: float = 1.0


#: ``Stages``: yields what to evaluate after each stage but the last, and returns the features.
Stages = Generator[mx.array, None, list[Features]]
#: ``Layers``: yields the hidden states after each layer, and returns what the tower makes of them.
Layers = Generator[mx.array, None, mx.array]


class Tower(nn.Module):
    """A tower and its projector."""

    @property
    def num_stages(self) -> int:
        """The number of stages, the same for all images."""
        raise NotImplementedError

    @property
    def num_added_layers(self) -> int:
        """The number of text layers to whose outputs rows of an image are added."""
        return 0

    def stages(self, images: Sequence[Arrays], /) -> Stages:
        """Compute the features of images of equal shapes together, a layer a stage, lazily.

        Images have equal shapes if the shapes of their arrays are equal, and their integers.
        """
        raise NotImplementedError

    def __call__(self, arrays: Arrays) -> Features:
        """Return the features of one image, lazily."""
        stages = self.stages([arrays])
        while True:
            try:
                next(stages)
            except StopIteration as end:
                (features,) = end.value
                return features


def features_of(rows: mx.array, *, scale: float = 1.0) -> list[Features]:
    """Return the features of several images, ``[images, ..., text width]``."""
    return [Features(each.reshape(-1, each.shape[-1]), scale=scale) for each in rows]
