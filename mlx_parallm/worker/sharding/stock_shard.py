"""Runs the method ``shard`` of mlx_lm's models, which says how each of their layers is cut.

MLX's ``shard_linear`` returns layers of other classes, which kernels and adapters do not know. So
``shard_linear`` and ``shard_inplace`` are replaced in the modules of the model's own classes while
its ``shard`` runs. The layers keep their class and get one rank's part of their arrays, and it is
recorded which outputs are to be added up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

COLUMNS, ROWS = "all-to-sharded", "sharded-to-all"
#: ``HEAD``: the name of an untied head. It stays whole on every rank, so that ranks which need no
#: logits take part in no gathering of them.
HEAD = "lm_head"

Sharding = str | Callable[[str, mx.array], Any]


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of one rank, as ``shard`` asks MLX's groups for it."""

    index: int
    count: int

    def rank(self) -> int:
        """Return the rank."""
        return self.index

    def size(self) -> int:
        """Return the number of ranks."""
        return self.count


@dataclass(slots=True)
class Record:
    """The layers that ``shard`` cut along their inputs, by path.

    Attributes:
        summed: linear layers cut along their inputs, whose outputs are to be added up.
        in_place: layers cut along their inputs whose outputs are added up by the block around them.
    """

    summed: list[str] = field(default_factory=list[str])
    in_place: list[str] = field(default_factory=list[str])


def run_shard(model: Any, group: Any) -> Record:
    """Let a model's ``shard`` cut its arrays and change its attributes for one rank of a group.

    ``group`` is a ``Rank`` or MLX's group; the blocks of the model add up by it.
    """
    seam = _Seam(model, group)
    with seam.installed():
        model.shard(group)
    for module in model.modules():
        if HEAD in module and getattr(module, "sharding_group", None) is not None:
            # The head is whole, so there is nothing to gather.
            module.sharding_group = None
    _sum_in_layers(model, seam.record)
    return seam.record


def copy_structure(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy of a module and of all modules in it; the numbers of arrays are shared.

    Arrays are other objects, because some models divide a bias in place.
    """
    copies = {} if copies is None else copies
    if isinstance(value, nn.Module):
        if id(value) not in copies:
            module = copies[id(value)] = type(value).__new__(type(value))
            vars(module).update(vars(value))
            for name, item in value.items():
                dict.__setitem__(module, name, copy_structure(item, copies))
        return copies[id(value)]
    if isinstance(value, mx.array):
        return copy(value)
    if isinstance(value, dict):
        return {name: copy_structure(item, copies) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_structure(item, copies) for item in value)
    return value


class _Seam:
    """Stands for MLX's functions while a model is cut."""

    def __init__(self, model: Any, group: Any) -> None:
        self.record = Record()
        self._group = group
        self._paths = {id(module): path for path, module in model.named_modules()}
        classes = [*type(model).__mro__, *map(type, model.modules())]
        self._namespaces = {cls.__module__ for cls in classes}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions in the modules of the model's classes, and restore them."""
        replacements = {
            "shard_linear": self.shard_linear,
            "shard_inplace": self.shard_inplace,
            "shard_experts_inplace": self.shard_experts_inplace,
        }
        replaced: list[tuple[Any, str, Any]] = []
        try:
            for module in (sys.modules[name] for name in sorted(self._namespaces)):
                for name, replacement in replacements.items():
                    if name in vars(module):
                        replaced.append((module, name, vars(module)[name]))
                        setattr(module, name, replacement)
            yield
        finally:
            for module, name, original in replaced:
                setattr(module, name, original)

    def shard_linear(
        self, module: Any, sharding: str, *, segments: Any = 1, group: Any = None
    ) -> Any:
        """Cut a linear layer and return it; outputs of rows are to be added up."""
        path = self._paths[id(module)]
        if path.rpartition(".")[2] == HEAD:
            return module
        if not isinstance(module, nn.Linear | nn.QuantizedLinear):
            # Other layers may mix their inputs, as a rotation does.
            raise NotImplementedError(f"it is not known how a {type(module).__name__} is cut")
        self._cut(module, sharding, segments)
        if sharding == ROWS:
            self.record.summed.append(path)
        return module

    def shard_inplace(
        self, module: Any, sharding: Sharding, *, segments: Any = 1, group: Any = None
    ) -> None:
        """Cut a layer whose outputs are added up by the block around it."""
        self._cut(module, sharding, segments)
        if sharding == ROWS:
            self.record.in_place.append(self._paths[id(module)])

    def shard_experts_inplace(self, module: Any, sharding: str, group: Any) -> None:
        """Cut experts as ``muse_spark`` does: arrays of fewer than three axes stay whole."""

        def axis_of(_: str, weight: mx.array) -> int | None:
            if weight.ndim < 3:
                return None
            return -2 if sharding == COLUMNS else -1

        self._cut(module, axis_of, 1)
        if sharding == ROWS:
            self.record.in_place.append(self._paths[id(module)])

    def _cut(self, module: nn.Module, sharding: Sharding, segments: Any) -> None:
        axis_of = sharding
        if isinstance(axis_of, str):
            axis_of = partial(_axis_of, is_rows=sharding == ROWS, segments=segments)
        rank, size = self._group.rank(), self._group.size()

        def cut(path: str, weight: Any) -> Any:
            where = axis_of(path, weight) if isinstance(weight, mx.array) else None
            if where is None:
                return weight
            axis, parts = where if isinstance(where, tuple) else (where, 1)
            if weight.shape[axis] % size:
                name, count = f"{self._paths[id(module)]}.{path}", weight.shape[axis]
                raise ValueError(f"{size} does not divide the {count} rows or columns of {name}")
            mine = [mx.split(part, size, axis)[rank] for part in _split(weight, parts, axis)]
            return mine[0] if len(mine) == 1 else mx.concatenate(mine, axis)

        module.update(tree_map_with_path(cut, module.parameters()))


def _axis_of(path: str, weight: mx.array, *, is_rows: bool, segments: Any) -> Any:
    """Return the axis and segments of a layer's parameter, as MLX cuts it; None if it stays."""
    is_bias = path.endswith("bias")
    if is_rows:
        return None if is_bias else (-1, segments)
    return (-1 if is_bias else max(weight.ndim - 2, 0)), segments


def _split(weight: mx.array, segments: Any, axis: int) -> list[mx.array]:
    """Return the segments of an array: their number, their ends, or these as fractions."""
    if not isinstance(segments, int) and not isinstance(segments[0], int):
        segments = [int(share * weight.shape[axis]) for share in segments]
    return list(mx.split(weight, segments, axis))


def _sum_in_layers(model: Any, record: Record) -> None:
    """Add up in a layer what a block would, if that layer alone is cut along its inputs.

    Such a block is a gated delta net, whose kernels call its last layer.
    """
    modules = dict(model.named_modules())
    for path in list(record.in_place):
        parent = path.rpartition(".")[0]
        inside = [other for other in record.in_place if other.startswith(f"{parent}.")]
        is_linear = isinstance(modules[path], nn.Linear | nn.QuantizedLinear)
        if is_linear and inside == [path] and getattr(modules[parent], "sharding_group", None):
            modules[parent].sharding_group = None
            record.in_place.remove(path)
            record.summed.append(path)
