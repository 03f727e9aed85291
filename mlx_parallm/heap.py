"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Return freed memory to the system, which glibc does only when it is called for that."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
