"""Thread-unsafe objects, shared so that the event loop never waits for a worker thread."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import threading
from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Lanes(Generic[T]):
    """An object for the event loop, and a copy of it for all other threads.

    A worker may need seconds for a long text. The loop has an object of its own, so that it never
    waits for the workers' lock. An object that cannot be copied is shared by all threads.
    """

    def __init__(self, original: T) -> None:
        self._loop = (original, OwnLock())
        self._workers = _copied(original) or self._loop

    @contextlib.contextmanager
    def use(self) -> Generator[T]:
        """Yield the object of this thread's lane, for this thread alone."""
        lane_object, lock = self._loop if _is_event_loop() else self._workers
        with lock:
            yield lane_object


def _copied(original: T) -> tuple[T, OwnLock] | None:
    try:
        return copy.deepcopy(original), OwnLock()
    except (TypeError, ValueError, AttributeError, NotImplementedError, pickle.PicklingError):
        return None


def _is_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class OwnLock:
    """A lock within one process; unpickling gives a new, free lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OwnLock], tuple[()]]:
        return OwnLock, ()
