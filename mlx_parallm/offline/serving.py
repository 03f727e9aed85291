"""Runs coroutines of the routes beside an engine that belongs to the caller's thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mlx_parallm.engine.commands import Command, Stop, Submit
from mlx_parallm.engine.interface import ServedEngine
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.pooling.client import check_tasks
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.build import LoadedPooling
from mlx_parallm.serving.interface import PoolingCalls
from mlx_parallm.types.errors import ParallmError, RequestAbortedError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.pooling import PoolingEvent, PoolingResults, PoolRequest, Task

T = TypeVar("T")


class ThreadReader:
    """Hands the answer to one request to another thread. Implements ``EventReader``.

    Attributes:
        request: whose answer this is.
        answer: done once it is there.
    """

    num_samples = 0
    is_overfull = False

    def __init__(self, request: PoolRequest) -> None:
        self.request = request
        self.answer: Future[PoolingResults] = Future()

    @property
    def is_complete(self) -> bool:
        """See ``EventReader``."""
        return self.answer.done()

    def put(self, event: PoolingEvent | ErrorEvent) -> None:
        """See ``EventReader``."""
        match event:
            case ErrorEvent():
                self.fail(event.error)
            case PoolingEvent():
                if not self.answer.done():
                    self.answer.set_result(event.results)

    def fail(self, error: ParallmError) -> None:
        """See ``EventReader``."""
        if not self.answer.done():
            self.answer.set_exception(error)


class OfflineClient:
    """One model, seen from the thread of the coroutines. Implements ``PoolingCalls``."""

    def __init__(self, model: PoolingModel, inbox: queue.SimpleQueue[Command]) -> None:
        self._model = model
        self._inbox = inbox
        self._readers: list[ThreadReader] = []

    def models(self) -> Sequence[PoolingModel]:
        """See ``PoolingCalls``."""
        return [self._model]

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """See ``PoolingCalls``."""
        return check_tasks(self._model, name or self._model.names[0], tasks)

    async def encode(self, request: PoolRequest) -> PoolingResults:
        """See ``PoolingCalls``."""
        reader = ThreadReader(request)
        self._readers.append(reader)

        def reply(refusal: ParallmError | None) -> None:
            if refusal is not None:
                reader.fail(refusal)

        arrival_s = time.monotonic()
        self._inbox.put(Submit(request=request, arrival_s=arrival_s, reader=reader, reply=reply))
        return await asyncio.wrap_future(reader.answer)

    def end(self) -> list[str]:
        """Fail the requests that have no answer; return their ids."""
        unanswered = [reader for reader in self._readers if not reader.is_complete]
        for reader in unanswered:
            reader.fail(RequestAbortedError("The call was interrupted."))
        return [reader.request.request_id for reader in unanswered]


def serve(loaded: LoadedPooling, work: Callable[[PoolingCalls], Coroutine[Any, Any, T]]) -> T:
    """Return what a coroutine gives that sends requests to a model.

    The coroutine has a thread and an event loop of its own, so that the caller may have one too.
    The engine takes its requests on this thread, which loaded it, until the coroutine ends.
    """
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    client = OfflineClient(loaded.model, inbox)
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
    try:
        EngineLoop(engines, inbox, _drop, families=MetricFamilies(), worker=loaded.worker).run()
    finally:
        for request_id in client.end():
            loaded.engine.abort(request_id)
        thread.join()
    return result.result()


def _drop(events: Sequence[Any]) -> None:
    """Drop events whose request has no reader any more."""
    del events
