"""The interface of layers: their inputs, parameters and states, and the tensor that each makes."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn, Self

from mlx_parallm.models.nets.fields import Fields
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.nets import Choices

#: ``MAX_ROW_SIZE``, ``MAX_RANK``: the most numbers, and dimensions, of a row at one time.
MAX_ROW_SIZE = 1 << 22
MAX_RANK = 8
#: ``FLOATS``: dtypes of weights that are not quantised, and of tensors that layers make.
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """The form of a tensor, whose rows and times each request chooses.

    Attributes:
        sizes: its shape after the rows, and after time if it has that.
        has_time: True if its second dimension is time.
        is_integer: True if it has whole numbers or booleans. Every layer that makes such a tensor
            has ``choices_before``.
    """

    sizes: tuple[int, ...]
    has_time: bool = False
    is_integer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The form of a layer's weight: its shape, and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of a net.

    Attributes:
        name: unique among inputs and layers.
        inputs: the names of inputs or earlier layers that it reads.
    """

    name: str
    inputs: tuple[str, ...]

    @classmethod
    @abstractmethod
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        """Return the layer that fields describe.

        Raises:
            ModelLoadError: a field is missing or wrong.
        """

    @abstractmethod
    def form(self, *inputs: TensorForm) -> TensorForm:
        """Return the form of its output.

        Raises:
            ModelLoadError: it cannot read such inputs.
        """

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Its weights, by the last part of their names."""
        return {}

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """The sizes of its states, by the last part of their names."""
        return {}

    @property
    def num_choices(self) -> int | None:
        """The number of values that its inputs may have, from 0; None if that is not limited."""
        return None

    def choices_before(
        self, choices: Sequence[Choices], inputs: Sequence[TensorForm]
    ) -> Iterator[tuple[str, Choices]]:
        """Yield the choices of the inputs' elements, each with the name of the input.

        Args:
            choices: of the output's elements; there are none unless it has whole numbers.
            inputs: the forms of the inputs.
        """
        if self.num_choices is not None:
            yield self.inputs[0], Choices(0, math.prod(inputs[0].sizes), self.num_choices)
        assert not choices, f"{type(self).__name__} does not hand whole numbers on"

    def refuse(self, text: str) -> NoReturn:
        """Raise ModelLoadError, which names the layer."""
        raise ModelLoadError(f"config.json: layer {self.name!r}: {text}")

    def single(self, inputs: tuple[TensorForm, ...]) -> TensorForm:
        """Return the only input."""
        if len(inputs) != 1:
            self.refuse(f"has {len(inputs)} inputs; it takes one")
        return inputs[0]

    def floats(self, inputs: tuple[TensorForm, ...]) -> TensorForm:
        """Return the only input, which must have floating point numbers."""
        tensor = self.single(inputs)
        if tensor.is_integer:
            self.refuse(
                f"{self.inputs[0]!r} has whole numbers: scale, normalize, one_hot or embedding"
                " must come before this layer"
            )
        return tensor

    def choices(self, inputs: tuple[TensorForm, ...]) -> TensorForm:
        """Return the only input, which must have whole numbers."""
        tensor = self.single(inputs)
        if not tensor.is_integer:
            self.refuse(f"{self.inputs[0]!r} must have whole numbers")
        return tensor

    def features(self, tensor: TensorForm, size: int, field: str) -> None:
        """Refuse a tensor whose last size is not ``size``."""
        if tensor.sizes[-1:] != (size,):
            self.refuse(
                f"{self.inputs[0]!r} has sizes {list(tensor.sizes)}; the last must be"
                f" {size} ({field})"
            )

    def sized(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return sizes of an output, which must not be too many numbers for a row."""
        if fault := size_fault(sizes):
            self.refuse(fault)
        return sizes


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a range that are in one row of the last dimension, and in one part of it.

    Attributes:
        part: the place of the part.
        row: the place of the row.
        column: the first element's place in the part.
        size: the number of elements.
        count: see ``Choices``.
    """

    part: int
    row: int
    column: int
    size: int
    count: int

    def choices(self, width: int, begin: int = 0) -> Choices:
        """Return the range where a row has a width, and the part begins at a place there."""
        first = self.row * width + begin + self.column
        return Choices(first, first + self.size, self.count)


def pieces(choices: Iterable[Choices], widths: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of ranges; ``widths`` are those of the parts of the last dimension."""
    ends = list(accumulate(widths))
    for each in choices:
        begin = each.begin
        while begin < each.end:
            row, column = divmod(begin, ends[-1])
            part = bisect_right(ends, column)
            size = min(ends[part] - column, each.end - begin)
            yield Piece(part, row, column - ends[part] + widths[part], size, each.count)
            begin += size


def size_fault(sizes: tuple[int, ...]) -> str | None:
    """Return why a row cannot have such sizes; None if it can."""
    if len(sizes) > MAX_RANK:
        return f"a row would have {len(sizes)} dimensions; at most {MAX_RANK} are allowed"
    if math.prod(sizes) > MAX_ROW_SIZE:
        return f"a row would have {math.prod(sizes)} numbers; at most {MAX_ROW_SIZE} are allowed"
    return None
