"""The engine of ``LLM``: the server's, and a thread with the event loop that it serves."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, Literal, TypeVar, cast

from typing_extensions import override

from mlx_parallm.config import EngineConfig
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.machine import visible_devices
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.server_config import ServerConfig
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
        # One that was collected lately may still have the memory that this one needs.
        _wait_for_ending()
        self.client = client
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._thread = _LoopThread(client)
        # An interpreter that exits calls ``end``, which waits.
        weakref.finalize(self, self._thread.begin_end).atexit = False
        try:
            self._thread.start()
            atexit.register(self._thread.end)
            self.client.start()
        except BaseException:
            # An interrupt, too, ends the load.
            self.close()
            raise

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
        """End the engine; its memory is free, and its processes have ended, when this returns.

        If it is interrupted, the engine ends all the same, and another call waits for that.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._thread.begin_end()
        self._thread.end()

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            # Threads do not outlive a fork.
            raise InvalidRequestError(
                "This LLM belongs to the process that this one was forked from; make another one."
            )
        if self._thread.is_ending:
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


class _LoopThread(threading.Thread):
    """A thread that runs an event loop, and ends the engine that it serves.

    Only this thread ends the engine: a caller may be interrupted, and garbage may be collected on
    any thread, at any point, while that thread holds locks that others need in order to end.

    Attributes:
        loop: takes callbacks until the end begins.
        is_ending: True once the end begins.
    """

    def __init__(self, client: AsyncEngine) -> None:
        super().__init__(name="requests", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.is_ending = False
        self._client = client
        self._owner = os.getpid()
        self._end_begins = asyncio.Event()
        self._has_ended = threading.Event()

    @override
    def run(self) -> None:
        """Serve until the end begins, then end the engine."""
        try:
            # A Runner would start a thread at its end, which an interpreter that exits refuses.
            self.loop.run_until_complete(self._serve())
        finally:
            try:
                self._client.stop()
            finally:
                self.loop.close()
                atexit.unregister(self.end)
                self._has_ended.set()

    async def _serve(self) -> None:
        await self._end_begins.wait()
        await self._client.drain(0.0, "The LLM was closed.")
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def begin_end(self) -> None:
        """Let the engine end, without waiting for that; nothing happens in a forked process.

        No lock is taken, so a finalizer may call this.
        """
        if os.getpid() != self._owner:
            return
        self.is_ending = True
        # A closed loop raises: the engine has ended.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._end_begins.set)

    def end(self) -> None:
        """Let the engine end, and wait for that: an interpreter that exits would not wait."""
        self.begin_end()
        # It may have been interrupted before it was started, and it does not run in a fork.
        if self.is_alive():
            # A ``join`` that is interrupted makes CPython take a thread that runs for one that has
            # ended.
            self._has_ended.wait()
            self.join()


def _wait_for_ending() -> None:
    """Return once the engines have ended that were collected."""
    for thread in threading.enumerate():
        if isinstance(thread, _LoopThread) and thread.is_ending:
            thread.end()
