"""Where a module refuses: the statements that raise an error, and those that a raised error passed.

A test that compares them shows that cases reach all of them.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

#: ``REFUSES``: the method that raises for its caller.
REFUSES = "refuse"


class Site(NamedTuple):
    """A statement, or several expressions of one, by the last line."""

    file: str
    line: int


def refusal_sites(module: ModuleType, error: type[Exception]) -> set[Site]:
    """Return the statements that raise an error of this class, or call ``refuse``."""
    file = str(module.__file__)
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {
        Site(Path(file).name, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise | ast.Expr) and _refuses(node, error.__name__)
    }


def _refuses(node: ast.Raise | ast.Expr, error: str) -> bool:
    call = node.exc if isinstance(node, ast.Raise) else node.value
    if not isinstance(call, ast.Call):
        return False
    function = call.func
    if isinstance(node, ast.Raise):
        return isinstance(function, ast.Name) and function.id == error
    return isinstance(function, ast.Attribute) and function.attr == REFUSES


def passed_sites(error: BaseException) -> set[Site]:
    """Return the statements that an error passed, and those that it was raised instead of."""
    return {
        Site(Path(frame.filename).name, frame.end_lineno or frame.lineno or 0)
        for each in _chain(error)
        for frame in traceback.extract_tb(each.__traceback__)
    }


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
