"""The features of a picture, and the towers that compute them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Protocol

import mlx.core as mx

#: ``Arrays``: what transformers' image processor makes of one picture, by its names.
Arrays = Mapping[str, mx.array]


class TwoWay(Enum):
    """Where the rows of a picture attend to later ones of the same picture."""

    #: In all layers. In those with a window a row sees the whole picture too.
    ALL_LAYERS = "all layers"
    #: In layers with a window, which bounds what a row sees before itself.
    SLIDING_LAYERS = "sliding layers"


class Features(NamedTuple):
    """The features of one picture.

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


class Tower(Protocol):
    """A tower and its projector."""

    def __call__(self, arrays: Arrays, /) -> Features:
        """Return the features of one picture."""
        ...
