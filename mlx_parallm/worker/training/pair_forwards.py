"""Forwards of a model with perturbed copies of a trainable adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import BranchedText, PairResult, TrainedText, TrainingInput
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.ops import (
    Pending,
)
from mlx_parallm.worker.pooling.layer_stages import StagedJob
from mlx_parallm.worker.training.directions import Copies
from mlx_parallm.worker.training.prefix_pool import PrefixPool, padded
from mlx_parallm.worker.training.segment_stack import SegmentStack
from mlx_parallm.worker.training.trainable import TrainableAdapter, TrainedLayer
from mlx_parallm.worker.training.trained_model import TrainedModel


class PairJob(Pending):
    """A forward of perturbed copies, and what was found for it.

    The stages before those of the layers draw the copies, and compute the states of each text
    that were not kept.
    """

    def __init__(
        self,
        build: Callable[[], StagedJob],
        copies: Copies,
        missing: Sequence[Callable[[], None]] = (),
        counts: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Prepare.

        Args:
            build: returns the forward, once copies are drawn and what was missing is computed.
            copies: of the parameters.
            missing: computes what is missing, one text each.
            counts: the last fields of ``PairResult``.
        """
        self._build = build
        self._before = [copies.advance] * copies.num_stages + list(missing)
        self._job = None if self._before else build()
        self._counts = counts

    @property
    @override
    def num_stages(self) -> int:
        return len(self._before) + 1 if self._job is None else self._job.num_stages

    @override
    def advance(self) -> None:
        if self._job is not None:
            self._job.advance()
            return
        self._before.pop(0)()
        if not self._before:
            self._job = self._build()

    @override
    def wait(self) -> PairResult:
        while self._job is None:
            self.advance()
        return PairResult(self._job.wait(), *self._counts)


class PairForwards:
    """Runs the inputs of a step through perturbed copies of one adapter, all copies at once.

    The layers before the lowest trained one compute the same for every copy and in every step, so
    their result is computed once for each text and kept in the pool.

    Attributes:
        first_layer: index of the lowest trained layer.
        pool: what enters it; None if every forward computes all layers.
    """

    def __init__(
        self, model: TrainedModel, trainable: TrainableAdapter, pool: PrefixPool | None
    ) -> None:
        """Prepare.

        Args:
            model: runs the model.
            trainable: the adapter.
            pool: keeps what enters the lowest trained layer; None: every forward computes all
                layers.

        Raises:
            InvalidRequestError: all rows of a forward share the result of a trained layer, such as
                that of relative positions in DeBERTa, so that copies cannot have results of their
                own.
        """
        shared = sorted({layer.path for layer in trainable.layers} & set(model.shared))
        if shared:
            raise InvalidRequestError(
                f"{shared[0]} cannot be trained: all texts of a batch share what it computes.",
                param="trainable.targets",
            )
        self._model = model
        self._trainable = trainable
        self.first_layer = first_trained(model, trainable.layers)
        self.pool = pool if self.first_layer else None
        self._entry = LayerEntry(model.layers, self.first_layer)

    def keep_prefix_if_exact(self, samples: Sequence[TrainingInput]) -> None:
        """Use no pool from now on if kept states change any bit of these samples' results.

        A model may pass more from layer to layer than hidden states.
        """
        stacks = self._trainable.stacks(self._trainable.theta[None])
        alone = [_one_text(item) for item in samples]
        if self.pool is not None and not all(self._is_exact(item, stacks) for item in alone):
            self.pool = None

    def begin(
        self,
        inputs: Sequence[TrainingInput],
        segments: Sequence[Sequence[int]],
        copies: Copies,
        *,
        keeps: bool = True,
    ) -> PairJob:
        """Return the forward of all segments, of which nothing is computed yet.

        Its results are those of the heads for each row, in the order of the segments.

        Args:
            inputs: the inputs of the step; none names an adapter.
            segments: for each copy, indices of its inputs; all have the same length.
            copies: the parameters of each copy.
            keeps: see ``PairForward``.
        """
        rows = [inputs[index] for segment in segments for index in segment]
        pool = self.pool
        if pool is None:
            return PairJob(partial(self._build, rows, copies), copies)
        texts = [self._model.texts(item) for item in inputs]
        every = [text for own in texts for text in own]
        keys = [self._key(text) for text in every]
        by_key = dict(zip(keys, every, strict=True))
        missing = pool.missing(keys)
        computed: dict[Hashable, mx.array] = {}

        def compute(key: Hashable) -> None:
            computed[key] = self._computed(by_key[key])

        def build() -> StagedJob:
            # The pool is emptied if the device fails between two stages.
            for key in by_key.keys() - computed.keys():
                if key not in pool:
                    compute(key)
            hidden = pool.gather(keys, computed, self._model.length(every), keeps=keeps)
            with self._entry.replaced(hidden[mx.array(_rows(texts, segments))]):
                return self._build(rows, copies, self.first_layer)

        frozen_tokens = sum(len(by_key[key].token_ids) for key in missing)
        counts = len(keys), len(keys) - len(missing), frozen_tokens
        return PairJob(build, copies, [partial(compute, key) for key in missing], counts)

    def _build(
        self, rows: Sequence[TrainingInput], copies: Copies, first_layer: int = 0
    ) -> StagedJob:
        """Return the forward of rows from a layer on; of each segment with its copy."""
        parameters = copies.value()
        stacks, heads = self._trainable.stacks(parameters), self._trainable.heads(parameters)
        return self._model.changed_job(rows, stacks, first_layer, heads)

    def _is_exact(self, item: TrainingInput, stacks: Mapping[str, SegmentStack]) -> bool:
        """True if a result is the same with states that were computed before."""
        (expected,) = self._model.changed_job([item], stacks).wait()
        texts = self._model.texts(item)
        length = self._model.length(texts)
        states = mx.stack([padded(self._computed(text), length) for text in texts])
        with self._entry.replaced(states):
            (result,) = self._model.changed_job([item], stacks, self.first_layer).wait()
        return np.array_equal(result, expected)

    def _computed(self, text: TrainedText) -> mx.array:
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


def _one_text(item: TrainingInput) -> TrainingInput:
    """Return an input with one row, so that states of one text have the same shapes as its own.

    The bits of a product depend on its number of rows with some libraries.
    """
    if isinstance(item, PoolingInput) or item.is_shared or item.shares:
        return item
    return replace(item, choices=item.choices[:1])


def _rows(texts: Sequence[Sequence[Any]], segments: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of all segments' texts, if those of all inputs are in one list."""
    firsts = [0, *accumulate(map(len, texts))]
    return [
        row
        for segment in segments
        for index in segment
        for row in range(firsts[index], firsts[index + 1])
    ]


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
