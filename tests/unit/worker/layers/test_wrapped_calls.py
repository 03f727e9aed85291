"""Calls of modules can be wrapped, in layers, and unwrapped in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls, replace_class

X = mx.ones((1, 64))
LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(64, 64),
    lambda: nn.QuantizedLinear(64, 64, bits=4, group_size=32),
]


def noting(original: Any, *, name: str, log: list[str]) -> Methods:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        log.append(name)
        return original.__call__(self, *args, **options)

    return {"__call__": call}


@pytest.mark.parametrize("make", LAYERS)
def test_a_wrapped_layer_stays_what_it_is(make: Callable[[], nn.Module]) -> None:
    layer, other, log = make(), make(), list[str]()
    original, parameters, y = type(layer), list(layer.parameters()), layer(X)
    with WrappedCalls([layer], partial(noting, name="a", log=log)):
        assert isinstance(layer, original)
        assert type(layer) is not original
        assert list(layer.parameters()) == parameters
        assert mx.array_equal(layer(X), y)
        other(X)
    layer(X)
    assert log == ["a"]
    assert type(layer) is original


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_nested_wrappings_are_removed_in_any_order(
    make: Callable[[], nn.Module], order: tuple[str, ...]
) -> None:
    layer, log = make(), list[str]()
    original, y = type(layer), layer(X)
    names = ["a", "b", "c"]
    calls = {name: WrappedCalls([layer], partial(noting, name=name, log=log)) for name in names}
    for name in order:
        assert mx.array_equal(layer(X), y)
        assert log == names[::-1]
        log.clear()
        calls[name].remove()
        names.remove(name)
    layer(X)
    assert log == []
    assert type(layer) is original


def test_a_wrapping_may_be_removed_twice_and_the_module_wrapped_again() -> None:
    layer, log = nn.Linear(64, 64), list[str]()
    first = WrappedCalls([layer], partial(noting, name="a", log=log))
    first.remove()
    second = WrappedCalls([layer], partial(noting, name="b", log=log))
    first.remove()
    layer(X)
    assert log == ["b"]
    second.remove()
    assert type(layer) is nn.Linear


def test_a_module_given_twice_is_wrapped_once() -> None:
    layer, log = nn.Linear(64, 64), list[str]()
    with WrappedCalls([layer, layer], partial(noting, name="a", log=log)):
        layer(X)
    assert log == ["a"]
    assert type(layer) is nn.Linear


def test_an_exception_in_the_context_unwraps_all_modules() -> None:
    layers = [make() for make in LAYERS]
    log: list[str] = []
    with (
        pytest.raises(ValueError, match="shape"),
        WrappedCalls(layers, partial(noting, name="a", log=log)),
    ):
        layers[0](mx.ones((1, 3)))
    assert log == ["a"]
    assert [type(layer) for layer in layers] == [nn.Linear, nn.QuantizedLinear]


def test_if_one_module_cannot_be_wrapped_none_stays_wrapped() -> None:
    layer = nn.Linear(64, 64)
    with pytest.raises(TypeError):
        WrappedCalls([layer, 3], lambda _: {})
    assert type(layer) is nn.Linear

    def refusing(original: Any) -> Methods:
        if original is nn.QuantizedLinear:
            raise ValueError(original)
        return {}

    with pytest.raises(ValueError, match="Quantized"):
        WrappedCalls([layer, LAYERS[1]()], refusing)
    assert type(layer) is nn.Linear


def test_other_methods_than_the_call_are_wrapped() -> None:
    table = nn.Embedding(8, 64)

    def doubling(original: Any) -> Methods:
        return {"as_linear": lambda self, x: 2 * original.as_linear(self, x)}

    y, ids = table.as_linear(X), mx.array([3])
    with WrappedCalls([table], doubling):
        assert mx.array_equal(table.as_linear(X), 2 * y)
        assert mx.array_equal(table(ids), table.weight[ids])
    assert mx.array_equal(table.as_linear(X), y)


def test_what_a_wrapping_held_is_released_with_it() -> None:
    layer, log = nn.Linear(64, 64), list[str]()
    calls = WrappedCalls([layer], partial(noting, name="a", log=log))
    wrapper = type(layer)
    calls.remove()
    assert "__call__" not in vars(wrapper)


class Doubled(nn.Linear):
    """Stands for a layer of this package."""

    def __call__(self, x: mx.array) -> mx.array:
        return self["_factor"] * super().__call__(x)


def test_a_replaced_class_keeps_parameters_and_hides_its_state() -> None:
    layer = nn.Linear(64, 64)
    y, names = layer(X), set(layer.parameters())
    replace_class(layer, Doubled, _factor=2)
    assert mx.array_equal(layer(X), 2 * y)
    assert set(layer.parameters()) == names


def test_a_class_is_replaced_by_its_subclass_only() -> None:
    with pytest.raises(AssertionError):
        replace_class(nn.Embedding(8, 64), Doubled)
