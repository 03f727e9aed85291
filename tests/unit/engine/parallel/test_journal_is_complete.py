"""An engine that starts anew gets every change that the others have had."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil

import mlx_parallm.engine
from mlx_parallm.engine.commands import Change
from mlx_parallm.engine.parallel import journal

#: LEAVE_NOTHING: changes after which an engine is as one that has just loaded.
LEAVE_NOTHING = {"ResetCaches"}


def changes() -> set[str]:
    """Return the names of all commands that change engines."""
    for module in pkgutil.walk_packages(mlx_parallm.engine.__path__, "mlx_parallm.engine."):
        importlib.import_module(module.name)
    return {each.__name__ for each in Change.__subclasses__()}


def noted() -> set[str]:
    """Return the names of the classes that the journal tells apart."""
    tree = ast.parse(inspect.getsource(journal))
    return {
        node.cls.id
        for node in ast.walk(tree)
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name)
    }


def test_every_change_is_noted() -> None:
    known = changes()
    assert len(known) > 10
    assert known - noted() == LEAVE_NOTHING
