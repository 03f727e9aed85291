"""The timeline of an engine's steps, from scripted clocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest

from mlx_parallm.bench.step_times import (
    BEGINNING,
    MIN_WAIT_S,
    SUBMITTING,
    WAITING,
    Span,
    device_spans,
    format_steps,
    step_times,
    summarise_steps,
)
from mlx_parallm.bench.step_trace import TraceRecorder, trace_events, write_trace
from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import Phase
from tests.fakes import ByteTokenizer, FakeRunner, make_info, spell


def ticking() -> Iterator[float]:
    """Yield the times of a clock that advances by a millisecond with each reading."""
    return (tick / 1000 for tick in count())


def traced_engine(*, runs_ahead: bool) -> tuple[GenerationEngine, TraceRecorder]:
    info = make_info(runs_ahead=runs_ahead)
    clock = ticking()
    recorder = TraceRecorder(lambda: next(clock))
    kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(), kv, max_model_len=info.max_model_len)
    engine = GenerationEngine(
        scheduler,
        FakeRunner(spell("hello"), info=info),
        ByteTokenizer(),
        EngineMetrics(MetricFamilies(), "m", info),
        tracer=recorder,
    )
    engine.submit(
        GenerateRequest(request_id="a", model="m", prompt_ids=(1, 2), params=SamplingParams())
    )
    return engine, recorder


def ahead(waits_s: list[float], *, dispatch_s: float = 0.002) -> list[Span]:
    """Return steps that run ahead; the host waits for step i during ``waits_s[i]``."""
    spans: list[Span] = []
    now = 0.0
    for step_id, wait_s in enumerate([*waits_s, 0.0]):
        start = now
        for phase, seconds in ((Phase.BUILD, 0.001), (Phase.DISPATCH, dispatch_s)):
            spans.append(Span(phase, step_id, 4, 4, now, now + seconds))
            now += seconds
        if step_id:
            wait_s = waits_s[step_id - 1]
            spans.append(Span(Phase.WAIT, step_id - 1, 4, 4, now, now + wait_s))
            now += wait_s
        spans.append(Span(Phase.STEP, None, 0, 0, start, now))
    return spans


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_engine_tells_every_phase_within_its_step(runs_ahead: bool) -> None:
    engine, recorder = traced_engine(runs_ahead=runs_ahead)
    calls = 0
    while engine.has_work():
        engine.step()
        calls += 1
    phases = {Phase.SCHEDULE, Phase.WAIT, Phase.UPDATE, Phase.DETOKENIZE, Phase.PUBLISH}
    steps = step_times(recorder.spans)
    assert len(steps) == calls
    assert {phase for step in steps for phase in step.self_s} == phases | {Phase.STEP}
    waited = [s.step_id for s in recorder.spans if s.phase is Phase.WAIT]
    assert waited == list(range(len(waited)))
    for step in steps:
        assert sum(step.self_s.values()) == pytest.approx(step.step.duration_s)


def test_time_in_a_phase_within_another_counts_once() -> None:
    spans = [
        Span(Phase.WAIT, None, 0, 0, 2.0, 5.0),
        Span(Phase.BUILD, 0, 1, 1, 1.0, 6.0),
        Span(Phase.STEP, None, 0, 0, 0.0, 7.0),
    ]
    (step,) = step_times(spans)
    assert step.self_s == {Phase.STEP: 2.0, Phase.BUILD: 2.0, Phase.WAIT: 3.0}


def test_the_device_is_busy_until_the_results_the_host_waited_for() -> None:
    waits = [0.004, 0.004, MIN_WAIT_S / 2, 0.004]
    spans = ahead(waits)
    device = device_spans(spans)
    assert [span.host_waited for span in device] == [True, True, False, True]
    dispatches = [span for span in spans if span.phase is Phase.DISPATCH]
    ends = [span.end_s for span in spans if span.phase is Phase.WAIT]
    assert device[0].start_s == dispatches[0].start_s
    assert device[0].end_s == ends[0]
    assert device[1].start_s == ends[0], "a step begins when the one before it ends"
    # The host did not wait: the step was done by the time that the host asked, at the latest.
    assert device[2].end_s == pytest.approx(ends[2] - waits[2])
    for span, other in pairwise(device):
        assert span.end_s <= other.start_s


def test_steps_in_turn_are_on_the_device_while_they_are_evaluated() -> None:
    evaluate = Span(Phase.EVALUATE, 0, 1, 1, 1.0, 3.0)
    (span,) = device_spans([evaluate, Span(Phase.WAIT, 0, 1, 1, 3.0, 3.00001)])
    assert (span.start_s, span.end_s, span.host_waited) == (1.0, 3.0, True)


def test_a_step_that_was_never_waited_for_is_not_on_the_device() -> None:
    assert device_spans([Span(Phase.DISPATCH, 0, 1, 1, 0.0, 1.0)]) == []


def test_the_summary_is_of_the_last_steps() -> None:
    summary = summarise_steps(ahead([0.5, 0.004, 0.0, 0.004]), 3)
    assert summary.num_steps == 3
    assert summary.num_waited == 2
    assert summary.step_ms == pytest.approx(7)
    assert summary.phase_ms[Phase.WAIT] == pytest.approx(4)
    assert summary.phase_ms[Phase.DISPATCH] == pytest.approx(2)
    assert sum(summary.phase_share.values()) == pytest.approx(1)
    assert summary.waiting_share == pytest.approx(8 / 17)
    assert "in 2 of 3 steps, 47.1% of the time" in format_steps(summary)
    with pytest.raises(ValueError, match="no step"):
        summarise_steps([], 1)


def test_to_wait_for_the_thread_that_submits_is_to_submit() -> None:
    spans = [
        Span(Phase.BUILD, 0, 1, 1, 0.0, 1.0),
        Span(Phase.JOIN, 0, 1, 1, 1.0, 3.0),
        Span(Phase.DISPATCH, 0, 1, 1, 3.0, 3.5),
        Span(Phase.WAIT, 0, 1, 1, 3.5, 4.0),
        Span(Phase.STEP, None, 0, 0, 0.0, 5.0),
    ]
    summary = summarise_steps(spans, 1)
    assert summary.submitting_share == pytest.approx(0.5)
    assert summary.waiting_share == pytest.approx(0.1)
    assert "does, 50.0% of the time" in format_steps(summary)
    # The device has the step once, and from where it was given away.
    assert [(span.start_s, span.end_s) for span in device_spans(spans)] == [(3.0, 4.0)]


def test_every_phase_of_a_step_that_passes_time_on_the_device_is_in_a_set() -> None:
    of_host = {Phase.STEP, Phase.SCHEDULE, Phase.BUILD, Phase.UPDATE, Phase.DETOKENIZE}
    assert set(Phase) - of_host - {Phase.PUBLISH} == BEGINNING | SUBMITTING | WAITING


def test_the_trace_has_both_tracks_in_microseconds(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    spans = ahead([0.004, 0.0])
    write_trace(spans, file)
    events = json.loads(file.read_text())["traceEvents"]
    assert events == trace_events(spans)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names) == [1, 2]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(piece["ts"] >= 0 and piece["dur"] >= 0 for piece in slices)
    build = next(piece for piece in slices if piece["name"] == "build")
    assert (build["tid"], build["ts"], build["dur"]) == (1, 0, 1000)
    assert build["args"] == {"step": 0, "rows": 4, "tokens": 4}
    device = [
        (piece["name"], piece["args"]["host waited"]) for piece in slices if piece["tid"] == 2
    ]
    assert device == [("step 0, device-bound", True), ("step 1, host-bound", False)]
