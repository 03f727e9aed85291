"""What the parts of a step tell a tracer, so that a timeline can be drawn of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

from mlx_parallm.types.step import ScheduledBatch


class Phase(StrEnum):
    """What the engine thread does, in the order of a step. The others are parts of ``STEP``."""

    STEP = "step"
    SCHEDULE = "schedule"
    #: Building the graph in Python.
    BUILD = "build"
    #: Handing the graph to the device, which begins with it meanwhile.
    DISPATCH = "dispatch"
    #: Dispatch and computation together, where steps do not run ahead.
    EVALUATE = "evaluate"
    #: Until a step's results are there, and they are Python values.
    WAIT = "wait"
    #: The scheduler takes the results in.
    UPDATE = "update"
    #: Tokens to text and events.
    DETOKENIZE = "detokenize"
    #: Metrics, and what stop strings ended.
    PUBLISH = "publish"


class StepTracer(Protocol):
    """Is told what the engine thread does; everything is called on that thread."""

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        """A context that lasts as long as a phase of ``batch``; spans nest."""
        ...


class NoTracer:
    """Records nothing. Implements ``StepTracer``."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        """Nothing."""
        del phase, batch
        return self._nothing
