"""The processors that this process may use."""

from __future__ import annotations

import os


def num_processors() -> int:
    """Return their number: those of the machine, unless a container or ``taskset`` allows fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
