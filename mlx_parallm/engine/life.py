"""A life of the engines: from their load to ``Stop``, or to their death."""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mlx_parallm.engine.commands import Command
from mlx_parallm.engine.interface import Event, Readiness, StartedModel
from mlx_parallm.engine.state import EngineState, StateQuery

T = TypeVar("T")

# NEW_OBJECTS: new objects that trigger a collection; a step of 128 rows makes some 800.
NEW_OBJECTS = 10_000

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


def spare_garbage_collection() -> None:
    """Make garbage collection rare: steps and answers leave little garbage in cycles.

    The objects that exist now are excluded, because scanning them would stop every stream.
    """
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    # A caller may have set a higher threshold already, or disabled collection.
    if 0 < first < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *others)
