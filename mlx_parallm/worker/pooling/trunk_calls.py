"""Finds which layers a model calls before its head, and which of them rows share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls


@dataclass(frozen=True, slots=True)
class TrunkCalls:
    """The layers of a model's trunk, by path.

    Attributes:
        called: layers that compute hidden states.
        shared: those of them with inputs that are not per row, such as DeBERTa's projections of
            relative positions or position embeddings: their outputs serve all rows.
    """

    called: frozenset[str]
    shared: frozenset[str]


def trunk_calls(model: nn.Module, run: Callable[[int], object]) -> TrunkCalls:
    """Return the layers that ``run`` calls; nothing is evaluated.

    ``run`` builds the forward of a number of inputs of one token each.
    """
    single, double = (_sizes(model, lambda count=count: run(count)) for count in (1, 2))
    shared = (path for path, size in single.items() if double[path] != 2 * size)
    return TrunkCalls(frozenset(single), frozenset(shared))


def _sizes(model: nn.Module, run: Callable[[], object]) -> Counter[str]:
    """Return the number of elements that each layer takes in a forward, by path."""
    sizes: Counter[str] = Counter()
    with ExitStack() as wrapped:
        for path, layer in model.named_modules():
            if not layer.children():
                # Each path has its own wrapping, because a layer may occur under two paths.
                counting = partial(_counting, path=path, sizes=sizes)
                wrapped.enter_context(WrappedCalls([layer], counting))
        run()
    return sizes


def _counting(original: Any, *, path: str, sizes: Counter[str]) -> Methods:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes[path] += sum(arg.size for arg in args[:1] if isinstance(arg, mx.array))
        return original.__call__(self, *args, **kwargs)

    return {"__call__": call}
