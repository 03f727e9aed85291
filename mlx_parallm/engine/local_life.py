"""Engines on a thread of this process, which therefore has MLX."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, TypeVar, cast

from typing_extensions import override

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.build import memory_limit
from mlx_parallm.engine.commands import Command, Wake
from mlx_parallm.engine.kind import BuiltModel, StartedModel, TellProgress
from mlx_parallm.engine.life import Deliver, EngineLife, OnLoaded
from mlx_parallm.engine.loop import EngineLoop, StepClock
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.models import EngineState, MakeBeside, ServedEngine, WorkBeside
from mlx_parallm.engine.status import Readiness, StateQuery
from mlx_parallm.types.errors import EngineDeadError
from mlx_parallm.worker.device.cpu_process import compute_in_batches
from mlx_parallm.worker.device.properties import end_thread
from mlx_parallm.worker.worker import Worker

T = TypeVar("T")

#: Loads every model of a configuration on the calling thread.
Build = Callable[[EngineConfig, MetricFamilies, Worker, TellProgress], Sequence[BuiltModel]]


#: Opens the worker of a life; its block is left when the life ends.
OpenWorker = Callable[[EngineConfig, MetricFamilies], AbstractContextManager[Worker]]


def own_worker(_config: EngineConfig, _families: MetricFamilies) -> AbstractContextManager[Worker]:
    """Return a worker of this process alone; see ``OpenWorker``."""
    return nullcontext(Worker())


def nothing_beside(_worker: Worker, _families: MetricFamilies) -> Sequence[WorkBeside]:
    """Return no work; see ``MakeBeside``."""
    return ()


class LocalLife(EngineLife):
    """Implements ``EngineLife`` on the thread that runs it; metrics go on from life to life."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: TellProgress,
        build: Build,
        beside: MakeBeside = nothing_beside,
        open_worker: OpenWorker = own_worker,
    ) -> None:
        self._config = config
        self._open_worker = open_worker
        self._on_progress = on_progress
        self._build = build
        self._beside = beside
        self._families = MetricFamilies()
        self._clock = StepClock()
        self._state: EngineState | None = None
        self._inbox: queue.SimpleQueue[Command | Wake] = queue.SimpleQueue()
        # The thread that loads, by its number.
        self._loading: int | None = None

    @override
    def put(self, command: Command) -> None:
        self._inbox.put(command)

    @override
    def clear(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()

    @override
    def run(self, deliver: Deliver, on_loaded: OnLoaded) -> None:
        compute_in_batches()
        with self._open_worker(self._config, self._families) as worker:
            self._serve(worker, deliver, on_loaded)

    def _serve(self, worker: Worker, deliver: Deliver, on_loaded: OnLoaded) -> None:
        # The worker is closed while there are still references to models and steps.
        with closing(worker):
            built = self._load(worker)
            engines = {
                each.model.names[0]: each.engine for each in built if each.engine is not None
            }
            for engine in engines.values():
                if engine.live is not None:
                    engine.live.begin_hashing()
            self._state = EngineState(
                self._families, engines, memory_limit(self._config, built, worker)
            )
            on_loaded(
                [StartedModel(each.config, each.model, each.engine is not None) for each in built]
            )
            loop = self._loop(engines, worker, deliver)
            try:
                loop.run()
            finally:
                # Models were loaded and unloaded meanwhile.
                for engine in engines.values():
                    if engine.live is not None:
                        engine.live.end_hashing()
                    engine.close()
        # The models' memory is free once this returns.
        self._state = None

    def _load(self, worker: Worker) -> Sequence[BuiltModel]:
        self._loading = threading.get_ident()
        try:
            return self._build(self._config, self._families, worker, self._on_progress)
        finally:
            self._loading = None

    def _loop(
        self, engines: dict[str, ServedEngine], worker: Worker, deliver: Deliver
    ) -> EngineLoop:
        stall_ms = self._config.scheduler.max_decode_stall_ms
        return EngineLoop(
            engines,
            self._inbox,
            deliver,
            families=self._families,
            worker=worker,
            beside=self._beside(worker, self._families),
            max_stall_s=stall_ms / 1e3 if stall_ms else None,
            clock=self._clock,
        )

    @override
    async def query(self, ask: StateQuery[T]) -> T:
        return self.ask_now(ask)

    @override
    def ask(self, question: Callable[[EngineState], Any], key: Hashable = None) -> Future[Any]:
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

    @override
    def readiness(self) -> Sequence[Readiness]:
        return [Readiness.STARTING if self._state is None else Readiness.READY]

    @override
    def steps_s(self) -> Sequence[float]:
        return [self._clock.running_s()]

    @override
    def stop_within(self, timeout_s: float) -> None:
        """Interrupt a load, as Ctrl-C does on the main thread; a step is not interrupted."""
        del timeout_s
        if (thread := self._loading) is not None:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), interrupt)

    @override
    def end(self) -> None:
        end_thread()
