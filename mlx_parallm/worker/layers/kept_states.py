"""The states of recurrent and convolution layers after each of a call's tokens.

A step with proposals computes the state after all of its tokens. If some are refused, the state
after the accepted ones is needed. These layers compute a state from few arrays per token, besides
the state before: queries, keys, values and gates of a recurrence, and the inputs of a convolution.
So the arrays are kept, and no state: after a refusal the recurrence alone runs again over the
accepted tokens, without projections, norms or MLPs. Nothing is computed while all are accepted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls

#: How many of a call's tokens a state is after: one number, or int32 ``[B]`` with one of each row.
Count = int | mx.array


@dataclass(frozen=True, slots=True)
class StateSource:
    """The arrays that a state is made of after some of a call's tokens.

    Attributes:
        arrays: the arrays of the call.
        make: returns the state, given these arrays, or others of the same shapes, and the number of
            tokens.
        takes_rows: True if each row may have a number of its own.
    """

    arrays: Sequence[mx.array]
    make: Callable[[Sequence[mx.array], Count], mx.array]
    takes_rows: bool = True

    def after(self, count: Count) -> mx.array:
        """Return the state after some of the call's tokens."""
        return self.make(self.arrays, count)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The arguments of a function of mlx_lm that returns outputs and a recurrence's next state.

    Attributes:
        tokens: the names of the arguments that have a row per token.
        axis: their axis of tokens.
    """

    tokens: tuple[str, ...]
    axis: int


#: RECURRENCES of mlx_lm's modules, by the name of the function: the gated delta rule, state spaces
#: (Mamba 2), and gated linear attention.
RECURRENCES: Mapping[str, Recurrence] = MappingProxyType(
    {
        "gated_delta_update": Recurrence(("q", "k", "v", "a", "b"), axis=1),
        "ssm_update": Recurrence(("hidden_states", "B", "C", "dt"), axis=1),
        "recurrent_gla": Recurrence(("q", "k", "v"), axis=2),
    }
)
# MASK, LENGTHS are arguments of these functions for rows of several lengths, bool ``[B, L]`` and
# int32 ``[B]``.
MASK, LENGTHS = "mask", "lengths"


class StateNotes:
    """Notes of the arrays from which a module's call computed states."""

    def __init__(self) -> None:
        self._is_on = False
        self._recurrences: list[tuple[mx.array, StateSource]] = []
        self._inputs: list[mx.array] = []

    @contextmanager
    def during(self) -> Iterator[None]:
        """Note the calls in the context, and forget them at its end."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            self._recurrences, self._inputs = [], []

    def note_recurrence(self, state: mx.array, source: StateSource) -> None:
        """Note a recurrence's state after all tokens, and what it is made of."""
        if self._is_on:
            self._recurrences.append((state, source))

    def note_convolution(self, inputs: mx.array) -> None:
        """Note the inputs of a convolution, ``[B, W - 1 + L, C]`` for a kernel of width W."""
        if self._is_on:
            self._inputs.append(inputs)

    def sources_of(
        self, before: Sequence[Any], now: Sequence[Any], length: int
    ) -> list[StateSource | None]:
        """Return what each entry of a cache is made of after some of ``length`` tokens.

        A recurrence's state is known by its identity. A convolution's is the window of its inputs
        that has the shape of the entry; of several convolutions of that shape, the first is the
        first entry's. The check at load finds models where that is wrong.

        Args:
            before: the entries before the call.
            now: the entries after it.
            length: the number of tokens.

        Returns:
            One per entry; None for an entry of which nothing is known.
        """
        inputs = list(self._inputs)
        return [
            self._source_of(old, new, length, inputs) for old, new in zip(before, now, strict=True)
        ]

    def _source_of(
        self, old: Any, new: Any, length: int, inputs: list[mx.array]
    ) -> StateSource | None:
        if new is old:
            return StateSource([old], lambda arrays, _count: arrays[0])
        for state, source in self._recurrences:
            if state is new:
                return source
        for index, array in enumerate(inputs):
            if isinstance(new, mx.array) and new.ndim == 3:
                rows, width, channels = new.shape
                if array.shape == (rows, width + length, channels):
                    return _window(inputs.pop(index), width)
        return None


def _window(inputs: mx.array, width: int) -> StateSource:
    """Return a convolution's state: its last ``width`` inputs."""

    def make(arrays: Sequence[mx.array], count: Count) -> mx.array:
        if isinstance(count, int):
            return arrays[0][:, count : count + width]
        places = count[:, None] + mx.arange(width)
        return mx.take_along_axis(arrays[0], places[..., None], axis=1)

    return StateSource([inputs], make)


class NotingStep(Protocol):
    """A forward in progress."""

    @property
    def notes(self) -> StateNotes | None:
        """Where calls are noted; None if the notes are not read."""
        ...


class RecurrenceSeam:
    """Replaces a function of ``RECURRENCES`` in one module of mlx_lm; it computes the same."""

    def __init__(self, original: Callable[..., Any], recurrence: Recurrence) -> None:
        self.original = original
        self.step: NotingStep | None = None
        self._recurrence = recurrence
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **options: Any) -> tuple[mx.array, mx.array]:
        """Return what mlx_lm's function returns."""
        outputs, state = self.original(*args, **options)
        if self.step is not None and self.step.notes is not None:
            bound = self._signature.bind(*args, **options).arguments
            if all(bound.get(name) is None for name in (MASK, LENGTHS)):
                self.step.notes.note_recurrence(state, self._source(bound))
        return outputs, state

    def _source(self, bound: Mapping[str, Any]) -> StateSource:
        arrays = {name: value for name, value in bound.items() if isinstance(value, mx.array)}
        others = {name: value for name, value in bound.items() if name not in arrays}
        names = tuple(arrays)

        def make(values: Sequence[mx.array], count: Count) -> mx.array:
            return self._after(dict(zip(names, values, strict=True)), others, count)

        takes_rows = MASK in self._signature.parameters
        return StateSource(list(arrays.values()), make, takes_rows=takes_rows)

    def _after(
        self, arrays: dict[str, mx.array], others: Mapping[str, Any], count: Count
    ) -> mx.array:
        """Return the state after ``count`` tokens of a call with these arguments."""
        axis, tokens = self._recurrence.axis, self._recurrence.tokens
        options = dict(others)
        if isinstance(count, int):
            part = (slice(None),) * axis + (slice(count),)
            arrays |= {name: arrays[name][part] for name in tokens}
        else:
            length = arrays[tokens[0]].shape[axis]
            options[MASK] = mx.arange(length) < count[:, None]
            if LENGTHS in self._signature.parameters:
                options[LENGTHS] = count
        call = self._signature.bind_partial()
        call.arguments.update({**options, **arrays})
        return self.original(*call.args, **call.kwargs)[1]


def note_convolutions(modules: Iterable[nn.Module], notes: StateNotes) -> WrappedCalls:
    """Note the inputs of all convolutions in modules, until the result's ``remove`` is called."""

    def noting(original: Any) -> Methods:
        def call(self: Any, x: mx.array) -> mx.array:
            notes.note_convolution(x)
            return original.__call__(self, x)

        return {"__call__": call}

    parts = (part for module in modules for part in module.modules())
    return WrappedCalls([part for part in parts if isinstance(part, nn.Conv1d)], noting)
