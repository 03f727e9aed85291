"""Runs coroutines of the routes beside an engine that belongs to the caller's thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeVar

from mlx_parallm.engine.commands import Command, Stop, Submit
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.models import ServedEngine
from mlx_parallm.engine.policies import AdapterInfo, NamedAdapter
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.client import check_tasks
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.build import LoadedGenerator, LoadedPooling, training_beside
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.types.errors import ModelNotFoundError, ParallmError, RequestAbortedError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.pooling import PoolingResults, PoolRequest, Task

T = TypeVar("T")


class ThreadReader(Generic[T]):
    """Hands the answer to one request to another thread. Implements ``EventReader``.

    Attributes:
        request: whose answer this is.
        answer: done once it is there.
    """

    num_samples = 0
    is_overfull = False

    def __init__(self, request: PoolRequest | TrainingRequest) -> None:
        self.request = request
        self.answer: Future[T] = Future()

    @property
    def is_complete(self) -> bool:
        """See ``EventReader``."""
        return self.answer.done()

    def put(self, event: Any) -> None:
        """See ``EventReader``."""
        match event:
            case ErrorEvent():
                self.fail(event.error)
            case _:
                if not self.answer.done():
                    self.answer.set_result(event.results)

    def fail(self, error: ParallmError) -> None:
        """See ``EventReader``."""
        if not self.answer.done():
            self.answer.set_exception(error)


class OfflineClient:
    """One model, seen from the thread of the coroutines. Implements ``PoolingCalls``.

    That is, if it is a pooling model.
    """

    def __init__(
        self,
        model: PoolingModel | GenerationModel,
        adapters: Sequence[AdapterInfo],
        inbox: queue.SimpleQueue[Command],
    ) -> None:
        self._model = model
        self._adapters = {info.name: info for info in adapters}
        self._inbox = inbox
        # Those that have no answer yet.
        self._readers: set[ThreadReader[Any]] = set()

    def models(self) -> Sequence[PoolingModel]:
        """See ``PoolingCalls``."""
        return [self._pooling]

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """See ``PoolingCalls``."""
        model, base = self._pooling, self._model.names[0]
        if name is None or name in self._model.names:
            return check_tasks(model, base, tasks)
        info = self._adapters.get(name)
        named = None if info is None else model.with_adapter(NamedAdapter(name, base, None, info))
        if named is None:
            raise ModelNotFoundError(name, [base])
        return check_tasks(named, name, tasks)

    @property
    def _pooling(self) -> PoolingModel:
        assert isinstance(self._model, PoolingModel), "it is a pooling model"
        return self._model

    async def encode(self, request: PoolRequest) -> PoolingResults:
        """See ``PoolingCalls``."""
        if request.model in self._adapters:
            request = replace(request, model=self._model.names[0], adapter=request.model)
        return await self._answer(ThreadReader[PoolingResults](request))

    async def train(self, request: TrainingRequest) -> tuple[Any, ...]:
        """See ``Train``."""
        return await self._answer(ThreadReader[tuple[Any, ...]](request))

    async def _answer(self, reader: ThreadReader[T]) -> T:
        """Submit the request of a reader; return its answer."""
        self._readers.add(reader)

        def reply(refusal: ParallmError | None) -> None:
            if refusal is not None:
                reader.fail(refusal)

        arrival_s = time.monotonic()
        request: Any = reader.request
        self._inbox.put(Submit(request=request, arrival_s=arrival_s, reader=reader, reply=reply))
        try:
            return await asyncio.wrap_future(reader.answer)
        finally:
            self._readers.discard(reader)

    def end(self) -> list[str]:
        """Fail the requests that have no answer; return their ids."""
        unanswered = [reader for reader in list(self._readers) if not reader.is_complete]
        for reader in unanswered:
            reader.fail(RequestAbortedError("The call was interrupted."))
        return [reader.request.request_id for reader in unanswered]


def serve(
    loaded: LoadedPooling | LoadedGenerator,
    work: Callable[[OfflineClient], Coroutine[Any, Any, T]],
) -> T:
    """Return what a coroutine gives that sends requests to a model.

    The coroutine has a thread and an event loop of its own, so that the caller may have one too.
    The engine takes its requests on this thread, which loaded it, until the coroutine ends.
    """
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    client = OfflineClient(loaded.model, loaded.engine.policies.infos(), inbox)
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(work(client)))
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            result.set_exception(error)
        finally:
            inbox.put(Stop())

    thread = threading.Thread(target=run, name="texts", daemon=True)
    thread.start()
    engines: dict[str, ServedEngine] = {loaded.model.names[0]: loaded.engine}
    families, worker = MetricFamilies(), loaded.worker
    beside = training_beside(worker, families)
    loop = EngineLoop(engines, inbox, _drop, families=families, worker=worker, beside=beside)
    try:
        loop.run()
    finally:
        for request_id in client.end():
            loaded.engine.abort(request_id)
        thread.join()
    return result.result()


def _drop(events: Sequence[Any]) -> None:
    """Drop events whose request has no reader any more."""
    del events
