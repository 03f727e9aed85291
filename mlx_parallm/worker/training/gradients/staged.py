"""A gradient that is computed a layer at a time, with other work in between.

What enters each layer is kept, and each layer is computed once more before the gradient goes back
through it. So one layer's intermediate results are in memory at a time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.training.gradients.passes import Gradient, Pass, differentiable


@dataclass(slots=True)
class _Call:
    """The call of a layer.

    Attributes:
        layer: the module.
        hidden: its first argument.
        arguments: the others by position.
        named: and by name.
        output: what it returned: hidden states, or a tuple that begins with them.
    """

    layer: Any
    hidden: mx.array
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    output: Any


class StagedGradient:
    """The stages of a gradient: the layers forwards, the head, and the trained layers backwards."""

    def __init__(self, work: Pass) -> None:
        """Build the graph of the forward.

        Raises:
            ValueError: the model does not call each layer once and in order.
        """
        self._work = work
        self._parts = work.parts()
        first = work.first_computed
        layers = work.model.layers
        self._calls: list[_Call] = []
        recording = partial(_recording, calls=self._calls)
        with differentiable(work.model.modules[""]), WrappedCalls(layers[first:], recording):
            work.job(self._parts)
        if [id(call.layer) for call in self._calls] != [id(layer) for layer in layers[first:]]:
            raise ValueError("the model does not call each layer once and in order")
        if work.hidden is not None:
            # The recorded argument is what the model passed on, which is not computed.
            begin = self._calls[0]
            begin.hidden = work.hidden.reshape(begin.hidden.shape)
        self._num_frozen = work.prefix.first_layer - first
        self._owned = _owned(work)
        self._forwards = list(self._calls)
        self._like = self._calls[-1].output
        self._last: mx.array = _states(self._like)
        self._along: mx.array | None = None
        self._arrays: Mapping[str, mx.array] = {}
        self._gradients: dict[int, mx.array] = {}

    @staticmethod
    def count(work: Pass) -> int:
        """Return how many stages the gradient of a pass has."""
        num_layers = len(work.model.layers)
        return (num_layers - work.first_computed) + 1 + (num_layers - work.prefix.first_layer)

    @property
    def num_stages(self) -> int:
        """Return how many stages are left."""
        if self._along is None:
            return len(self._forwards) + 1 + len(self._calls) - self._num_frozen
        return len(self._calls) - self._num_frozen

    def advance(self) -> None:
        """Compute the next stage."""
        if self._forwards:
            call = self._forwards.pop(0)
            mx.eval(_states(call.output))
            call.output = None
        elif self._along is None:
            self._go_through_head()
        else:
            self._go_back(self._calls.pop())

    def wait(self) -> Gradient:
        """Compute what is left; return the gradient."""
        while self.num_stages:
            self.advance()
        parts = [
            self._gradients[index] if index in self._gradients else mx.zeros_like(part)
            for index, part in enumerate(self._parts)
        ]
        return Gradient(parts, self._arrays)

    def _go_through_head(self) -> None:
        work = self._work
        owned = self._owned[None]

        def objective(
            hidden: mx.array, own: Sequence[mx.array]
        ) -> tuple[mx.array, Mapping[str, mx.array]]:
            with _ended(work.model.layers, hidden, self._like):
                job = work.job(self._with(owned, own), len(work.model.layers) - 1)
            return work.objective(job.lazy_results)

        own = [self._parts[index] for index in owned]
        with differentiable(work.model.modules[""]):
            (_, self._arrays), (self._along, gradients) = mx.value_and_grad(objective, (0, 1))(
                self._last, own
            )
        self._add(owned, gradients)
        mx.eval(self._along, self._arrays, gradients)
        self._last = mx.array(0.0)
        self._like = None

    def _go_back(self, call: _Call) -> None:
        work = self._work
        owned = self._owned[id(call.layer)]

        def layer(hidden: mx.array, *own: mx.array) -> mx.array:
            stacks = work.trainable.stacks_of(self._with(owned, own))
            with work.model.changed_by(stacks):
                return _states(call.layer(hidden, *call.arguments, **call.named))

        own = [self._parts[index] for index in owned]
        with differentiable(call.layer):
            _, (along, *gradients) = mx.vjp(layer, [call.hidden, *own], [self._along_states])
        self._add(owned, gradients)
        has_more = len(self._calls) > self._num_frozen
        # States that enter the lowest trained layer need no gradient, and MLX is lazy.
        mx.eval([*gradients, along] if has_more else gradients)
        self._along = along if has_more else mx.array(0.0)

    @property
    def _along_states(self) -> mx.array:
        assert self._along is not None, "the gradient has gone through the head"
        return self._along

    def _with(self, owned: Sequence[int], own: Sequence[mx.array]) -> list[mx.array]:
        """Return all parts of the parameters, some of them replaced."""
        parts = list(self._parts)
        for index, part in zip(owned, own, strict=True):
            parts[index] = part
        return parts

    def _add(self, owned: Sequence[int], gradients: Sequence[mx.array]) -> None:
        for index, gradient in zip(owned, gradients, strict=True):
            before = self._gradients.get(index)
            self._gradients[index] = gradient if before is None else before + gradient


def _owned(work: Pass) -> Mapping[int | None, list[int]]:
    """Return indices of the parts of the parameters by their layer's id; by None: of the head."""
    ids = {id(layer) for layer in work.model.layers}
    roots = {path: id(module) for path, module in work.model.modules.items() if id(module) in ids}
    owned: dict[int | None, list[int]] = defaultdict(list)
    for index, owner in enumerate(work.trainable.owners):
        root = next((own for path, own in roots.items() if owner.startswith(f"{path}.")), None)
        owned[root].append(index)
    return owned


def _states(output: Any) -> mx.array:
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _ended(layers: Sequence[Any], hidden: mx.array, like: Any) -> Iterator[None]:
    """Let the last layer return ``hidden``; those before it return what they got.

    ``like`` is what the last layer returned before.
    """

    def wrapping(result: Callable[[mx.array], mx.array]) -> Callable[[Any], Methods]:
        def call(self: Any, own: mx.array, *args: Any, **kwargs: Any) -> Any:
            del self, args, kwargs
            return (result(own), *like[1:]) if isinstance(like, tuple) else result(own)

        def wrap(original: Any) -> Methods:
            del original
            return {"__call__": call}

        return wrap

    with (
        WrappedCalls(layers[:-1], wrapping(lambda own: own)),
        WrappedCalls(layers[-1:], wrapping(lambda own: hidden)),
    ):
        yield


def _recording(original: Any, *, calls: list[_Call]) -> Methods:
    def call(self: Any, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        output = original.__call__(self, hidden, *args, **kwargs)
        calls.append(_Call(self, hidden, args, kwargs, output))
        return output

    return {"__call__": call}
