"""The engine of ``LLM``: the server's, and a thread with the event loop that it serves."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, Literal, TypeVar, cast

from mlx_parallm.config import EngineConfig, ServerConfig
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.machine import visible_devices
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.serving.parallel_engines import parallel_life
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, RequestAbortedError

T = TypeVar("T")


class OfflineEngine:
    """Serves one model to callers on any thread, which may have event loops of their own.

    It ends with ``close``, or with the object.

    Attributes:
        client: the engine; ``call`` runs its coroutines.
    """

    def __init__(self, client: AsyncEngine) -> None:
        """Start an engine; raise as ``EngineCore.start`` does."""
        self.client = client
        try:
            self.client.start()
        except BaseException:
            # An interrupt, too, ends the load.
            self.client.stop()
            raise
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._thread = _LoopThread()
        self._end = weakref.finalize(self, _end_anywhere, self._owner, self.client, self._thread)

    @property
    def model(self) -> GenerationModel | PoolingModel:
        """The model; raise InvalidRequestError if this is closed."""
        self._check_open()
        (status,) = self.client.statuses()
        return cast("GenerationModel | PoolingModel", status.model)

    def call(self, work: Callable[[AsyncEngine], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine gives on the engine's event loop.

        An interrupt of the caller cancels it.

        Raises:
            InvalidRequestError: this is closed, or belongs to another process.
            RequestAbortedError: it was closed meanwhile.
            Exception: what the coroutine raises.
        """
        self._check_open()
        # A call begins before the end of the loop does, or not at all.
        with self._lock:
            self._check_open()
            future = asyncio.run_coroutine_threadsafe(work(self.client), self._thread.loop)
        try:
            return future.result()
        except CancelledError:
            raise RequestAbortedError("The LLM was closed.") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the engine; its memory is free, and its processes have ended, when this returns."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            is_first = self._end.detach() is not None
        if is_first:
            _end(self.client, self._thread)

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            # Threads do not outlive a fork.
            raise InvalidRequestError(
                "This LLM belongs to the process that this one was forked from; make another one."
            )
        if not self._end.alive:
            raise InvalidRequestError("This LLM is closed.")


def open_engine(
    config: EngineConfig, size: int | Literal["auto"], devices: Sequence[int | str]
) -> OfflineEngine:
    """Return an engine with its model loaded, on a thread, or several in processes.

    Raises:
        ConfigError: this machine or process cannot have so many engines.
        ModelLoadError: the model cannot be loaded.
    """
    is_count = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    if size != "auto" and not is_count:
        raise ConfigError(
            f'data_parallel_size must be a whole number of at least 1, or "auto", not {size!r}.'
        )
    count = max(1, len(visible_devices())) if size == "auto" else size
    if count == 1:
        if devices:
            raise ConfigError("data_parallel_devices needs a data_parallel_size above 1.")
        return OfflineEngine(AsyncEngine(config))
    # Engines log what a program without a logging configuration shows: warnings.
    settings = ServerConfig(
        data_parallel_size=count,
        data_parallel_devices=tuple(map(str, devices)),
        log_level="warning",
    )
    life = parallel_life(config, settings, ignore_progress)
    return OfflineEngine(AsyncEngine(config, life=life))


class _LoopThread:
    """A thread that runs an event loop.

    Attributes:
        loop: takes callbacks until ``end``.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A Runner would start a thread at its end, which an interpreter that exits refuses.
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        await self._is_ending.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def end(self) -> None:
        """Cancel what runs on the loop, and wait for its end."""
        self.loop.call_soon_threadsafe(self._is_ending.set)
        self._thread.join()


def _end(client: AsyncEngine, thread: _LoopThread) -> None:
    """End what other threads wait for, then the engine, then the loop."""
    ending = client.drain(0.0, "The LLM was closed.")
    asyncio.run_coroutine_threadsafe(ending, thread.loop).result()
    client.stop()
    thread.end()


def _end_anywhere(owner: int, client: AsyncEngine, thread: _LoopThread) -> None:
    """``_end`` from a thread that may be one of those that it waits for, or a forked process.

    Garbage is collected on any thread; the main thread is none of them.
    """
    if os.getpid() != owner:
        return
    if threading.current_thread() is threading.main_thread():
        _end(client, thread)
    else:
        threading.Thread(target=_end, args=(client, thread)).start()
