"""Wrapped calls of modules, and their own ones afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.worker.module_classes import calling, replaced_classes


class Doubler:
    """Stands for a module."""

    def __call__(self, number: int, *, plus: int = 0) -> int:
        return 2 * number + plus


def negated(call: Any, *args: Any, **options: Any) -> int:
    return -call(*args, **options)


def test_calls_are_wrapped_in_the_block_only() -> None:
    module, other = Doubler(), Doubler()
    with replaced_classes([(module, calling(Doubler, negated))]):
        assert module(3, plus=1) == -7
        assert isinstance(module, Doubler)
        assert other(3) == 6
    assert type(module) is Doubler
    assert module(3, plus=1) == 7


def test_a_module_that_occurs_twice_is_wrapped_twice_and_restored() -> None:
    module = Doubler()
    with replaced_classes((part, calling(type(part), negated)) for part in (module, module)):
        assert module(3) == 6
        assert type(module).__mro__.index(Doubler) == 2
    assert type(module) is Doubler


def test_an_error_restores_the_classes() -> None:
    module = Doubler()

    def fail() -> None:
        with replaced_classes([(module, calling(Doubler, negated))]):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert type(module) is Doubler
