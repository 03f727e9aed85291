"""What a model computes before its head: which layers, and of which of its inputs' rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True, slots=True)
class TrunkCalls:
    """Layers by their paths.

    Attributes:
        called: those that hidden states pass.
        shared: of these, those that get something else than rows of inputs, such as DeBERTa's
            projections of relative positions, or embeddings of positions: what they give belongs to
            all rows.
    """

    called: frozenset[str]
    shared: frozenset[str]


def trunk_calls(model: nn.Module, run: Callable[[int], object]) -> TrunkCalls:
    """Find out; nothing is computed.

    ``run`` makes the forward of so many inputs of one token each.
    """
    of_one, of_two = (_sizes(model, lambda count=count: run(count)) for count in (1, 2))
    shared = (path for path, size in of_one.items() if of_two[path] != 2 * size)
    return TrunkCalls(frozenset(of_one), frozenset(shared))


def _sizes(model: nn.Module, run: Callable[[], object]) -> Counter[str]:
    """How many numbers each layer is given in a forward."""
    sizes: Counter[str] = Counter()
    layers = [(path, one) for path, one in model.named_modules() if not one.children()]
    originals = [type(one) for _, one in layers]
    try:
        for path, layer in layers:
            layer.__class__ = _counting(type(layer), path, sizes)
        run()
    finally:
        # Backwards: a layer may be there under two paths.
        for (_, layer), original in zip(reversed(layers), reversed(originals), strict=True):
            layer.__class__ = original
    return sizes


def _counting(original: type, path: str, sizes: Counter[str]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes[path] += sum(one.size for one in args[:1] if isinstance(one, mx.array))
        return original.__call__(self, *args, **kwargs)

    return type(original.__name__, (original,), {"__call__": call})
