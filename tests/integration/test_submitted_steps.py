"""Steps that a thread submits, while the next ones are built or after they could not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.errors import EarlierStepError
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import Phase, ScheduledBatch
from mlx_parallm.worker.device.dispatcher import Dispatcher, ThreadDispatcher
from tests.compiled_attention import CompiledAttention, OrderedAttention
from tests.fakes import ByteTokenizer
from tests.integration.test_parity_generate import Session, alone, random_prompt, shared_runner


@pytest.fixture(autouse=True)
def default_stream() -> Iterator[None]:
    """Restore the thread's default stream, which a dispatcher with a thread replaces."""
    before = mx.default_stream(mx.default_device())
    yield
    mx.set_default_stream(before)


class PhaseTracer:
    """Notes the phases of all steps. Implements ``StepTracer``."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        del batch
        self.phases.append(phase)
        return nullcontext()


@pytest.mark.parametrize(
    ("params", "is_beside"),
    [
        ({"logprobs": None}, True),
        ({"logprobs": None, "temperature": 1.0}, True),
        ({"logprobs": None, "repetition_penalty": 1.2}, True),
        # Their results are read by operations of MLX.
        ({"logprobs": 2}, False),
    ],
)
def test_plain_steps_are_built_while_the_one_before_is_submitted(
    params: dict[str, Any], is_beside: bool
) -> None:
    tracer = PhaseTracer()
    phases = tracer.phases
    prompts = {f"r{length}": random_prompt(length) for length in (1, 5, 13)}
    runners = (
        shared_runner("llama", OrderedAttention, dispatcher=ThreadDispatcher, tracer=tracer),
        shared_runner("llama", CompiledAttention),
    )
    sessions = [Session(runner) for runner in runners]
    phases.clear()
    for session in sessions:
        for request_id, prompt in prompts.items():
            session.add(request_id, prompt, **params)
        session.finish()
    for request_id in prompts:
        actual, wanted = (session.result(request_id) for session in sessions)
        assert actual.tokens == wanted.tokens
    built = [index for index, phase in enumerate(phases) if phase is Phase.BUILD]
    beside = [index for index in built if index == 0 or phases[index - 1] is not Phase.JOIN]
    assert (len(beside) > len(built) / 2) is is_beside
    assert is_beside or not beside
    assert all(phases[index + 1 : index + 3] == [Phase.JOIN, Phase.DISPATCH] for index in built)


@pytest.mark.parametrize("attention", [CompiledAttention, OrderedAttention])
def test_a_step_behind_one_that_could_not_be_submitted_is_refused(
    attention: type[CompiledAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = mx.async_eval
    refused: list[Any] = []

    def refuse(arrays: Any) -> None:
        refused.append(arrays)
        raise RuntimeError("no memory")

    # A tracer of its own gets a runner of its own.
    options: dict[str, Any] = {"dispatcher": ThreadDispatcher, "tracer": PhaseTracer()}
    runner = shared_runner("llama", attention, **options)
    session = Session(runner)
    session.add("lost", random_prompt(5), logprobs=None, max_tokens=20)
    for _ in range(4):
        session.step()
    monkeypatch.setattr(mx, "async_eval", refuse)
    first = session.scheduler.schedule()
    assert first is not None
    step = runner.submit(first)
    second = session.scheduler.schedule()
    assert second is not None
    for _ in range(2):
        with pytest.raises(EarlierStepError):
            runner.submit(second)
    # MLX would have computed what was left of the first one's graph.
    assert len(refused) == 1
    with pytest.raises(RuntimeError, match="no memory"):
        step.wait()
    monkeypatch.setattr(mx, "async_eval", submit)
    # What reads and writes blocks meanwhile is none of its business.
    runner.read_blocks([0]).wait()
    session = Session(runner)
    session.add("next", random_prompt(5), logprobs=None)
    session.finish()
    assert session.result("next").tokens == alone("llama", random_prompt(5)).tokens


@pytest.mark.parametrize("attention", [CompiledAttention, OrderedAttention])
@pytest.mark.parametrize("dispatcher", [Dispatcher, ThreadDispatcher])
@pytest.mark.parametrize("max_tokens", [5, 40])
def test_a_step_that_cannot_be_submitted_fails_its_own_requests_alone(
    max_tokens: int,
    dispatcher: type[Dispatcher],
    attention: type[CompiledAttention],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let the next step have a new request, with or without one of the refused step."""
    runner = shared_runner("llama", attention, dispatcher=dispatcher, tracer=PhaseTracer())
    kv = KVCacheManager(runner.info.num_blocks, runner.info.block_size, enable_prefix_caching=False)
    length = runner.info.max_model_len
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8), kv, max_model_len=length)
    metrics = EngineMetrics(MetricFamilies(), "m", runner.info)
    engine = GenerationEngine(scheduler, runner, ByteTokenizer(), metrics)
    events: list[GenerateEvent] = []

    def add(name: str, count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        prompt = random_prompt(5)
        engine.submit(GenerateRequest(request_id=name, model="m", prompt_ids=prompt, params=params))

    add("old", max_tokens)
    for _ in range(4):
        events += engine.step() or ()

    def refuse(_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "async_eval", refuse)
        events += engine.step() or ()
    add("new", 4)
    while engine.has_work():
        events += engine.step() or ()
    scheduler.check_integrity()
    failed = {event.request_id for event in events if isinstance(event, ErrorEvent)}
    assert failed == {"old"}
    tokens = [
        token
        for event in events
        if isinstance(event, TokenEvent) and event.request_id == "new"
        for token in event.token_ids
    ]
    assert tokens == list(alone("llama", random_prompt(5)).tokens[:4])


def test_a_trace_that_failed_is_made_while_nothing_is_submitted() -> None:
    runner = shared_runner("llama", OrderedAttention, dispatcher=ThreadDispatcher, tracer=None)
    path: Any = runner._path
    compiled = path._compiled
    joined, forward, before_trace = list[str](), compiled._forward, compiled.before_trace

    def join() -> None:
        joined.append("join")
        before_trace()

    def fail(*_: Any) -> Any:
        joined.append("trace")
        raise RuntimeError("no memory")

    session = Session(runner)
    session.add("first", random_prompt(5), logprobs=None, max_tokens=20)
    for _ in range(4):
        session.step()
    compiled.forget()
    compiled.before_trace, compiled._forward = join, fail
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            session.step()
        compiled._forward = lambda *arguments: (joined.append("trace"), forward(*arguments))[1]
        session = Session(runner)
        session.add("second", random_prompt(5), logprobs=None, max_tokens=20)
        for _ in range(4):
            session.step()
    finally:
        compiled.before_trace, compiled._forward = before_trace, forward
    assert joined == ["join", "trace"] * 2
