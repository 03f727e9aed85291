"""Where the time of the engine's steps goes, from the spans that were recorded of it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_parallm.types.tracing import Phase

# A shorter wait is that of reading results which are there.
MIN_WAIT_S = 2e-4

SUBMITTING = frozenset({Phase.DISPATCH, Phase.EVALUATE})
WAITING = frozenset({Phase.WAIT, Phase.EVALUATE})


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of the engine thread that has ended.

    Attributes:
        phase: what was done.
        step_id: for which step; None if for no particular one.
        num_rows: sequences of that step.
        num_tokens: tokens of that step.
        start_s: seconds on the recorder's clock.
        end_s: likewise.
    """

    phase: Phase
    step_id: int | None
    num_rows: int
    num_tokens: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """When a step can have been on the device.

    Attributes:
        dispatch: the span in which it was handed over.
        start_s: when the device could begin: dispatch had begun, and the step before had ended.
        end_s: when its results were known to be there.
        host_waited: whether the host had to wait for them. Where steps run ahead, the device then
            had the next step before it ended this one, and was never without work in between.
            Where they do not, the host waits for every step and the device for every next one.
    """

    dispatch: Span
    start_s: float
    end_s: float
    host_waited: bool


@dataclass(slots=True)
class StepTimes:
    """One call of ``Engine.step``.

    Attributes:
        step: the whole call.
        self_s: by phase, seconds in it but not in a phase within it.
    """

    step: Span
    self_s: dict[Phase, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Figures of some steps.

    Attributes:
        num_steps: how many.
        step_ms: median time from one step's begin to the next one's.
        phase_ms: by phase, median milliseconds of a step.
        phase_share: by phase, its share of the steps' time, 0 to 1.
        waiting_share: share of the time in which the host waited for the device.
        num_waited: steps whose results the host had to wait for.
    """

    num_steps: int
    step_ms: float
    phase_ms: dict[Phase, float]
    phase_share: dict[Phase, float]
    waiting_share: float
    num_waited: int


def device_spans(spans: Sequence[Span]) -> list[DeviceSpan]:
    """When each step that was dispatched and waited for can have been on the device."""
    waits = {one.step_id: one for one in spans if one.phase is Phase.WAIT}
    found: list[DeviceSpan] = []
    free_s = 0.0
    for one in spans:
        wait = waits.get(one.step_id)
        if one.phase not in SUBMITTING or wait is None:
            continue
        start_s = max(one.start_s, free_s) if found else one.start_s
        if one.phase is Phase.EVALUATE:
            waited, end_s = True, one.end_s
        else:
            waited = wait.duration_s >= MIN_WAIT_S
            end_s = wait.end_s if waited else max(start_s, wait.start_s)
        found.append(DeviceSpan(one, start_s, end_s, waited))
        free_s = end_s
    return found


def step_times(spans: Sequence[Span]) -> list[StepTimes]:
    """The calls of ``Engine.step`` in order, each with the time of its phases."""
    steps: list[StepTimes] = []
    open_spans: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.start_s, -one.end_s)):
        while open_spans and open_spans[-1].end_s <= span.start_s:
            open_spans.pop()
        if span.phase is Phase.STEP:
            steps.append(StepTimes(span))
        if steps:
            own = steps[-1].self_s
            own[span.phase] = own.get(span.phase, 0.0) + span.duration_s
            if open_spans:
                own[open_spans[-1].phase] -= span.duration_s
        open_spans.append(span)
    return steps


def summarise_steps(spans: Sequence[Span], last: int) -> StepSummary:
    """Figures of the ``last`` calls of ``Engine.step``.

    Raises:
        ValueError: no step was recorded.
    """
    steps = step_times(spans)[-last:]
    if not steps:
        raise ValueError("no step was recorded")
    begin_s, end_s = steps[0].step.start_s, steps[-1].step.end_s
    starts = [*(one.step.start_s for one in steps), end_s]
    periods = [after - before for before, after in itertools.pairwise(starts)]
    phases = [phase for phase in Phase if any(phase in one.self_s for one in steps)]
    sums = {phase: sum(one.self_s.get(phase, 0.0) for one in steps) for phase in phases}
    medians = {p: statistics.median(one.self_s.get(p, 0.0) for one in steps) for p in phases}
    total_s = end_s - begin_s
    waited = [one for one in device_spans(spans) if one.host_waited and one.end_s > begin_s]
    return StepSummary(
        num_steps=len(steps),
        step_ms=1e3 * statistics.median(periods),
        phase_ms={phase: 1e3 * seconds for phase, seconds in medians.items()},
        phase_share={phase: seconds / total_s for phase, seconds in sums.items()},
        waiting_share=sum(sums.get(phase, 0.0) for phase in WAITING) / total_s,
        num_waited=min(len(waited), len(steps)),
    )


def format_steps(summary: StepSummary) -> str:
    """The figures as lines of text."""
    lines = [f"{'phase':<12}{'median ms':>10}{'share':>8}"]
    for phase, milliseconds in summary.phase_ms.items():
        name = "other" if phase is Phase.STEP else str(phase)
        lines.append(f"{name:<12}{milliseconds:>10.3f}{summary.phase_share[phase]:>8.1%}")
    lines.append(f"{'step':<12}{summary.step_ms:>10.3f}{1:>8.1%}")
    lines.append(
        f"the host waited for the device in {summary.num_waited} of {summary.num_steps} steps,"
        f" {summary.waiting_share:.1%} of the time"
    )
    return "\n".join(lines)
