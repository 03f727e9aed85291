"""An engine that starts anew gets every change that the others have had."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

import mlx_parallm.engine
from mlx_parallm.engine.commands import Change, EngineCommand, LeavesNothing
from mlx_parallm.engine.engine_commands import ResetCaches


def commands(base: type = EngineCommand) -> Iterator[type]:
    """Yield all classes of commands."""
    for module in pkgutil.walk_packages(mlx_parallm.engine.__path__, "mlx_parallm.engine."):
        importlib.import_module(module.name)
    for each in base.__subclasses__():
        if each.__module__.startswith("mlx_parallm.") and Protocol not in each.__bases__:
            yield each
            yield from commands(each)


def test_every_command_says_what_it_leaves() -> None:
    known = set(commands())
    assert len(known) > 20
    silent = [command for command in known if getattr(command, "__abstractmethods__", None)]
    assert silent == []


def test_a_change_leaves_something() -> None:
    changes = [command for command in commands() if issubclass(command, Change)]
    assert len(changes) > 10
    # After it an engine is as one that has just loaded.
    # A class with slots is made twice, so that names are compared.
    nothing = {command.__name__ for command in changes if issubclass(command, LeavesNothing)}
    assert nothing == {ResetCaches.__name__}


def test_a_command_that_does_not_say_cannot_be_made() -> None:
    class Forgotten(Change, EngineCommand[None]):
        def __call__(self, loop: Any) -> None: ...

    with pytest.raises(TypeError, match="noted"):
        Forgotten()  # type: ignore[abstract]
