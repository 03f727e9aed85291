"""Objects that one thread may use at a time, and that the event loop never waits for."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Generic, TypeVar

from mlx_parallm.tokenizer.lock import OwnLock

T = TypeVar("T")


class Lanes(Generic[T]):
    """An object for the event loop, and a copy of it for all other threads.

    What a worker does with a long text may take seconds. The loop has an object of its own, so that
    it never waits for the worker's lock. An object that cannot be copied is shared.
    """

    def __init__(self, given: T) -> None:
        self._loop = (given, OwnLock())
        self._workers = _copied(given) or self._loop

    @contextlib.contextmanager
    def use(self) -> Iterator[T]:
        """The object of this thread's lane, for this thread alone."""
        given, lock = self._loop if _is_event_loop() else self._workers
        with lock:
            yield given


def _copied(given: T) -> tuple[T, OwnLock] | None:
    try:
        return copy.deepcopy(given), OwnLock()
    except (TypeError, ValueError, AttributeError, NotImplementedError, pickle.PicklingError):
        return None


def _is_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
