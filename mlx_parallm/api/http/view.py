"""The engine as some of its callers see it: what a view does not define is the engine's own."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class View(Generic[T]):
    """Stands for an object, from which it differs in what a subclass defines, and only there."""

    def __init__(self, viewed: T) -> None:
        self._viewed = viewed

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object behind."""
        return getattr(self._viewed, name)
