"""A life of the engines: from their load to ``Stop``, or to their death."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mlx_parallm.engine.commands import Command
from mlx_parallm.engine.kind import StartedModel
from mlx_parallm.engine.models import EngineState
from mlx_parallm.engine.status import Readiness, StateQuery
from mlx_parallm.types.work import Event

T = TypeVar("T")

# QUERY_TIMEOUT_S: most seconds that a query waits for an engine, which hangs if it takes longer.
QUERY_TIMEOUT_S = 5.0
# END_TIMEOUT_S: seconds that engines get to end after a stop was requested.
END_TIMEOUT_S = 15.0

Deliver = Callable[[Sequence[Event]], None]
OnLoaded = Callable[[Sequence[StartedModel]], None]


class EngineLife(Protocol):
    """Where the engines live: on a thread of this process, or in another."""

    def put(self, command: Command) -> None:
        """Take a command, after those that it was given before; any thread may call it."""
        ...

    def clear(self) -> None:
        """Drop the commands that a life which has ended has not carried out."""
        ...

    def run(self, deliver: Deliver, on_loaded: OnLoaded) -> None:
        """Load, and carry out commands until ``Stop``; one life after the other, on one thread.

        Raises:
            ModelLoadError, ConfigError: of the load.
            BaseException: what the engines died of.
        """
        ...

    async def query(self, ask: StateQuery[T]) -> T:
        """Answer a query about the engines' state, without waiting for a step; ``ask`` must pickle.

        Raises:
            EngineDeadError: no engines are there.
            EngineSilentError: none has answered within ``QUERY_TIMEOUT_S``.
            ParallmError: what ``ask`` raises.
        """
        ...

    def ask(self, question: Callable[[EngineState], Any], /, key: Hashable = None) -> Future[Any]:
        """Ask any of the engines something from any thread; see ``Ask``.

        Raises:
            EngineDeadError: no engines are there.
        """
        ...

    def ask_each(self, question: Callable[[EngineState], Any], /) -> Sequence[Future[Any]]:
        """Ask every engine that lives; otherwise as ``ask``."""
        return [self.ask(question)]

    def readiness(self) -> Sequence[Readiness]:
        """Return whether each engine gets requests; any thread may ask."""
        ...

    def steps_s(self) -> Sequence[float]:
        """Return for how long the step in flight of each engine has run, in seconds.

        It is 0.0 for an engine without one. Any thread may ask.
        """
        ...

    def stop_within(self, timeout_s: float) -> None:
        """End what ``Stop`` does not: let ``run`` fail if it loads, and kill an engine that hangs.

        Only processes can be killed. They are if they have not ended within the timeout; the
        shortest counts if this is called several times. Any thread may call it.
        """
        ...

    def end(self) -> None:
        """Free what belongs to the thread of ``run``, which calls this before it ends."""
        ...
