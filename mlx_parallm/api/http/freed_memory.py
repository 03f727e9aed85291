"""Returns memory to the system after large bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlx_parallm.heap import trim_heap

# LARGE_BYTES: size of bodies that trigger a trim; memory of smaller ones is reused.
LARGE_BYTES = 4 * 1024 * 1024
# PAUSE_S: wait after the last large body; while more of them come, their memory is reused.
PAUSE_S = 1.0


class FreedMemory:
    """Trims the heap once bodies of ``LARGE_BYTES`` together were answered and no more come.

    Otherwise the freed memory of encoding megabytes of text stays with the process: glibc keeps it
    for each thread, and a server on the CPU configures it to keep more.
    """

    def __init__(self, trim: Callable[[], None] = trim_heap, *, pause_s: float = PAUSE_S) -> None:
        self._trim = trim
        self._pause_s = pause_s
        self._answered = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, size: int, held: int) -> None:
        """Count an answered body of ``size`` bytes; those of running requests have ``held``."""
        self._answered += size
        if self._answered < LARGE_BYTES or held >= LARGE_BYTES:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._answered = 0
        # Trimming takes milliseconds without the interpreter's lock, so it runs on a thread.
        asyncio.get_running_loop().run_in_executor(None, self._trim)
