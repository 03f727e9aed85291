"""The times that the disk store reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks, both in ns.

    Attributes:
        wall: time since 1970, which processes share; it may be set back.
        timer: time since some point, which only passes; for what is due.
    """

    wall: Callable[[], int] = time.time_ns
    timer: Callable[[], int] = time.monotonic_ns
