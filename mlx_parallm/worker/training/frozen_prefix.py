"""The layers before the lowest trained one: what they compute, kept in a pool.

They compute the same for every copy of the parameters and in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import BranchedText, TrainedText, TrainingInput
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.lora.stack import AdapterStack
from mlx_parallm.worker.training.prefix_pool import PrefixPool, padded
from mlx_parallm.worker.training.trainable import TrainedLayer
from mlx_parallm.worker.training.trained_model import TrainedModel


class FrozenPrefix:
    """The layers of a model before the lowest one that a session trains.

    Attributes:
        first_layer: index of the lowest trained layer.
        pool: what enters it; None if every forward computes all layers.
    """

    def __init__(
        self, model: TrainedModel, layers: Sequence[TrainedLayer], pool: PrefixPool | None
    ) -> None:
        """Prepare; with ``pool`` None, nothing is kept."""
        self._model = model
        self.first_layer = first_trained(model, layers)
        self.pool = pool if self.first_layer else None
        self._entry = LayerEntry(model.layers, self.first_layer)

    def keep_if_exact(
        self,
        samples: Sequence[TrainingInput],
        stacks: Mapping[str, AdapterStack],
        heads: Sequence[Any],
    ) -> None:
        """Use no pool from now on if kept states change any bit of these samples' results.

        A model may pass more from layer to layer than hidden states. See
        ``TrainedModel.changed_job`` for ``stacks`` and ``heads``.
        """
        alone = [_one_text(item) for item in samples]
        if self.pool is not None and not all(self._is_exact(each, stacks, heads) for each in alone):
            self.pool = None

    def lookup(self, inputs: Sequence[TrainingInput], *, keeps: bool = True) -> PrefixLookup | None:
        """Look up what enters the lowest trained layer; return None if nothing is kept.

        ``keeps``: see ``PairForward``.
        """
        if self.pool is None:
            return None
        texts = [self._model.texts(item) for item in inputs]
        return PrefixLookup(self._model, self.pool, texts, self._key, self.computed, keeps=keeps)

    def entered(self, hidden: mx.array) -> contextlib.AbstractContextManager[None]:
        """Let the lowest trained layer get these states in the context; see ``LayerEntry``."""
        return self._entry.replaced(hidden)

    def _is_exact(
        self, item: TrainingInput, stacks: Mapping[str, AdapterStack], heads: Sequence[Any]
    ) -> bool:
        """True if a result is the same with states that were computed before."""
        (expected,) = self._model.changed_job([item], stacks, 0, heads).wait()
        texts = self._model.texts(item)
        length = self._model.length(texts)
        states = mx.stack([padded(self.computed(text), length) for text in texts])
        with self._entry.replaced(states):
            (result,) = self._model.changed_job([item], stacks, self.first_layer, heads).wait()
        return np.array_equal(result, expected)

    def computed(self, text: TrainedText) -> mx.array:
        """Return the states of one text, ``[tokens, D]``.

        Each text has a forward of its own: the bits of a product depend on its number of rows, so
        the states of a text would differ from batch to batch.
        """
        with self._entry.captured() as captured:
            self._model.run_layers(text)
        states = captured[0].reshape(-1, captured[0].shape[-1])[: len(text.token_ids)]
        mx.eval(states)
        return states

    def _key(self, text: TrainedText) -> Hashable:
        if isinstance(text, BranchedText):
            return (self.first_layer, text)
        return (self.first_layer, text.token_ids, text.second_at, text.num_unattended)


class PrefixLookup:
    """The states of the texts of a forward, of which some are kept.

    Attributes:
        texts: what the layers read for each input.
        missing: computes what was missing, one text each.
        counts: texts that were looked up, those that were kept, and tokens of the others.
    """

    def __init__(
        self,
        model: TrainedModel,
        pool: PrefixPool,
        texts: Sequence[Sequence[TrainedText]],
        key: Callable[[TrainedText], Hashable],
        compute: Callable[[TrainedText], mx.array],
        *,
        keeps: bool,
    ) -> None:
        """Look up; ``key`` and ``compute`` return the key and the states of a text."""
        self._model, self._pool, self._keeps = model, pool, keeps
        self._compute = compute
        self.texts = texts
        every = [text for own in texts for text in own]
        self._keys = [key(text) for text in every]
        self._length = model.length(every)
        self._by_key = dict(zip(self._keys, every, strict=True))
        self._computed: dict[Hashable, mx.array] = {}
        missing = pool.missing(self._keys)
        self.missing = [partial(self._add, each) for each in missing]
        tokens = sum(len(self._by_key[each].token_ids) for each in missing)
        self.counts = len(self._keys), len(self._keys) - len(missing), tokens

    def hidden(self) -> mx.array:
        """Return the states of all texts in their order, right-padded, ``[texts, L, D]``."""
        # The pool is emptied if the device fails between two stages.
        for key in self._by_key.keys() - self._computed.keys():
            if key not in self._pool:
                self._add(key)
        return self._pool.gather(self._keys, self._computed, self._length, keeps=self._keeps)

    def _add(self, key: Hashable) -> None:
        self._computed[key] = self._compute(self._by_key[key])


def _one_text(item: TrainingInput) -> TrainingInput:
    """Return an input with one row, so that states of one text have the same shapes as its own.

    The bits of a product depend on its number of rows with some libraries.
    """
    if isinstance(item, PoolingInput) or item.is_shared or item.shares:
        return item
    return replace(item, choices=item.choices[:1])


def first_trained(model: TrainedModel, layers: Sequence[TrainedLayer]) -> int:
    """Return the index of the lowest layer with a trained module; 0 if one is before all layers."""
    indices = {id(layer): index for index, layer in enumerate(model.layers)}
    paths = {
        path: indices[id(module)] for path, module in model.modules.items() if id(module) in indices
    }
    owners = [
        next((index for path, index in paths.items() if layer.path.startswith(f"{path}.")), 0)
        for layer in layers
    ]
    return min(owners)


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
