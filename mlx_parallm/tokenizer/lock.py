"""A lock for objects that are pickled to another process."""

from __future__ import annotations

import threading


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
