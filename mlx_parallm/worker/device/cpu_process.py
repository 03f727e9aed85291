"""Settings of the C library and of Linux for a process that computes on the CPU."""

from __future__ import annotations

import ctypes
import os
import sys

import mlx.core as mx

# Names of mallopt settings in glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# _MMAP_THRESHOLD_BYTES is the largest that glibc accepts.
_MMAP_THRESHOLD_BYTES = 32 << 20
_TOP_PAD_BYTES = 16 << 20
_NEVER = 2**31 - 1
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Let the process keep the memory that a step frees, for the next; True if it was possible.

    MLX's CPU backend allocates every intermediate result by ``malloc``. By default glibc maps the
    large ones anew each time and returns freed memory at once, so that a step spends half of its
    time on page faults (``docs/decisions/005-*.md``). What the user set in the environment, by
    the variables of ``mallopt(3)``, stays.
    """
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    if not (is_cpu and sys.platform == "linux") or any(name in os.environ for name in _ENVIRONMENT):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl has no such settings
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _NEVER),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


def compute_in_batches() -> bool:
    """Set SCHED_BATCH for this thread, which favours throughput; True if it was set.

    MLX's CPU backend hands every operation to a thread of its own. If that thread preempts the one
    that hands out the work, each of some 800 operations of a decode step costs two switches
    between threads. A thread under SCHED_BATCH preempts no other when it wakes up (sched(7)), so
    operations queue up first; and threads that answer clients preempt it. Threads that this one
    creates, such as MLX's, inherit the policy. A policy that the user set stays.
    """
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    if not is_cpu or sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return True
