"""Layers that arrange numbers: one-hot, flatten, concat, add, slice; and free parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from typing_extensions import override

from mlx_parallm.models.nets.fields import Fields
from mlx_parallm.models.nets.layer import Layer, Parameter, TensorForm, pieces
from mlx_parallm.types.nets import Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class OneHot(Layer):
    """1 at the place that a whole number says and 0 elsewhere, in a new last dimension."""

    num_classes: int

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        return cls(name=name, inputs=inputs, num_classes=fields.size("num_classes"))

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.choices(inputs)
        sizes = self.sized((*tensor.sizes, self.num_classes))
        return TensorForm(sizes=sizes, has_time=tensor.has_time)

    @property
    @override
    def num_choices(self) -> int | None:
        return self.num_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Flatten(Layer):
    """All numbers of a row in one dimension, the last index running fastest."""

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        return cls(name=name, inputs=inputs)

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.single(inputs)
        return replace(tensor, sizes=(math.prod(tensor.sizes),))

    @override
    def choices_before(
        self, choices: Sequence[Choices], inputs: Sequence[TensorForm]
    ) -> Iterator[tuple[str, Choices]]:
        return ((self.inputs[0], each) for each in choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Layer):
    """The numbers from ``start`` to before ``stop`` of the last dimension."""

    start: int
    stop: int

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        layer = cls(
            name=name,
            inputs=inputs,
            start=fields.size("start", 0, least=0),
            stop=fields.size("stop"),
        )
        if layer.start >= layer.stop:
            layer.refuse("start must be less than stop")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.single(inputs)
        if not tensor.sizes or self.stop > tensor.sizes[-1]:
            self.refuse(f"{self.inputs[0]!r} has sizes {list(tensor.sizes)}; stop is {self.stop}")
        sizes = (*tensor.sizes[:-1], self.stop - self.start)
        return replace(tensor, sizes=sizes)

    @override
    def choices_before(
        self, choices: Sequence[Choices], inputs: Sequence[TensorForm]
    ) -> Iterator[tuple[str, Choices]]:
        width = inputs[0].sizes[-1]
        for piece in pieces(choices, [self.stop - self.start]):
            yield self.inputs[0], piece.choices(width, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint(Layer):
    """A layer of several inputs; those without time count at each time of the others."""

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        return cls(name=name, inputs=inputs)

    def _joined(self, inputs: tuple[TensorForm, ...], sizes: tuple[int, ...]) -> TensorForm:
        if len({tensor.is_integer for tensor in inputs}) > 1:
            self.refuse("its inputs must all have whole numbers, or all floating point numbers")
        return TensorForm(
            sizes=self.sized(sizes),
            has_time=any(tensor.has_time for tensor in inputs),
            is_integer=inputs[0].is_integer,
        )


class Concat(_Joint):
    """Its inputs one after another in the last dimension."""

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        if len({tensor.sizes[:-1] for tensor in inputs}) > 1 or not all(
            tensor.sizes for tensor in inputs
        ):
            self.refuse(f"its inputs have sizes {_sizes(inputs)}; all but the last must agree")
        last = sum(tensor.sizes[-1] for tensor in inputs)
        return self._joined(inputs, (*inputs[0].sizes[:-1], last))

    @override
    def choices_before(
        self, choices: Sequence[Choices], inputs: Sequence[TensorForm]
    ) -> Iterator[tuple[str, Choices]]:
        widths = [tensor.sizes[-1] for tensor in inputs]
        for piece in pieces(choices, widths):
            yield self.inputs[piece.part], piece.choices(widths[piece.part])


class Add(_Joint):
    """The sum of its inputs."""

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        if len({tensor.sizes for tensor in inputs}) > 1:
            self.refuse(f"its inputs have sizes {_sizes(inputs)}, which must agree")
        if inputs[0].is_integer:
            self.refuse("its inputs must have floating point numbers")
        return self._joined(inputs, inputs[0].sizes)


class Multiply(Add):
    """The product of its inputs."""


def _sizes(inputs: tuple[TensorForm, ...]) -> str:
    return ", ".join(str(list(tensor.sizes)) for tensor in inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeParameter(Layer):
    """A weight that is the same for every row, such as a policy's ``log_std``."""

    shape: tuple[int, ...]

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        return cls(name=name, inputs=inputs, shape=fields.sizes("shape"))

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        if inputs:
            self.refuse("a parameter has no inputs")
        return TensorForm(sizes=self.sized(self.shape))

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        return {"value": Parameter(shape=self.shape)}
