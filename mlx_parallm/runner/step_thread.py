"""A thread that evaluates steps one after the other, while the engine thread builds the next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import mlx.core as mx

from mlx_parallm.runner.device import end_thread

_Job = tuple[Callable[[], Any], "Future[Any]"]


class StepThread:
    """Runs what it is given in order, and owns the stream of it.

    To evaluate a graph is mostly to hand its operations to the device one by one, which takes MLX
    about as long as Python takes to build it. On two threads the two overlap. That is safe because
    of what each thread touches: the engine thread only adds to graphs (it reads shapes and copies
    references), and looks at no result before the step that makes it has ended.

    Attributes:
        stream: where graphs must be built that are evaluated here. MLX lets a stream be used on
            the thread that made it only; recording operations on it is allowed anywhere.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        started: Future[mx.Stream] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="mlx-steps", daemon=True
        )
        self._thread.start()
        self.stream = started.result()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run ``work`` after everything submitted before; its result, or what it raised."""
        result: Future[Any] = Future()
        self._jobs.put((work, result))
        return result

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self, started: Future[mx.Stream]) -> None:
        started.set_result(mx.new_stream(mx.default_device()))
        while (job := self._jobs.get()) is not None:
            work, result = job
            # Whoever waits gets what was raised.
            try:
                result.set_result(work())
            except Exception as reason:  # noqa: BLE001
                result.set_exception(reason)
            # What a step holds during the next, such as its pools, is not written in place.
            del job, work, result
        end_thread()
