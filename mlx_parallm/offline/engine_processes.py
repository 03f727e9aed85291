"""The engines of ``LLM`` in several processes, which share out its requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from mlx_parallm.config import EngineConfig, ServerConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.generation.model import GenerationModel, RequestHandle
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.interface import PoolingCalls
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.serving.parallel_engines import parallel_life
from mlx_parallm.training.service import Train
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.pooling import PoolingResults, PoolRequest, Task
from mlx_parallm.types.request import GenerateRequest

T = TypeVar("T")

#: ``Events``: the events of a call's requests; None where a request has ended.
Events = queue.SimpleQueue[GenerateEvent | None]


class EngineProcesses:
    """Implements ``OfflineEngines``; it may be used on any thread."""

    def __init__(self, config: EngineConfig, size: int, devices: Sequence[str]) -> None:
        """Start ``size`` engines, and load the model in each; ``devices`` are their GPUs.

        Raises:
            ConfigError: this machine or process cannot have so many engines.
            ModelLoadError: the model cannot be loaded.
        """
        self._size = size
        # Engines log what a program without a logging configuration shows: warnings.
        settings = ServerConfig(
            data_parallel_size=size, data_parallel_devices=tuple(devices), log_level="warning"
        )
        life = parallel_life(config, settings, ignore_progress)
        self._engine = AsyncEngine(config, life=life)
        with _garbage_collection_kept():
            try:
                self._engine.start()
            except BaseException:
                self._engine.stop()
                raise
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop_anywhere, self._engine, self._loop, thread)
        self._thread = thread

    @property
    def model(self) -> GenerationModel | PoolingModel:
        """See ``OfflineEngines``."""
        (status,) = self._engine.statuses()
        return cast("GenerationModel | PoolingModel", status.model)

    def events(self, requests: Sequence[GenerateRequest]) -> Generator[GenerateEvent]:
        """See ``OfflineEngines``."""
        events: Events = queue.SimpleQueue()
        readers: list[asyncio.Task[None]] = []
        try:
            self._run(self._admit(requests, events, readers))
            num_open = len(requests)
            while num_open:
                event = events.get()
                if event is None:
                    num_open -= 1
                else:
                    yield event
        finally:
            # Requests remain only after an error or an interrupt.
            self._run(self._abort(requests, readers))

    def serve(self, work: Callable[[PoolingCalls], Coroutine[Any, Any, T]]) -> T:
        """See ``OfflineEngines``."""
        return self._run(work(DividedPooling(self._engine.pooling, self._size)))

    def train(self, work: Callable[[Train], Coroutine[Any, Any, T]]) -> T:
        """See ``OfflineEngines``; a session lives on one engine."""
        return self._run(work(self._engine.train))

    def adapters(self) -> Sequence[AdapterInfo]:
        """See ``OfflineEngines``."""
        return self._engine.control.adapters()

    def load_adapter(self, upload: AdapterUpload) -> AdapterInfo:
        """See ``OfflineEngines``."""
        return self._run(self._engine.control.load_adapter(upload))

    def unload_adapter(self, name: str) -> None:
        """See ``OfflineEngines``."""
        self._run(self._engine.control.unload_adapter(name))

    def sleep(self, level: int) -> None:
        """See ``OfflineEngines``; no request is in flight."""
        self._run(self._engine.control.sleep(level, PauseMode.ABORT))

    def wake_up(self, tags: Sequence[str]) -> Sequence[str]:
        """See ``OfflineEngines``."""
        return self._run(self._engine.control.wake_up(tags))

    def close(self) -> None:
        """See ``OfflineEngines``; the processes have ended when it returns."""
        if self._stop.detach() is not None:
            _stop(self._engine, self._loop, self._thread)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine gives on the thread of the event loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of the caller ends the coroutine too.
            future.cancel()
            raise

    async def _admit(
        self,
        requests: Sequence[GenerateRequest],
        events: Events,
        readers: list[asyncio.Task[None]],
    ) -> None:
        """Submit requests, and begin to read their events; raise the first refusal."""
        for request in requests:
            self._engine.get_model(request.model).check(request)

        async def admit(request: GenerateRequest) -> None:
            handle = await self._engine.submit(request)
            readers.append(asyncio.create_task(_forward(handle, events)))

        results = await asyncio.gather(*map(admit, requests), return_exceptions=True)
        for refusal in results:
            if refusal is not None:
                raise refusal

    async def _abort(
        self, requests: Sequence[GenerateRequest], readers: Sequence[asyncio.Task[None]]
    ) -> None:
        """End what has not ended."""
        for reader in readers:
            reader.cancel()
        for request in requests:
            await self._engine.abort(request.request_id)


class DividedPooling:
    """Computes parts of each request in all engines at once. Implements ``PoolingCalls``."""

    def __init__(self, client: PoolingCalls, num_parts: int) -> None:
        self._client = client
        self._num_parts = num_parts

    def models(self) -> Sequence[PoolingModel]:
        """See ``PoolingCalls``."""
        return self._client.models()

    def get(self, name: str | None, *tasks: Task) -> PoolingModel:
        """See ``PoolingCalls``."""
        return self._client.get(name, *tasks)

    async def encode(self, request: PoolRequest) -> PoolingResults:
        """See ``PoolingCalls``; the router spreads the parts, which have as many inputs."""
        count = min(self._num_parts, len(request.inputs))
        parts = [
            asyncio.ensure_future(
                self._client.encode(replace(request, inputs=request.inputs[first::count]))
            )
            for first in range(count)
        ]
        try:
            results = await asyncio.gather(*parts)
        except BaseException:
            for part in parts:
                part.cancel()
            raise
        # Part i has every count-th input, from i on.
        places = [divmod(place, count) for place in range(len(request.inputs))]
        return PoolingResults(
            (results[part][row] for row, part in places),
            (results[part].cache_hits[row] for row, part in places),
        )


def _stop(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the processes, then the thread of the event loop."""
    engine.stop()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _stop_anywhere(
    engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    """``_stop`` from a thread that may be one of those that it waits for.

    Garbage is collected on any thread; the main thread is none of them.
    """
    if threading.current_thread() is threading.main_thread():
        _stop(engine, loop, thread)
    else:
        threading.Thread(target=_stop, args=(engine, loop, thread)).start()


async def _forward(handle: RequestHandle, events: Events) -> None:
    """Hand the events of a request to the caller's thread."""
    try:
        async for event in handle.events:
            events.put(event)
    finally:
        events.put(None)


@contextlib.contextmanager
def _garbage_collection_kept() -> Generator[None]:
    """Undo what a start of engines does to garbage collection: this process is the caller's."""
    threshold = gc.get_threshold()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
