"""The time that the engine thread has been at the step or command in flight."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Set by the engine thread; any thread may read it. A device that hangs is seen by it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None

    def begin(self) -> None:
        """Note that a step or a command begins; the one before it has ended."""
        self._began_s = self._clock()

    def end(self) -> None:
        """Note that the thread waits for a command."""
        self._began_s = None

    def running_s(self) -> float:
        """Return for how long the step in flight has run, in seconds; 0.0 if there is none."""
        began_s = self._began_s
        return 0.0 if began_s is None else self._clock() - began_s
