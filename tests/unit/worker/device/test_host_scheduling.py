"""Threads that compute give way to threads that answer clients."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx
import pytest

from mlx_parallm.worker.device.cpu_process import compute_in_batches

T = TypeVar("T")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device().type != mx.DeviceType.cpu,
    reason="Linux with MLX's CPU backend only",
)


def on_new_thread(call: Callable[[], T]) -> T:
    """Return the result of a call on a thread that ends afterwards."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_thread_and_the_threads_that_it_creates_compute_in_batches() -> None:
    def policies() -> tuple[bool, int, int]:
        # An engine of another test may have left its policy to the thread that starts this one.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        is_told = compute_in_batches()
        return is_told, os.sched_getscheduler(0), on_new_thread(lambda: os.sched_getscheduler(0))

    assert on_new_thread(policies) == (True, os.SCHED_BATCH, os.SCHED_BATCH)


def test_other_threads_keep_their_policy() -> None:
    before = os.sched_getscheduler(0)
    on_new_thread(compute_in_batches)
    assert os.sched_getscheduler(0) == before
    assert on_new_thread(lambda: os.sched_getscheduler(0)) == before


def test_a_policy_that_the_user_set_stays() -> None:
    def told() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return compute_in_batches(), os.sched_getscheduler(0)

    assert on_new_thread(told) == (False, os.SCHED_IDLE)
