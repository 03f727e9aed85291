"""How the operating system schedules the threads that compute on the CPU."""

from __future__ import annotations

import os
import sys

import mlx.core as mx


def compute_in_batches() -> bool:
    """Tell Linux that this thread computes for throughput; True if it was told.

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
