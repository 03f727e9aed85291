"""Layers take MLX's own operations in training mode, because kernels have no gradient."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_parallm.worker.layers
from mlx_parallm.worker.layers.expert_kernel import RowSwitchLinear
from mlx_parallm.worker.layers.packing import packing_of
from mlx_parallm.worker.layers.row_layers import (
    RowEmbedding,
    RowLinear,
    RowProduct,
    RowQuantizedEmbedding,
    RowQuantizedLinear,
    part_of,
)
from mlx_parallm.worker.layers.state_layers import RowConvolution
from mlx_parallm.worker.layers.wrapped_calls import replace_class

SIZE = 64
ROWS = mx.random.normal((2, 1, SIZE), key=mx.random.key(0))
EXPERTS = mx.array([0, 1], mx.uint32)
Call = Callable[[Any, mx.array], mx.array]


class KernelCallError(Exception):
    """A kernel was called."""


def kernel(*_: Any, **__: Any) -> Any:
    raise KernelCallError


class _Product(RowProduct):
    """A product that may not be used."""

    def take_part(self, index: int, x: mx.array) -> Any:
        raise KernelCallError


def served(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a layer that a kernel, or a product of several layers, computes."""
    if packing_of(layer) is not None:
        replace_class(layer, kind, _packed=kernel)
    replace_class(layer, kind, _product=_Product([layer]), _index=0)
    return layer


def with_kernel(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    replace_class(layer, kind, _kernel=kernel)
    return layer


def linear(layer: Any, x: mx.array) -> mx.array:
    return layer(x)


def head(layer: Any, x: mx.array) -> mx.array:
    return layer.as_linear(x)


def experts(layer: Any, x: mx.array) -> mx.array:
    return layer(x, EXPERTS, sorted_indices=True)


CASES: dict[type[nn.Module], tuple[nn.Module, Call]] = {
    RowLinear: (served(nn.Linear(SIZE, 8, bias=False), RowLinear), linear),
    RowQuantizedLinear: (
        served(nn.QuantizedLinear(SIZE, 32, bias=False), RowQuantizedLinear),
        linear,
    ),
    RowEmbedding: (served(nn.Embedding(8, SIZE), RowEmbedding), head),
    RowQuantizedEmbedding: (served(nn.QuantizedEmbedding(32, SIZE), RowQuantizedEmbedding), head),
    RowConvolution: (
        with_kernel(nn.Conv1d(SIZE, SIZE, 1, groups=SIZE), RowConvolution),
        linear,
    ),
    RowSwitchLinear: (with_kernel(SwitchLinear(SIZE, 8, 2, bias=False), RowSwitchLinear), experts),
}


def test_every_layer_with_a_kernel_is_tested() -> None:
    folder = mlx_parallm.worker.layers
    modules = [
        import_module(f"{folder.__name__}.{each.name}")
        for each in pkgutil.iter_modules(folder.__path__)
    ]
    kinds = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    }
    assert kinds == CASES.keys()


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_layers_in_training_mode_have_a_gradient(kind: type[nn.Module]) -> None:
    layer, call = CASES[kind]
    layer.eval()
    with pytest.raises(KernelCallError):
        call(layer, ROWS)
    layer.train()
    (gradient,) = mx.vjp(lambda x: call(layer, x), [ROWS], [call(layer, ROWS)])[1]
    assert np.any(np.array(gradient))


def test_parts_of_layers_in_training_mode_are_their_own() -> None:
    layer, _ = CASES[RowLinear]
    layer.eval()
    with pytest.raises(KernelCallError):
        part_of(layer, kernel, ROWS)
    layer.train()
    part = part_of(layer, lambda x: x * 2, ROWS)
    np.testing.assert_array_equal(np.array(part.output), np.array(ROWS * 2))
