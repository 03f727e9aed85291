"""One model's engine over a scripted runner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation import engine as engine_module
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.saves import Save
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.errors import (
    ContextLengthError,
    EarlierStepError,
    InvalidRequestError,
    OverloadedError,
    StepError,
)
from mlx_parallm.types.events import (
    ErrorEvent,
    FinishReason,
    GenerateEvent,
    PromptEvent,
    TokenEvent,
)
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import NO_MOVES, Moves, RunnerInfo, ScheduledBatch
from tests import fakes
from tests.dict_store import DictStore
from tests.fakes import ByteTokenizer, FakeRunner, make_info, spell


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"], autouse=True)
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test holds whether or not steps run ahead."""
    monkeypatch.setattr(fakes, "make_info", partial(make_info, runs_ahead=request.param))
    return request.param


def make_engine(runner: FakeRunner, **limits: int) -> tuple[GenerationEngine, MetricFamilies]:
    info = runner.info
    kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(**limits), kv, max_model_len=info.max_model_len)
    families = MetricFamilies()
    metrics = EngineMetrics(families, "m", info)
    return GenerationEngine(scheduler, runner, ByteTokenizer(), metrics), families


def make_request(request_id: str = "a", prompt: str = "hi", **params: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model="m",
        prompt_ids=tuple(prompt.encode()),
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


def run(engine: GenerationEngine) -> list[GenerateEvent]:
    events: list[GenerateEvent] = []
    while engine.has_work():
        events += engine.step() or []
    return events


def text_of(events: list[GenerateEvent], request_id: str, index: int = 0) -> str:
    return "".join(
        e.text
        for e in events
        if isinstance(e, TokenEvent) and (e.request_id, e.index) == (request_id, index)
    )


def test_text_ends_at_eos_and_the_prompt_event_comes_first() -> None:
    engine, _ = make_engine(FakeRunner(spell("hello")))
    engine.submit(make_request())
    events = run(engine)
    assert isinstance(events[0], PromptEvent)
    assert text_of(events, "a") == "hello"
    assert isinstance(events[-1], TokenEvent)
    assert events[-1].finish_reason is FinishReason.STOP


def test_a_stop_string_across_tokens_ends_only_its_own_sample() -> None:
    engine, _ = make_engine(FakeRunner(spell("one two three")))
    engine.submit(make_request("a", stop=(" tw",)))
    engine.submit(make_request("b"))
    events = run(engine)
    assert text_of(events, "a") == "one"
    assert text_of(events, "b") == "one two three"
    assert [e.stop_reason for e in events if isinstance(e, TokenEvent) and e.finish_reason] == [
        " tw",
        None,
    ]


def test_a_failed_step_is_its_requests_error_and_the_engine_goes_on() -> None:
    def fail_first(batch: ScheduledBatch) -> None:
        if batch.step_id == first[0]:
            raise RuntimeError("out of memory")

    runner = FakeRunner(spell("ok"), before=fail_first)
    engine, _ = make_engine(runner)
    first = [0]
    engine.submit(make_request("a"))
    first[0] = _next_step_id(engine, runner)
    events = run(engine)
    assert [type(e) for e in events] == [ErrorEvent]
    (event,) = events
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, StepError)
    engine.submit(make_request("b"))
    assert text_of(run(engine), "b") == "ok"


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_step_that_fails_at_its_end_takes_the_step_behind_it_along(
    runs_ahead: bool, num_failures: int
) -> None:
    """Both may have failed with one error, so a later wait that succeeds means nothing."""
    failing = [1, 2] if runs_ahead else [1]

    def fail(batch: ScheduledBatch) -> None:
        if batch.step_id in failing[:num_failures]:
            raise RuntimeError("the device is gone")

    runner = FakeRunner(spell("fine"), ending=fail)
    engine, _ = make_engine(runner)
    engine.submit(make_request("a"))
    events = engine.step() or []
    events += engine.step() or []
    # Only a step that runs ahead has this request in the batch behind the one that fails.
    engine.submit(make_request("b"))
    events += engine.step() or []
    engine.submit(make_request("c"))
    events += run(engine)
    lost = {e.request_id: str(e.error) for e in events if isinstance(e, ErrorEvent)}
    assert list(lost) == (["a", "b"] if runs_ahead else ["a"])
    assert "the device is gone" in lost["a"]
    assert text_of(events, "a") == "f"
    assert text_of(events, "b") == ("" if runs_ahead else "fine")
    assert text_of(events, "c") == "fine"
    engine._scheduler.check_integrity()


@pytest.mark.parametrize("moves", [NO_MOVES, Moves(dropped=(7,))], ids=["none", "moved"])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_step_behind_one_that_was_refused_goes_on_unless_states_or_moves_forbid_it(
    runs_ahead: bool, has_state: bool, moves: Moves
) -> None:
    refused: list[ScheduledBatch] = []

    def refuse(batch: ScheduledBatch) -> None:
        if runs_ahead and batch.step_id == 2 and not refused:
            refused.append(batch)
            raise EarlierStepError("The step before could not be submitted.")

    def fail(batch: ScheduledBatch) -> None:
        if batch.step_id == 1:
            raise RuntimeError("no memory")

    info = replace(fakes.make_info(), has_state=has_state)
    runner = FakeRunner(spell("fine"), info=info, before=refuse, ending=fail)
    engine, _ = make_engine(runner)
    schedule = engine._scheduler.schedule

    def schedule_with_moves(**options: bool) -> ScheduledBatch | None:
        batch = schedule(**options)
        return batch and replace(batch, moves=moves)

    engine._scheduler.schedule = schedule_with_moves  # type: ignore[method-assign]
    engine.submit(make_request("a"))
    events = engine.step() or []
    events += engine.step() or []
    engine.submit(make_request("b"))
    events += run(engine)
    lost = {e.request_id for e in events if isinstance(e, ErrorEvent)}
    goes_on = not runs_ahead or not (has_state or moves)
    assert lost == ({"a"} if goes_on else {"a", "b"})
    assert text_of(events, "b") == ("fine" if goes_on else "")
    assert len(refused) == runs_ahead
    engine._scheduler.check_integrity()


@pytest.mark.parametrize("has_state", [False, True])
def test_a_failed_step_of_a_model_with_state_has_others_computed_anew(has_state: bool) -> None:
    # It may have copied the states of sequences that it did not run.
    def fail(batch: ScheduledBatch) -> None:
        raise RuntimeError("the device is gone")

    info = replace(fakes.make_info(), has_state=has_state)
    scheduler = RecomputingScheduler(info)
    metrics = EngineMetrics(MetricFamilies(), "m", info)
    runner = FakeRunner(spell("fine"), info=info, ending=fail)
    engine = GenerationEngine(scheduler, runner, ByteTokenizer(), metrics)
    engine.submit(make_request("a"))
    assert [type(event) for event in run(engine)] == [ErrorEvent]
    assert scheduler.num_recomputed == has_state


class RecomputingScheduler(Scheduler):
    """Counts how often running sequences are to be computed anew."""

    def __init__(self, info: RunnerInfo) -> None:
        kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=True)
        super().__init__(SchedulerConfig(), kv, max_model_len=info.max_model_len)
        self.num_recomputed = 0

    def recompute_running(self) -> None:
        super().recompute_running()
        self.num_recomputed += 1


def test_a_step_is_begun_before_the_one_before_it_ends(runs_ahead: bool) -> None:
    order: list[str] = []
    runner = FakeRunner(
        spell("hey"),
        before=lambda batch: order.append(f"begin {batch.step_id}"),
        ending=lambda batch: order.append(f"end {batch.step_id}"),
    )
    engine, _ = make_engine(runner)
    engine.submit(make_request("a", max_tokens=3))
    assert text_of(run(engine), "a") == "hey"
    if runs_ahead:
        assert order == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "end 2"]
        assert [row.token_ids for b in runner.batches[1:] for row in b.sequences] == [(-1,)] * 2
    else:
        assert order == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]


def _next_step_id(engine: GenerationEngine, runner: FakeRunner) -> int:
    """Run a request of its own to learn which step comes next, whatever the numbering."""
    engine.abort("a")
    engine.submit(make_request("probe"))
    run(engine)
    engine.submit(make_request("a"))
    return runner.batches[-1].step_id + 1


def test_refusals_at_the_door_leave_nothing_behind() -> None:
    engine, _ = make_engine(FakeRunner(spell("x")), max_waiting=1)
    with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens"):
        engine.submit(make_request(prompt="a" * 300))
    with pytest.raises(InvalidRequestError) as refusal:
        engine.submit(
            GenerateRequest(request_id="r", model="m", prompt_ids=(999,), params=SamplingParams())
        )
    assert refusal.value.param == "prompt"
    engine.submit(make_request("a"))
    with pytest.raises(OverloadedError):
        engine.submit(make_request("b"))
    assert text_of(run(engine), "a") == "x"


def test_abort_frees_the_blocks_at_once() -> None:
    engine, families = make_engine(FakeRunner(spell("x" * 40)))
    engine.submit(make_request("a"))
    engine.step()
    assert families.registry.get_sample_value(
        "vllm:kv_cache_usage_perc", {"model_name": "m", "engine": "0"}
    )
    assert engine.abort("a")
    assert not engine.abort("a")
    assert run(engine) == []
    usage = families.registry.get_sample_value(
        "vllm:kv_cache_usage_perc", {"model_name": "m", "engine": "0"}
    )
    assert usage == 0


def test_metrics_count_tokens_and_reasons() -> None:
    engine, families = make_engine(FakeRunner(spell("abc")))
    engine.submit(make_request("a", n=2))
    run(engine)
    labels = {"model_name": "m", "engine": "0"}
    value = families.registry.get_sample_value
    assert value("vllm:generation_tokens_total", labels) == 8  # two samples of abc and EOS
    assert value("vllm:prompt_tokens_total", labels) == 2
    assert value("vllm:request_success_total", labels | {"finished_reason": "stop"}) == 2
    assert value("vllm:time_to_first_token_seconds_count", labels) == 1


def test_a_context_full_of_output_ends_by_length() -> None:
    info = make_info(max_model_len=8)
    engine, _ = make_engine(FakeRunner(spell("x" * 40), info=info))
    engine.submit(make_request("a", prompt="hi"))
    events = run(engine)
    assert text_of(events, "a") == "x" * 6
    assert isinstance(events[-1], TokenEvent)
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_a_step_is_told_what_was_spent_on_it_alone(runs_ahead: bool) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    info = fakes.make_info()
    runner = FakeRunner(
        spell("hey"),
        info=info,
        # As where submitting waits for the device.
        before=lambda batch: spend(100.0 * (batch.step_id + 1)),
        ending=lambda batch: spend(10.0 * (batch.step_id + 1)),
    )
    scheduler = TimedScheduler(info)
    metrics = EngineMetrics(MetricFamilies(), "m", info)
    engine = GenerationEngine(scheduler, runner, ByteTokenizer(), metrics, clock=lambda: now[0])
    for name, tokens in (("a", 3), ("b", 1)):
        engine.submit(make_request(name, max_tokens=tokens))
        while engine.has_work():
            engine.step()
            spend(1.0)
        spend(1000.0)
    if runs_ahead:
        # With what came between the end of one and the next.
        assert scheduler.seconds == [110.0, 221.0, 331.0, 440.0]
    else:
        assert scheduler.seconds == [110.0, 220.0, 330.0, 440.0]
    assert scheduler.known == [True] * 4


@pytest.mark.parametrize("waited_s", [0.0, 1.0, 50.0])
def test_a_step_that_is_submitted_beside_begins_when_the_one_before_ends(waited_s: float) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    runner = FakeRunner(
        spell("hey"),
        info=make_info(runs_ahead=True),
        # It waits until the step before is submitted.
        before=lambda batch: spend(100.0),
        ending=lambda batch: spend(waited_s),
    )
    runner.submits_beside = True
    scheduler = TimedScheduler(runner.info)
    metrics = EngineMetrics(MetricFamilies(), "m", runner.info)
    engine = GenerationEngine(scheduler, runner, ByteTokenizer(), metrics, clock=lambda: now[0])
    engine.submit(make_request("a", max_tokens=3))
    while engine.has_work():
        engine.step()
        spend(3.0)
    # The first one has no other before it, and the last one none behind it.
    assert scheduler.seconds == [203.0 + waited_s, 103.0 + waited_s, 3.0 + waited_s]
    assert scheduler.known[:2] == [waited_s == 50.0] * 2


class TimedScheduler(Scheduler):
    """Keeps the reported times of steps."""

    def __init__(self, info: RunnerInfo) -> None:
        kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=True)
        super().__init__(SchedulerConfig(), kv, max_model_len=info.max_model_len)
        self.seconds: list[float] = []
        self.known: list[bool] = []

    def observe(self, batch: ScheduledBatch, seconds: float, *, is_end_known: bool = True) -> None:
        self.seconds.append(seconds)
        self.known.append(is_end_known)
        super().observe(batch, seconds, is_end_known=is_end_known)


def test_tokens_of_one_step_have_one_latency() -> None:
    families = MetricFamilies()
    times = iter([0.0, 1.0, 3.0])
    metrics = EngineMetrics(families, "m", make_info(), clock=lambda: next(times))
    metrics.on_add(make_request(), None)
    first, *others = (
        TokenEvent(request_id="a", index=0, token_ids=(token,), text="x") for token in range(4)
    )
    metrics.on_events([first])
    metrics.on_events(others)
    labels = {"model_name": "m", "engine": "0"}
    read = families.registry.get_sample_value
    assert read("vllm:inter_token_latency_seconds_count", labels) == 1
    assert read("vllm:inter_token_latency_seconds_sum", labels) == 2
    assert read("vllm:generation_tokens_total", labels) == 4


class BusyStore(DictStore):
    """Takes nothing before it was asked a few times."""

    def __init__(self, num_refusals: int) -> None:
        super().__init__()
        self._refusals = iter(range(num_refusals))

    @property
    def is_busy(self) -> bool:
        return next(self._refusals, None) is not None


def engine_with(store: DictStore) -> tuple[GenerationEngine, Tiers]:
    """Return an engine that has a block to save."""
    runner = FakeRunner(spell("ok"))
    tiers = Tiers([store], block_bytes=1)
    kv = KVCacheManager(runner.info.num_blocks, runner.info.block_size, tiers=tiers)
    scheduler = Scheduler(SchedulerConfig(), kv, max_model_len=runner.info.max_model_len)
    metrics = EngineMetrics(MetricFamilies(), "m", runner.info)
    engine = GenerationEngine(scheduler, runner, ByteTokenizer(), metrics, tiers=tiers)
    tiers.saves.add(Save(0, b"content", b"", is_drafted=False))
    return engine, tiers


def test_what_is_not_saved_in_time_stays_to_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tiers = engine_with(DictStore())
    monkeypatch.setattr(engine_module, "SAVE_S", 0.0)
    engine.save()
    assert [save.content for save in tiers.saves.take(1)] == [b"content"]


def test_a_store_that_is_busy_when_the_engine_ends_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, tiers = engine_with(BusyStore(3))
    monkeypatch.setattr(engine_module, "SAVE_POLL_S", 0.0)
    engine.close()
    assert not tiers.saves


def test_a_store_that_stays_busy_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, tiers = engine_with(BusyStore(1_000_000))
    monkeypatch.setattr(engine_module, "SAVE_S", 0.01)
    engine.save()
    assert len(tiers.saves) == 1
