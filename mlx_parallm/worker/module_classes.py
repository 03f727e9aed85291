"""Replaces the classes of modules, to observe or change their calls without changing a model.

Python looks ``__call__`` up in an object's class, so a wrapped call needs another class. Subclasses
of a module's own class keep its parameters and its other methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def calling(original: Any, wrap: Callable[..., Any]) -> type:
    """Return a subclass of ``original`` with calls that return ``wrap(call, *args, **options)``.

    ``call`` is the module's own call.
    """

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return wrap(partial(original.__call__, self), *args, **options)

    return type(original.__name__, (original,), {"__call__": call})


@contextmanager
def replaced_classes(classes: Iterable[tuple[Any, type]]) -> Iterator[None]:
    """Give each module, within the ``with`` block, the class beside it.

    A module may occur several times; an iterator that makes the classes sees those before.
    """
    originals: list[tuple[Any, type]] = []
    try:
        for module, replacement in classes:
            originals.append((module, type(module)))
            module.__class__ = replacement
        yield
    finally:
        for module, original in reversed(originals):
            module.__class__ = original
