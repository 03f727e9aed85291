"""Learns from mlx_lm's ``shard`` how each parameter of a model is cut.

Models cut some parameters by functions of their own, such as sinks, convolutions or repeated heads
of keys. So ``shard`` runs on copies of the model that have indices in place of numbers: those that
remain are what a rank keeps.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.sharding.cuts import Cut, FirstOnly, as_pieces
from mlx_parallm.worker.sharding.stock_shard import Rank, Record, copy_structure, run_shard

#: ``LAYER``: the number of a layer in the name of a parameter.
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")

#: ``Key``: a parameter's name without its layer, its shape, and that of a rank's part.
Key = tuple[str, tuple[int, ...], tuple[int, ...]]
Cuts = dict[str, Cut | FirstOnly]


class Learned(NamedTuple):
    """Cuts of a model.

    Attributes:
        cuts: how parameters are cut, by name; others are whole on every rank.
        record: which layers' outputs are added up.
    """

    cuts: Cuts
    record: Record


def learn_cuts(model: Any, size: int) -> Learned:
    """Return how the parameters of a model are cut for ``size`` ranks; the model is not changed.

    Raises:
        ConfigError: a parameter is cut in a way that is not understood.
    """
    shapes = {name: array.shape for name, array in flat_parameters(model).items()}
    with mx.stream(mx.cpu):
        kept_indices = _indices(model, shapes, size)
    record = run_shard(copy_structure(model), Rank(0, size))
    # A rank's block adds up what it has, so a bias that all ranks had would be added repeatedly.
    once = {f"{path}.bias" for path in record.in_place} & shapes.keys()
    cuts: Cuts = {name: FirstOnly(shapes[name]) for name in once}
    for name, by_axis in kept_indices.items():
        if name not in once:
            cut = _cut_of(name, shapes[name], by_axis)
            if cut is not None:
                cuts[name] = cut
    return Learned(cuts, record)


def flat_parameters(model: Any) -> dict[str, mx.array]:
    """Return the parameters of a model by name."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))


_Indices = dict[int, list[NDArray[np.floating]]]


def _indices(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], size: int
) -> dict[str, _Indices]:
    """Return which indices of each axis each rank keeps, for parameters that ``shard`` touches."""
    kept_indices: dict[str, _Indices] = {}
    for axis in range(max(map(len, shapes.values()))):
        marked = {name: shape for name, shape in shapes.items() if len(shape) > axis}
        for rank in range(size):
            for name, line in _kept(model, marked, axis, Rank(rank, size)).items():
                kept_indices.setdefault(name, {}).setdefault(axis, []).append(line)
    return kept_indices


def _kept(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], axis: int, rank: Rank
) -> dict[str, NDArray[np.floating]]:
    """Return the indices of one axis that a rank keeps, by the name of the parameter.

    Parameters of the same name, shape and part in several layers are cut alike, so the indices of
    one of them are computed: some models concatenate parts, which takes as long as real numbers do.
    """
    marked = copy_structure(model)
    markers = {name: _marker(shape, axis) for name, shape in shapes.items()}
    marked.update(tree_unflatten(list(markers.items())))
    run_shard(marked, rank)
    after = flat_parameters(marked)
    if markers.keys() - after.keys():
        raise ConfigError(f"mlx_lm's shard renames {min(markers.keys() - after.keys())}.")
    keys = {
        name: (LAYER.sub("", name), shapes[name], after[name].shape)
        for name, marker in markers.items()
        if after[name] is not marker
    }
    lines: dict[Key, mx.array] = {}
    for name, key in keys.items():
        others = (0,) * (len(shapes[name]) - axis - 1)
        lines.setdefault(key, after[name][(0,) * axis + (slice(None), *others)])
    mx.eval(list(lines.values()))
    kept = {key: np.array(line.astype(mx.float32)) for key, line in lines.items()}
    return {name: kept[key] for name, key in keys.items()}


def _marker(shape: tuple[int, ...], axis: int) -> mx.array:
    """Return an array whose numbers are their indices along an axis; it takes no memory.

    They are floats because some models divide a bias.
    """
    line = mx.arange(shape[axis], dtype=mx.float32).reshape(-1, *[1] * (len(shape) - axis - 1))
    return mx.broadcast_to(line, shape)


def _cut_of(name: str, shape: tuple[int, ...], by_axis: _Indices) -> Cut | None:
    """Return the cut of a parameter; None if all ranks keep all of it."""
    cuts: list[Cut] = []
    for axis, lines in by_axis.items():
        whole = np.arange(shape[axis])
        if all(np.array_equal(line, whole) for line in lines):
            continue
        rounded = [line.astype(np.int64) for line in lines]
        is_kept = np.zeros(shape[axis], bool)
        is_kept[np.concatenate(rounded)] = True
        if not is_kept.all() or any(map(np.any, map(np.subtract, lines, rounded))):
            raise ConfigError(f"It is not known how mlx_lm's shard cuts {name}.")
        cuts.append(Cut(shape, axis - len(shape), tuple(map(as_pieces, rounded))))
    if len(cuts) > 1:
        raise ConfigError(f"mlx_lm's shard cuts {name} along several axes.")
    return cuts[0] if cuts else None
