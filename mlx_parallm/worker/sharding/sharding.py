"""A model of which this process has one rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import LowRank
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.shared_tensors import as_words, from_words
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.sharding.cuts import Cut, host_part, scaled
from mlx_parallm.worker.sharding.learned_cuts import Learned, flat_parameters, learn_cuts
from mlx_parallm.worker.sharding.stock_shard import copy_structure, run_shard


class Sharding:
    """Cuts of a model, and the sums of its layers' outputs over the ranks.

    Attributes:
        ranks: the processes that have the parts.
    """

    def __init__(self, model: Any, ranks: Ranks, learned: Learned) -> None:
        """Describe a model that was cut; its layers do not add up yet, see ``add_up``."""
        self.ranks = ranks
        self._model = model
        self._cuts = learned.cuts
        self._paths = tuple(learned.record.summed)
        self._sums: dict[str, WrappedCalls] = {}

    def part(self, name: str, array: mx.array) -> mx.array:
        """Return this rank's part of a whole parameter."""
        cut = self._cuts.get(name)
        return array if cut is None else cut.part(array, self.ranks.rank)

    def parts(self, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return this rank's parts of whole parameters, evaluated, and empty ``arrays``.

        One parameter is whole in memory at a time.
        """
        parts: dict[str, mx.array] = {}
        while arrays:
            name = next(iter(arrays))
            parts[name] = self.part(name, arrays.pop(name))
            mx.eval(parts[name])
        return parts

    def whole(self, name: str, part: mx.array) -> mx.array:
        """Return a whole parameter, bit for bit, of the parts of all ranks, which must all call."""
        cut = self._cuts.get(name)
        if cut is None:
            return part
        gathered = self.ranks.gather(as_words(part)[None])
        parts = [from_words(words, part.dtype, part.shape) for words in gathered]
        return cut.whole(parts)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a whole parameter, of which this rank's part has ``shape``."""
        cut = self._cuts.get(name)
        return shape if cut is None else cut.shape

    def whole_weight_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a layer's whole weight, as if unpacked; ``shape`` is of the part."""
        cut = self._cuts.get(f"{path}.weight")
        if not isinstance(cut, Cut):
            return shape
        stored = _length(cut, self.ranks.rank)
        whole = list(shape)
        whole[cut.axis] = cut.shape[cut.axis] * shape[cut.axis] // stored
        return tuple(whole)

    def part_of_change(self, path: str, change: LowRank, shape: tuple[int, ...]) -> LowRank:
        """Return the change of this rank's part of a layer; ``shape`` is of its unpacked weight.

        The first factor is cut as the layer's inputs are, the second one as its outputs.
        """
        cut = self._cuts.get(f"{path}.weight")
        if not isinstance(cut, Cut):
            return change
        rank = self.ranks.rank
        pieces = scaled(cut.pieces[rank], shape[cut.axis], _length(cut, rank))
        cut_tensor = partial(_host_part, pieces=pieces)
        if cut.axis == -1:
            return replace(change, a=cut_tensor(change.a, -1))
        magnitude = None if change.magnitude is None else cut_tensor(change.magnitude, -1)
        return replace(change, b=cut_tensor(change.b, -2), magnitude=magnitude)

    def whole_norms(self, norms: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the norms of whole rows of weights, by path, for norms of their parts.

        All ranks must call with the same paths: rows that are cut take one sum for all of them.
        """
        rows = {path: norm for path, norm in norms.items() if self._has_cut_rows(path)}
        if not rows:
            return dict(norms)
        squares = mx.concatenate([mx.square(norm) for norm in rows.values()])
        total = mx.sqrt(self.ranks.sum(squares))
        ends, end = [], 0
        for norm in rows.values():
            end += norm.size
            ends.append(end)
        return {**norms, **dict(zip(rows, mx.split(total, ends[:-1]), strict=True))}

    def add_up(self) -> None:
        """Let layers that are cut along their inputs return the sums of all ranks' outputs."""
        modules = dict(self._model.named_modules())
        for path in self._paths:
            self._sums[path] = WrappedCalls([modules[path]], self._summing)

    @contextmanager
    def beneath_sum(self, path: str) -> Iterator[None]:
        """Let calls that are wrapped in this context be added up too, if the layer's are."""
        calls = self._sums.pop(path, None)
        if calls is None:
            yield
            return
        calls.remove()
        try:
            yield
        finally:
            module = dict(self._model.named_modules())[path]
            self._sums[path] = WrappedCalls([module], self._summing)

    def _has_cut_rows(self, path: str) -> bool:
        cut = self._cuts.get(f"{path}.weight")
        return isinstance(cut, Cut) and cut.axis == -1

    def _summing(self, original: Any) -> Methods:
        total: Callable[[mx.array], mx.array] = self.ranks.sum

        def call(self: Any, x: mx.array) -> mx.array:
            # Every rank has the bias, which is to be added once.
            bias = self.pop("bias", None)
            try:
                y = original.__call__(self, x)
            finally:
                if bias is not None:
                    self["bias"] = bias
            y = total(y)
            return y if bias is None else y + bias

        return {"__call__": call}


def cut_model(model: Any, ranks: Ranks) -> Sharding:
    """Keep this rank's part of a model, whose parameters may be lazy; they are evaluated.

    Names of parameters and classes of layers stay.
    """
    learned = learn_cuts(model, ranks.size)
    whole = flat_parameters(copy_structure(model))
    run_shard(model, ranks.group)
    sharding = Sharding(model, ranks, learned)
    # The model may hold the whole parameters no longer when the first one is evaluated.
    held = {name: mx.zeros(()) for name in whole}
    model.update(tree_unflatten(list(held.items())))
    model.update(tree_unflatten(list(sharding.parts(whole).items())))
    return sharding


def _length(cut: Cut, rank: int) -> int:
    return sum(stop - start for start, stop in cut.pieces[rank])


def _host_part(tensor: HostTensor, axis: int, pieces: tuple[tuple[int, int], ...]) -> HostTensor:
    return HostTensor(host_part(tensor.array, axis, pieces), tensor.is_bfloat16)
