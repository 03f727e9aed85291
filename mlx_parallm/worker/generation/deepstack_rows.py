"""Adds rows of pictures to what the first text layers return (deepstack, arXiv:2406.04334)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.worker.generation.input_rows import PlacedRows
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls


class DeepstackSeam:
    """Lets the first layers of a text model add a step's rows to the hidden states.

    Steps without such rows do not need it.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """``layers`` are those of the text model, in order."""
        self._layers = layers

    @contextmanager
    def during(self, placed: PlacedRows, added: mx.array) -> Iterator[None]:
        """Add rows to the outputs of the first layers, for a while.

        Args:
            placed: where the rows are in a forward.
            added: ``[layers, rows, width]``: what each layer adds.
        """
        layers = self._layers[: added.shape[0]]
        assert len(layers) == added.shape[0], "the tower has rows for more layers than there are"
        by_layer = {id(layer): rows for layer, rows in zip(layers, added, strict=True)}

        def wrap(original: Any) -> Methods:
            def adding(self: Any, *args: Any, **kwargs: Any) -> mx.array:
                hidden = original.__call__(self, *args, **kwargs)
                return hidden + placed.spread(by_layer[id(self)].astype(hidden.dtype))

            return {"__call__": adding}

        with WrappedCalls(layers, wrap):
            yield
