"""A recorder of the engine thread's phases, which writes them as a Chrome trace.

Open the file in https://ui.perfetto.dev or in chrome://tracing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import override

from mlx_parallm.bench.step_times import Span, device_spans
from mlx_parallm.types.step import Phase, ScheduledBatch, StepTracer

PROCESS = 1
ENGINE_THREAD = 1
DEVICE = 2
THREADS = {ENGINE_THREAD: "engine thread", DEVICE: "device, at most"}


class TraceRecorder(StepTracer):
    """Keeps every span in memory.

    Attributes:
        spans: the spans that have ended, in the order of their ends.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spans: list[Span] = []
        self._clock = clock

    @override
    def span(self, phase: Phase, batch: ScheduledBatch | None = None) -> _Recording:
        return _Recording(self.spans, self._clock, phase, batch)


@dataclass(slots=True)
class _Recording:
    """A span that has not ended."""

    spans: list[Span]
    clock: Callable[[], float]
    phase: Phase
    batch: ScheduledBatch | None
    start_s: float = 0.0

    def __enter__(self) -> None:
        self.start_s = self.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_s, batch = self.clock(), self.batch
        rows = 0 if batch is None else len(batch.sequences)
        tokens = 0 if batch is None else batch.num_tokens
        step_id = None if batch is None else batch.step_id
        self.spans.append(Span(self.phase, step_id, rows, tokens, self.start_s, end_s))


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write spans as a JSON file of trace events.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(content) + "\n")


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return spans as trace events of the engine thread and of the device.

    A step is on the device from its dispatch, or the end of the previous step, until its results
    are known to be ready. If the host did not wait for them, they may have been ready earlier.
    """
    origin = min((span.start_s for span in spans), default=0.0)
    events = [_name(thread, name) for thread, name in THREADS.items()]
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        events.append(_event(ENGINE_THREAD, str(span.phase), span, origin, _facts(span)))
    for step in device_spans(spans):
        bound = "device-bound" if step.host_waited else "host-bound"
        name = f"step {step.dispatch.step_id}, {bound}"
        facts = _facts(step.dispatch) | {"host waited": step.host_waited}
        colour = "good" if step.host_waited else "bad"
        events.append(_event(DEVICE, name, step, origin, facts) | {"cname": colour})
    return events


def _name(thread: int, name: str) -> dict[str, Any]:
    return {
        "name": "thread_name",
        "ph": "M",
        "pid": PROCESS,
        "tid": thread,
        "args": {"name": name},
    }


def _event(
    thread: int, name: str, span: Any, origin_s: float, facts: dict[str, Any]
) -> dict[str, Any]:
    """Return a complete event; its times are microseconds."""
    return {
        "name": name,
        "cat": "step",
        "ph": "X",
        "ts": round(1e6 * (span.start_s - origin_s), 3),
        "dur": round(1e6 * (span.end_s - span.start_s), 3),
        "pid": PROCESS,
        "tid": thread,
        "args": facts,
    }


def _facts(span: Span) -> dict[str, Any]:
    if span.step_id is None:
        return {}
    return {"step": span.step_id, "rows": span.num_rows, "tokens": span.num_tokens}
