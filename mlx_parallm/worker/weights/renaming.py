"""Some weights of a checkpoint by the model's own names, converted as in the whole checkpoint.

What a model of mlx_lm makes of a checkpoint may depend on weights that an update lacks: a
convolution's axes say whether norms are counted from 1, and experts become one array. So the rest
of the checkpoint is added as arrays without memory, of a dtype that marks what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.indexed_weights import read_weights
from mlx_parallm.numerics.finite import named
from mlx_parallm.types.errors import InvalidRequestError

PARAM = "weights"
# MARK: weights have other dtypes, and results of several arrays have this one if an array has it.
MARK = mx.complex64

Arrays = dict[str, mx.array]
Rename = Callable[[Arrays], Arrays]


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's weights by name.

    Empty if there are none, or if some are not floating, such as those of quantised layers: the
    dtype of what is made of them must stay.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in read_weights(folder).items():
        if not mx.issubdtype(array.dtype, mx.floating):
            return {}
        shapes[name] = array.shape
    return shapes


def renamed_as_in(
    shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, mx.array], rename: Rename
) -> Arrays:
    """Return some weights as they are in a loaded model.

    Args:
        shapes: those of the whole checkpoint.
        arrays: by their names in the checkpoint.
        rename: returns the weights of a whole checkpoint by the model's names.

    Raises:
        InvalidRequestError: what is made of them needs other weights too.
    """
    others = {name: shape for name, shape in shapes.items() if name not in arrays}
    renamed = rename({**_empty(others, MARK), **arrays})
    own = {name: array for name, array in renamed.items() if array.dtype != MARK}
    own_shapes = {name: array.shape for name, array in arrays.items()}
    touched = rename({**_empty(others, mx.float32), **_empty(own_shapes, MARK)})
    parts = {name for name, array in touched.items() if array.dtype == MARK} - own.keys()
    if parts:
        raise InvalidRequestError(
            f"The model keeps these weights together with others, which must be sent in the same "
            f"request: {named(parts)}.",
            param=PARAM,
        )
    return own


def left_alone(shapes: Mapping[str, tuple[int, ...]], rename: Rename) -> frozenset[str]:
    """Return the names of weights that stay as they are, and that nothing else is made of.

    Args:
        shapes: those of the whole checkpoint.
        rename: returns the weights of a whole checkpoint by the model's names.
    """
    watched = {name: _Watched(array) for name, array in _empty(shapes, mx.float32).items()}
    renamed = rename({**watched})
    same = [
        name
        for name, array in watched.items()
        if renamed.get(name) is array and not array.is_changed
    ]
    return frozenset(_without_results(same, shapes, rename))


def _without_results(
    names: list[str], shapes: Mapping[str, tuple[int, ...]], rename: Rename
) -> list[str]:
    """Return those of some weights of which no weight by another name is made."""
    marked = {name: shapes[name] for name in names}
    renamed = rename({**_empty(shapes, mx.float32), **_empty(marked, MARK)})
    if not any(array.dtype == MARK for name, array in renamed.items() if name not in marked):
        return names
    middle = len(names) // 2
    parts = (names[:middle], names[middle:]) if middle else ()
    return [name for part in parts for name in _without_results(part, shapes, rename)]


class _Watched(mx.array):
    """An array that shows if it is changed: results of operators in place are other objects."""

    is_changed = False

    def __iadd__(self, other: Any) -> Any:
        return mx.add(self, other)

    def __isub__(self, other: Any) -> Any:
        return mx.subtract(self, other)

    def __imul__(self, other: Any) -> Any:
        return mx.multiply(self, other)

    def __itruediv__(self, other: Any) -> Any:
        return mx.divide(self, other)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.is_changed = True
        super().__setitem__(key, value)


class Renamer:
    """Gives weights of a checkpoint the names that a model has for them.

    Some classes of mlx_lm change the model meanwhile: Gemma 3 loses its head. So a copy of a new
    model does it, whose arrays are never evaluated.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._new: Any = None

    def __call__(self, arrays: Arrays) -> Arrays:
        """Return weights by the model's names; a class of mlx_lm without other names keeps them."""
        if not hasattr(self._model, "sanitize"):
            return arrays
        if self._new is None:
            args = getattr(self._model, "args", None)
            self._new = self._model if args is None else type(self._model)(args)
        blank = _copied(self._new)
        # A model with a tower takes a checkpoint without one for a text model.
        return getattr(blank, "renamed", blank.sanitize)(arrays)


def _copied(tree: Any) -> Any:
    """Return a copy of a module and of those in it, with the same arrays."""
    if isinstance(tree, nn.Module):
        copied = copy(tree)
        for name, child in tree.items():
            copied[name] = _copied(child)
        return copied
    if isinstance(tree, list):
        return [_copied(child) for child in tree]
    return {name: _copied(child) for name, child in tree.items()} if type(tree) is dict else tree


def _empty(shapes: Mapping[str, tuple[int, ...]], dtype: mx.Dtype) -> Arrays:
    """Return arrays that are not evaluated."""
    zero = mx.zeros((), dtype)
    return {name: mx.broadcast_to(zero, shape) for name, shape in shapes.items()}
