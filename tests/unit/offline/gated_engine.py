"""A runner whose steps wait for a test, and calls of an engine over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from mlx_parallm.offline.completions import RequestOutput
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import ScheduledBatch
from tests.fakes import FakeRunner, FakeStep, spell
from tests.scripted_engine import make_request

HELLO = "hello"


class Gate(FakeRunner):
    """A runner that notes the batches of steps, and waits before each while it is closed."""

    def __init__(self) -> None:
        super().__init__(spell(HELLO))
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.sizes: list[int] = []

    def submit(self, batch: ScheduledBatch) -> FakeStep:
        self.reached.set()
        self.open.wait()
        self.sizes.append(len(batch.sequences))
        return super().submit(batch)


def requests(*names: str, **params: Any) -> list[tuple[str | None, GenerateRequest]]:
    return [(None, make_request(name, **params)) for name in names]


def said(outputs: Sequence[RequestOutput]) -> list[str]:
    return [sample.text for output in outputs for sample in output.outputs]


def on_a_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Do something on another thread; the list gets what it returns, or raises."""
    results: list[object] = []

    def note() -> None:
        try:
            results.append(work())
        except ParallmError as error:
            results.append(error)

    thread = threading.Thread(target=note)
    thread.start()
    return thread, results
