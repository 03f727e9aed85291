"""Steps that a thread submits, while the next ones are built or after they could not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.types.step import Phase, ScheduledBatch
from mlx_parallm.worker.device.dispatcher import ThreadDispatcher
from tests.compiled_attention import CompiledAttention, OrderedAttention
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
    with pytest.raises(RuntimeError, match="no memory"):
        runner.submit(second)
    # MLX would have computed what was left of the first one's graph.
    assert len(refused) == 1
    with pytest.raises(RuntimeError, match="no memory"):
        step.wait()
    monkeypatch.setattr(mx, "async_eval", submit)
    session = Session(runner)
    session.add("next", random_prompt(5), logprobs=None)
    session.finish()
    assert session.result("next").tokens == alone("llama", random_prompt(5)).tokens
