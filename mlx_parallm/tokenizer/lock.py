"""A lock of things that are handed to another process."""

from __future__ import annotations

import threading


class OwnLock:
    """A lock for one process: it is pickled as a new one, which nobody holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OwnLock], tuple[()]]:
        return OwnLock, ()
