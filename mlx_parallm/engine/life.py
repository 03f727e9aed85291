"""A life of the engines: from their load to ``Stop``, or to their death."""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mlx_parallm.engine.commands import Command
from mlx_parallm.engine.interface import Event, Readiness, StartedModel
from mlx_parallm.engine.state import EngineState, StateQuery

T = TypeVar("T")

Deliver = Callable[[Sequence[Event]], None]
OnLoaded = Callable[[Sequence[StartedModel]], None]


class EngineLife(Protocol):
    """Where the engines live: on a thread of this process, or in another."""

    def run(
        self,
        inbox: queue.SimpleQueue[Command],
        deliver: Deliver,
        on_loaded: OnLoaded,
    ) -> None:
        """Load, and carry out commands until ``Stop``; one life after the other, on one thread.

        Raises:
            ModelLoadError, ConfigError: of the load.
            BaseException: what the engines died of.
        """
        ...

    async def query(self, ask: StateQuery[T]) -> T:
        """Return what the engines' state tells, without waiting for a step; ``ask`` can be pickled.

        Raises:
            EngineDeadError: no engines are there.
            ParallmError: what ``ask`` raises.
        """
        ...

    def ask(self, question: Callable[[EngineState], Any], /, key: Hashable = None) -> Future[Any]:
        """Ask any of the engines something from any thread; see ``Ask``.

        Raises:
            EngineDeadError: no engines are there.
        """
        ...

    def readiness(self) -> Sequence[Readiness]:
        """Return whether each engine gets requests; any thread may ask."""
        ...

    def give_up_load(self) -> None:
        """Let ``run`` fail if it is loading, and that can be interrupted."""
        ...

    def end(self) -> None:
        """Free what belongs to the thread of ``run``, which calls this before it ends."""
        ...
