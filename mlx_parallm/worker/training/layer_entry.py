"""Enters a model's layers at one of them, with hidden states that were computed before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls


class LayerEntry:
    """The entry to one layer of an unmodified model.

    MLX is lazy: the layers before the entry are called, but nothing of them is computed.
    """

    def __init__(self, layers: Sequence[Any], index: int) -> None:
        """Use the layer of this index, from 0, in the model's list of layers."""
        self._before = list(layers[:index])
        self._layer = layers[index]

    @contextlib.contextmanager
    def captured(self) -> Iterator[list[mx.array]]:
        """Yield a list to which the layer's input ``[B, L, D]`` is appended in this context."""
        inputs: list[mx.array] = []
        with WrappedCalls([self._layer], partial(_capturing, inputs=inputs)):
            yield inputs

    @contextlib.contextmanager
    def replaced(self, hidden: mx.array) -> Iterator[None]:
        """Let the layer get these hidden states ``[B, L, D]`` instead of its input.

        The input's shape stays: packed forwards have ``[B * L, 1, D]``.
        """
        with (
            WrappedCalls(self._before, _skipping),
            WrappedCalls([self._layer], partial(_replacing, hidden=hidden)),
        ):
            yield


def _capturing(original: Any, *, inputs: list[mx.array]) -> Methods:
    def call(self: Any, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        inputs.append(hidden)
        return original.__call__(self, hidden, *args, **kwargs)

    return {"__call__": call}


def _replacing(original: Any, *, hidden: mx.array) -> Methods:
    def call(self: Any, own: mx.array, *args: Any, **kwargs: Any) -> Any:
        return original.__call__(self, hidden.reshape(own.shape), *args, **kwargs)

    return {"__call__": call}


def _skipping(original: Any) -> Methods:
    del original

    def call(self: Any, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        del self, args, kwargs
        return hidden

    return {"__call__": call}
