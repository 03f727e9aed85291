"""A command of a test, which calls a function on the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_parallm.engine.commands import EngineCommand, LeavesNothing

T = TypeVar("T")


@dataclass(frozen=True)
class Do(LeavesNothing, EngineCommand[T]):
    """Returns what ``action`` gives. It can be pickled as its action can."""

    action: Callable[[Any], T]

    def __call__(self, loop: Any) -> T:
        return self.action(loop)
