"""A life of the engines: from their load to ``Stop``, or to their death."""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.commands import Command
from mlx_parallm.engine.interface import BuiltModel, Event, StartedModel, TellProgress
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.state import EngineState, StateQuery
from mlx_parallm.types.errors import EngineDeadError
from mlx_parallm.worker.device.properties import end_thread
from mlx_parallm.worker.worker import Worker

T = TypeVar("T")

# NEW_OBJECTS: new objects that trigger a collection; a step of 128 rows makes some 800.
NEW_OBJECTS = 10_000

#: Loads every model of a configuration on the calling thread.
Build = Callable[[EngineConfig, MetricFamilies, Worker, TellProgress], Sequence[BuiltModel]]
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

    def give_up_load(self) -> None:
        """Let ``run`` fail if it is loading, and that can be interrupted."""
        ...

    def end(self) -> None:
        """Free what belongs to the thread of ``run``, which calls this before it ends."""
        ...


class LocalLife:
    """Engines on the thread that runs this, whose metrics go on from life to life."""

    def __init__(self, config: EngineConfig, on_progress: TellProgress, build: Build) -> None:
        self._config = config
        self._on_progress = on_progress
        self._build = build
        self._families = MetricFamilies()
        self._state: EngineState | None = None

    def run(
        self,
        inbox: queue.SimpleQueue[Command],
        deliver: Deliver,
        on_loaded: OnLoaded,
    ) -> None:
        """See ``EngineLife.run``."""
        gc.unfreeze()
        worker = Worker()
        built = self._build(self._config, self._families, worker, self._on_progress)
        spare_garbage_collection()
        engines = {each.model.names[0]: each.engine for each in built if each.engine is not None}
        self._state = EngineState(self._families, engines)
        on_loaded(
            [StartedModel(each.config, each.model, each.engine is not None) for each in built]
        )
        stall_ms = self._config.scheduler.max_decode_stall_ms
        EngineLoop(
            engines,
            inbox,
            deliver,
            families=self._families,
            worker=worker,
            max_stall_s=None if stall_ms is None else stall_ms / 1e3,
        ).run()

    async def query(self, ask: StateQuery[T]) -> T:
        """See ``EngineLife.query``."""
        return self.ask_now(ask)

    def ask(self, question: Callable[[EngineState], Any], key: Hashable = None) -> Future[Any]:
        """See ``EngineLife.ask``."""
        del key
        answer: Any = self.ask_now(question)
        if isinstance(answer, Future):
            return cast("Future[Any]", answer)
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    def ask_now(self, ask: Callable[[EngineState], T]) -> T:
        """``query`` from any thread."""
        if self._state is None:
            raise EngineDeadError("No engine is loaded.")
        return ask(self._state)

    def give_up_load(self) -> None:
        """See ``EngineLife.give_up_load``; nothing interrupts this thread."""

    def end(self) -> None:
        """See ``EngineLife.end``."""
        end_thread()


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
