"""The bridge between an event loop and the engine thread.

One thread loads, steps and frees every model, because MLX's state is per thread. Requests and
control go in by one method; a step's events come back in one ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.admission import Admission
from mlx_parallm.engine.changes import LoadModel, UnloadModel
from mlx_parallm.engine.commands import Abort, Call, EngineCommand, Stop
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.control_metrics import ControlMetrics
from mlx_parallm.engine.directory import ModelDirectory
from mlx_parallm.engine.kind import Kind, ModelLoad, StartedModel
from mlx_parallm.engine.ledger import Ledger
from mlx_parallm.engine.life import END_TIMEOUT_S, EngineLife
from mlx_parallm.engine.loader import ModelLoader
from mlx_parallm.engine.mailbox import Mailbox, OpenStreams
from mlx_parallm.engine.models import EngineState, ModelMemory, QueueLoad
from mlx_parallm.engine.residency import Residency
from mlx_parallm.engine.status import (
    CheckRoom,
    EngineLoad,
    EngineReport,
    ModelStatus,
    ReadCacheBytes,
    Readiness,
    ReadLoads,
    ReadMemoryLimit,
    ReadMetrics,
    ReadRunningAdapters,
    StateQuery,
)
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.types.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    ParallmError,
    RequestAbortedError,
    RequestLostError,
    ShuttingDownError,
)
from mlx_parallm.types.work import Event, EventReader

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineCore:
    """Serves every model of a configuration to one event loop, whatever the models do.

    Attributes:
        config: the settings it was built from.
        mailbox: the messages between the event loop and the engine thread.
        control: the commands of an operator.
        directory: the models that requests may name.
        died: set while no thread serves: after a death, until a restarted thread has loaded.
        ended: set when the thread has died and will not be started anew.
    """

    def __init__(
        self,
        config: EngineConfig,
        kinds: Sequence[Kind],
        life: EngineLife,
        *,
        owns_process: bool = False,
    ) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            config: what to load.
            kinds: what models there may be.
            life: where the engines live: on a thread, or in another process.
            owns_process: this process is the server's, so that each load may set up its garbage
                collection; see ``spare_garbage_collection``.
        """
        self.config = config
        self._life = life
        self._owns_process = owns_process
        self._registry = CollectorRegistry()
        self.mailbox = Mailbox(life.put)
        self._streams = OpenStreams()
        self._thread: threading.Thread | None = None
        self._loaded = threading.Event()
        self._cause: BaseException | None = None
        self._draining = False
        self._is_stopping = False
        limits = {kind.traits.name: kind.memory_limit(config) for kind in kinds}
        ledger = Ledger({name: limit for name, limit in limits.items() if limit is not None})
        metrics = ControlMetrics(self._registry, config.scheduler.max_loras)
        self.control = EngineControl(self, config.adapters, metrics)
        self._residency = Residency(
            ModelLoader(self, config, kinds),
            ledger,
            config.loading,
            read_limit=lambda: self._query(ReadMemoryLimit(), None),
            is_needed=self.control.is_needed,
        )
        self.directory = ModelDirectory(config, self._residency, self.control)
        self.control.on_changed = self.directory.note_changed
        self.control.models = self.directory
        self.directory.scan()
        self._admission = Admission(
            self.mailbox, self._streams, self.directory, self.control, check_open=self.check_open
        )
        self.died = threading.Event()
        self.ended = threading.Event()

    def start(self) -> None:
        """Start the thread and wait until every model is loaded.

        Raises:
            ModelLoadError, ConfigError: what the load raised.
            EngineDeadError: the engine's process ended.
        """
        self._loaded.clear()
        self.died.clear()
        self._is_stopping = False
        thread = self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        thread.start()
        self.wait_until_loaded()
        if self._cause is not None:
            # The process would abort if the thread were still freeing its streams.
            thread.join()
            raise self._cause

    def wait_until_loaded(self) -> None:
        """Block until the thread's models are loaded, or their load has failed."""
        self._loaded.wait()

    def stop(self) -> None:
        """End the thread after the step in flight and free the models.

        An engine in another process is killed if it does not end; see ``stop_within``.
        """
        self._is_stopping = True
        self.stop_within(END_TIMEOUT_S)
        self.mailbox.stop_pacing()
        self.mailbox.send(Stop())
        thread, self._thread = self._thread, None
        # An interrupt, or a limit of threads, may have kept it from starting.
        if thread is not None and thread.ident is not None:
            thread.join()

    def stop_within(self, timeout_s: float) -> None:
        """See ``EngineLife.stop_within``; ``stop`` must be called too."""
        self._life.stop_within(timeout_s)

    async def drain(self, timeout_s: float, why: str = "The server is shutting down.") -> None:
        """Admit nothing more; let running requests finish for ``timeout_s``, then abort them."""
        self._draining = True
        error = RequestAbortedError(why)
        try:
            async with asyncio.timeout(timeout_s):
                await self._finish()
        except TimeoutError:
            # An engine that hangs replies to nobody.
            self.mailbox.fail(error)
        for request_id in self._streams.ids():
            self.mailbox.send(Abort(request_id=request_id))
        self._streams.end_all(error)

    async def _finish(self) -> None:
        """Return once all requests have ended, or none can."""
        if self.control.is_paused:
            # An engine that is dead or asleep ends no requests, so there is nothing to wait for.
            with contextlib.suppress(EngineDeadError, InvalidRequestError):
                await self.control.resume_here()
        if not self.control.is_paused:
            await self._streams.idle.wait()

    def statuses(self) -> Sequence[ModelStatus]:
        """See ``ModelDirectory``."""
        return self.directory.statuses()

    def status_of(self, name: str) -> ModelStatus | None:
        """See ``ServedModels``."""
        return self.directory.status_of(name)

    def model_names(self) -> Collection[str]:
        """See ``ServedModels``."""
        return self.directory.model_names()

    def find(self, name: str) -> ModelStatus | None:
        """Return the model or adapter of this name; None if there is none."""
        return self.directory.find(name)

    def not_found(self, name: str) -> ModelNotFoundError:
        """Return the error for a name that nothing has; it lists what is served."""
        return self.control.names.not_found(name)

    def set_ttl(self, name: str, ttl_s: float | None) -> None:
        """See ``RequestDoor``."""
        self.directory.set_ttl(name, ttl_s)

    def hold(self, model: str) -> AbstractAsyncContextManager[None]:
        """Have a model in memory while the block runs; see ``ModelDirectory``."""
        return self.directory.hold(model)

    async def wait(self, name: str, client: str = "") -> None:
        """Return once a model or adapter is loaded; see ``ModelDirectory``."""
        await self.directory.wait(name, client)

    async def load_model(self, load: ModelLoad) -> ModelStatus:
        """Serve one more model; return once it is loaded; see ``ModelDirectory.load``."""
        self.check_open()
        return await self.control.changes.apply(LoadModel(load))

    async def unload_model(self, name: str) -> ModelStatus:
        """Free a model's memory once its requests have ended; see ``ModelDirectory.unload``."""
        return await self.control.changes.apply(UnloadModel(name))

    async def check_queue(self, model: str, client: str, n: int) -> None:
        """Refuse early what a queue has no room for; ``open_reader`` decides.

        Raises:
            OverloadedError: the queue had no room for them a moment ago.
        """
        self.check_health()
        limit = self.config.scheduler.max_waiting
        # A queue is never longer than the open samples, so the engine, which may be in another
        # process, is seldom asked.
        if limit and self._streams.num_samples + n > limit:
            await self._life.query(CheckRoom(model, client, n))

    async def open_reader(
        self, request: Any, reader: EventReader | None = None, *, is_beside: bool = False
    ) -> Any:
        """Admit a request of any kind of model; see ``Admission.open``."""
        return await self._admission.open(request, reader, is_beside=is_beside)

    async def abort(self, request_id: str) -> None:
        """End a request between two steps and free its blocks; unknown ids are ignored."""
        self._admission.abort(request_id)

    async def cancel(self, request_id: str) -> None:
        """End a request between two steps and notify its reader; unknown ids are ignored."""
        if request_id in self._streams:
            self.mailbox.send(Abort(request_id=request_id, is_notified=True))

    def ask(self, question: Callable[[EngineState], Any], key: Hashable = None) -> Future[Any]:
        """Ask any of the engines that serve; see ``Ask``.

        Raises:
            EngineDeadError: no engines are there.
        """
        return self._life.ask(question, key=key)

    def ask_each(self, question: Callable[[EngineState], Any]) -> Sequence[Future[Any]]:
        """Ask every engine that serves; see ``ask``."""
        return self._life.ask_each(question)

    async def refresh(self) -> None:
        """Bring the names of adapters up to date."""
        await self.control.refresh()

    async def call(self, action: EngineCommand[T]) -> T:
        """Carry out a command between two steps; return its result, or raise its error."""
        self.check_health()
        result: Any = await self.mailbox.ask(lambda reply: Call(action=action, reply=reply))
        if isinstance(result, ParallmError):
            raise result
        return result

    def send(self, action: EngineCommand[Any]) -> None:
        """Have a command carried out between two steps, without waiting for it."""
        self.mailbox.send(Call(action=action, reply=lambda _: None))

    async def cancel_all(self) -> int:
        """End every request with the tokens that it has; return how many there were."""
        request_ids = self._streams.ids()
        for request_id in request_ids:
            await self.cancel(request_id)
        return len(request_ids)

    async def wait_until_idle(self) -> None:
        """Return once no request is open."""
        await self._streams.idle.wait()

    def open_requests(self) -> Sequence[Any]:
        """Return the requests that were admitted and have not ended."""
        return self._streams.requests()

    async def load(self) -> EngineLoad:
        """Return how busy the engine is, over all models."""
        loads = [report.load for report in await self.engines()]
        return EngineLoad(
            num_requests=len(self._streams),
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
        )

    async def engines(self) -> Sequence[EngineReport]:
        """Return how busy each engine is, and whether it gets requests."""
        unknown: Sequence[QueueLoad | None] = [None] * len(self.readiness())
        loads = await self._query(ReadLoads(), unknown)
        rows = zip(self.readiness(), self.steps_s(), loads, strict=True)
        return [
            EngineReport(
                rank=rank,
                readiness=Readiness.SILENT if each is Readiness.READY and load is None else each,
                load=load or QueueLoad(),
                step_s=step_s,
            )
            for rank, (each, step_s, load) in enumerate(rows)
        ]

    def readiness(self) -> Sequence[Readiness]:
        """Return whether each engine gets requests."""
        known = self._life.readiness()
        return [Readiness.STARTING] * len(known) if self.died.is_set() else known

    def steps_s(self) -> Sequence[float]:
        """Return for how long the step in flight of each engine has run; see ``EngineLife``."""
        return self._life.steps_s()

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine thread is dead."""
        if self.died.is_set():
            raise EngineDeadError("The engine thread died.") from self._cause

    def check_open(self) -> None:
        """Raise ShuttingDownError or EngineDeadError if nothing is admitted any more."""
        self.check_health()
        if self._draining:
            raise ShuttingDownError("The server is shutting down.")

    async def memory(self) -> Mapping[str, ModelMemory]:
        """Return the memory of each model at all engines, by its first name."""
        kept: Mapping[str, int] = {}
        cache_bytes = await self._query(ReadCacheBytes(), kept)
        return self.directory.memory(cache_bytes, len(self._life.readiness()))

    async def render_metrics(self) -> tuple[bytes, str]:
        """Return the Prometheus exposition and its content type."""
        # One engine that hangs delays all of them by the same seconds.
        engines, memory, reports, running = await asyncio.gather(
            *(self._query(ReadMetrics(), b""), self.memory(), self.engines()),
            self._query(ReadRunningAdapters(), frozenset[str]()),
        )
        self.control.report(memory, reports, running)
        return engines + generate_latest(self._registry), CONTENT_TYPE_LATEST

    async def _query(self, ask: StateQuery[T], otherwise: T) -> T:
        """Return the answer of the engines, or ``otherwise`` if they are dead."""
        try:
            return await self._life.query(ask)
        except EngineDeadError:
            return otherwise

    def _run(self) -> None:
        """Load and serve, on the thread; again after a death if the server restarts engines."""
        while self._live() and not self._is_stopping:
            if self._owns_process:
                # The engines of that life are garbage now.
                gc.unfreeze()
        self._life.end()

    def _live(self) -> bool:
        """Run one life of the engines, from load to stop or death; True if another follows."""
        try:
            self._life.run(self._deliver, self._on_loaded)
        except BaseException as cause:  # noqa: BLE001 - every caller must be notified
            if self._on_death(cause):
                return True
            self.ended.set()
        return False

    def _on_loaded(self, loaded: Sequence[StartedModel]) -> None:
        if self._owns_process:
            spare_garbage_collection()
        if self.died.is_set():
            # Requests are served: the models and their memory belong to the event loop.
            self.mailbox.post(self._serve, loaded)
        else:
            self._serve(loaded)

    def _serve(self, loaded: Sequence[StartedModel]) -> None:
        """Admit requests to models that have just been loaded."""
        self.control.forget()
        self._residency.replace(loaded)
        self._cause = None
        self.died.clear()
        self._loaded.set()

    def _on_death(self, cause: BaseException) -> bool:
        """Record the cause and end every open request; True if the engines start anew."""
        self._cause = cause
        if not self._loaded.is_set():
            self._loaded.set()
            return False
        logger.critical("the engine thread died", exc_info=cause)
        self._loaded.clear()
        self.died.set()
        self._life.clear()
        self.mailbox.post(self._fail_everything)
        return self.config.restart_on_failure

    def _deliver(self, events: Sequence[Event]) -> None:
        self.mailbox.deliver(self._dispatch, events)

    def _dispatch(self, events: Sequence[Event]) -> None:
        for request_id in self._streams.dispatch(events):
            self.mailbox.send(Abort(request_id=request_id))

    def _fail_everything(self) -> None:
        error = RequestLostError("The engine thread died.")
        error.__cause__ = self._cause
        self._streams.end_all(error)
        self.mailbox.fail(error)
