"""The distribution of the steps' time over phases, from recorded spans."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_parallm.types.step import Phase

# MIN_WAIT_S: a shorter wait only reads results that are ready.
MIN_WAIT_S = 2e-4

# BEGINNING: phases in which a step is given away, after which the device can begin with it.
BEGINNING = frozenset({Phase.DISPATCH, Phase.EVALUATE})
# SUBMITTING: phases in which the host submits, or waits for the thread that does.
SUBMITTING = frozenset({Phase.DISPATCH, Phase.JOIN})
WAITING = frozenset({Phase.WAIT, Phase.EVALUATE})


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of the engine thread that has ended.

    Attributes:
        phase: the phase.
        step_id: its step; None if it belongs to no particular step.
        num_rows: number of sequences in that step.
        num_tokens: number of tokens in that step.
        start_s: start, in seconds on the recorder's clock.
        end_s: end, in seconds on the recorder's clock.
    """

    phase: Phase
    step_id: int | None
    num_rows: int
    num_tokens: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Its duration in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """The time in which a step can have been on the device.

    Attributes:
        dispatch: the span that submitted it, or gave it to the thread that does.
        start_s: when the device could begin: dispatch had begun, and the previous step had ended.
        end_s: when its results were known to be ready.
        host_waited: True if the host had to wait for the results. If steps run ahead, the device
            then had the next step before it ended this one, and was never idle in between. If they
            do not, the host waits for every step, and the device for every next one.
    """

    dispatch: Span
    start_s: float
    end_s: float
    host_waited: bool


@dataclass(slots=True)
class StepTimes:
    """One call of ``Engine.step``.

    Attributes:
        step: the span of the whole call.
        self_s: seconds by phase, without the phases nested in it.
    """

    step: Span
    self_s: dict[Phase, float] = field(default_factory=dict[Phase, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Figures of some steps.

    Attributes:
        num_steps: number of steps.
        step_ms: median milliseconds from the start of a step to the start of the next.
        phase_ms: median milliseconds per step, by phase.
        phase_share: share of the steps' time, 0 to 1, by phase.
        waiting_share: share of the time in which the host waited for the device.
        submitting_share: share of the time in which the host submitted steps, or waited for the
            thread that submits them.
        num_waited: number of steps whose results the host had to wait for.
    """

    num_steps: int
    step_ms: float
    phase_ms: dict[Phase, float]
    phase_share: dict[Phase, float]
    waiting_share: float
    submitting_share: float
    num_waited: int


def device_spans(spans: Sequence[Span]) -> list[DeviceSpan]:
    """Return the device time of each step that was dispatched and waited for, in order."""
    waits = {span.step_id: span for span in spans if span.phase is Phase.WAIT}
    on_device: list[DeviceSpan] = []
    free_s = 0.0
    for span in spans:
        wait = waits.get(span.step_id)
        if span.phase not in BEGINNING or wait is None:
            continue
        start_s = max(span.start_s, free_s) if on_device else span.start_s
        if span.phase is Phase.EVALUATE:
            waited, end_s = True, span.end_s
        else:
            waited = wait.duration_s >= MIN_WAIT_S
            end_s = wait.end_s if waited else max(start_s, wait.start_s)
        on_device.append(DeviceSpan(span, start_s, end_s, waited))
        free_s = end_s
    return on_device


def step_times(spans: Sequence[Span]) -> list[StepTimes]:
    """Return the calls of ``Engine.step`` in order, each with the time of its phases."""
    steps: list[StepTimes] = []
    open_spans: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
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
    """Return figures of the ``last`` calls of ``Engine.step``.

    Raises:
        ValueError: no step was recorded.
    """
    steps = step_times(spans)[-last:]
    if not steps:
        raise ValueError("no step was recorded")
    begin_s, end_s = steps[0].step.start_s, steps[-1].step.end_s
    starts = [*(times.step.start_s for times in steps), end_s]
    periods = [after - before for before, after in itertools.pairwise(starts)]
    phases = [phase for phase in Phase if any(phase in times.self_s for times in steps)]
    sums = {phase: sum(times.self_s.get(phase, 0.0) for times in steps) for phase in phases}
    medians = {p: statistics.median(times.self_s.get(p, 0.0) for times in steps) for p in phases}
    total_s = end_s - begin_s
    shares = {phase: seconds / total_s for phase, seconds in sums.items()}
    waited = [span for span in device_spans(spans) if span.host_waited and span.end_s > begin_s]
    return StepSummary(
        num_steps=len(steps),
        step_ms=1e3 * statistics.median(periods),
        phase_ms={phase: 1e3 * seconds for phase, seconds in medians.items()},
        phase_share=shares,
        waiting_share=sum(shares.get(phase, 0.0) for phase in WAITING),
        submitting_share=sum(shares.get(phase, 0.0) for phase in SUBMITTING),
        num_waited=min(len(waited), len(steps)),
    )


def format_steps(summary: StepSummary) -> str:
    """Return the figures as lines of text."""
    lines = [f"{'phase':<12}{'median ms':>10}{'share':>8}"]
    for phase, milliseconds in summary.phase_ms.items():
        name = "other" if phase is Phase.STEP else str(phase)
        lines.append(f"{name:<12}{milliseconds:>10.3f}{summary.phase_share[phase]:>8.1%}")
    lines.append(f"{'step':<12}{summary.step_ms:>10.3f}{1:>8.1%}")
    lines.append(
        f"the host waited for the device in {summary.num_waited} of {summary.num_steps} steps,"
        f" {summary.waiting_share:.1%} of the time"
    )
    lines.append(
        f"it submitted, or waited for the thread that does, {summary.submitting_share:.1%}"
        " of the time"
    )
    return "\n".join(lines)
