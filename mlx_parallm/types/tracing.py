"""The phases of a step, and the tracer that records them for a timeline."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

from mlx_parallm.types.step import ScheduledBatch


class Phase(StrEnum):
    """The engine thread's work, in the order of a step; ``STEP`` contains all other phases."""

    STEP = "step"
    SCHEDULE = "schedule"
    #: ``BUILD``: Python builds the graph.
    BUILD = "build"
    #: ``DISPATCH``: the graph is submitted; the device may begin with it meanwhile.
    DISPATCH = "dispatch"
    #: ``EVALUATE``: dispatch and computation together, on devices without run-ahead.
    EVALUATE = "evaluate"
    #: ``WAIT``: the thread waits for a step's results and converts them to Python values.
    WAIT = "wait"
    #: ``UPDATE``: the scheduler applies the results.
    UPDATE = "update"
    #: ``DETOKENIZE``: tokens become text and events.
    DETOKENIZE = "detokenize"
    #: ``PUBLISH``: metrics are updated, and samples that met a stop string end.
    PUBLISH = "publish"


class StepTracer(Protocol):
    """Records the phases of the engine thread, which makes all the calls."""

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that the thread enters for a phase of ``batch``; spans nest."""
        ...


class NoTracer:
    """Records nothing. Implements ``StepTracer``."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        del phase, batch
        return self._nothing
