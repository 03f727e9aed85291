"""The turns of training sessions on the engine thread."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.training.engine import TrainingEngine
from mlx_parallm.training.metrics import TrainingMetrics
from mlx_parallm.training.requests import TrainingEvent, TrainingRequest
from mlx_parallm.types.errors import InvalidRequestError, StepError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.training import PairResult
from mlx_parallm.worker.training_ops import (
    CloseTraining,
    ForgetTraining,
    Materialise,
)


class StagedOp:
    """An op of some stages, which take a second each. Implements ``Pending``."""

    def __init__(self, worker: FakeWorker, name: str, num_stages: int) -> None:
        self._worker = worker
        self._name = name
        self.num_stages = num_stages

    def advance(self) -> None:
        self._stage()

    def wait(self) -> Any:
        while self.num_stages:
            self._stage()
        return PairResult([], lookups=2, hits=1)

    def _stage(self) -> None:
        self.num_stages -= 1
        self._worker.now_s += 1.0
        self._worker.stages.append(self._name)


class FakeWorker:
    """Runs an op in some stages; notes whose they are."""

    def __init__(self, num_stages: int = 1) -> None:
        self.stages: list[str] = []
        self.executed: list[CloseTraining | ForgetTraining] = []
        self.now_s = 0.0
        self.failure: Exception | None = None
        self._num_stages = num_stages

    def execute(self, op: CloseTraining | ForgetTraining) -> None:
        self.executed.append(op)

    def begin(self, op: Materialise) -> StagedOp:
        if self.failure is not None:
            raise self.failure
        return StagedOp(self, op.session, self._num_stages)


def engine_of(worker: FakeWorker) -> TrainingEngine:
    metrics = TrainingMetrics(MetricFamilies())
    fake: Any = worker
    return TrainingEngine(fake, metrics, clock=lambda: worker.now_s)


def request(name: str, num_ops: int = 1, number: int = 0) -> TrainingRequest:
    op = Materialise(model="m", session=name)
    return TrainingRequest(
        request_id=f"{name}{number}", model="m", session=name, ops=(op,) * num_ops
    )


def run(engine: TrainingEngine, within_s: float | None = None) -> list[Any]:
    """Step until nothing is left; return the events."""
    events: list[Any] = []
    while engine.has_work():
        events += engine.step(within_s) or ()
    return events


def test_sessions_take_turns_op_by_op() -> None:
    worker = FakeWorker()
    engine = engine_of(worker)
    for name, count in (("a", 3), ("b", 2), ("a", 1)):
        engine.submit(request(name, count, number=count))
    events = run(engine)
    assert worker.stages == ["a", "b", "a", "b", "a", "a"]
    assert [event.request_id for event in events] == ["b2", "a3", "a1"]
    assert all(isinstance(event, TrainingEvent) for event in events)


def test_beside_streams_a_turn_has_as_many_stages_as_fit() -> None:
    worker = FakeWorker(num_stages=5)
    engine = engine_of(worker)
    engine.submit(request("a"))
    counts: list[int] = []
    while engine.has_work():
        before = len(worker.stages)
        engine.step(2.0)
        counts.append(len(worker.stages) - before)
    assert counts == [2, 2, 1]


def test_at_least_one_stage_is_computed_in_a_turn() -> None:
    worker = FakeWorker(num_stages=3)
    engine = engine_of(worker)
    engine.submit(request("a"))
    run(engine, within_s=0.0)
    assert worker.stages == ["a"] * 3


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(InvalidRequestError("no"), InvalidRequestError), (RuntimeError("bug"), StepError)],
)
def test_an_op_that_fails_ends_its_request_alone(failure: Exception, kind: type) -> None:
    worker = FakeWorker()
    engine = engine_of(worker)
    engine.submit(request("a", 2))
    worker.failure = failure
    (event,) = run(engine)
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, kind)
    worker.failure = None
    engine.submit(request("a", 2))
    assert isinstance(run(engine)[0], TrainingEvent)


def test_requests_end_before_their_ops() -> None:
    worker = FakeWorker()
    engine = engine_of(worker)
    for number in range(3):
        engine.submit(request("a", 2, number))
    engine.step()
    assert engine.abort("a0")
    assert not engine.abort("a0")
    (event,) = engine.cancel("a2")
    assert isinstance(event, ErrorEvent)
    assert engine.num_requests == 1
    assert [each.request_id for each in run(engine)] == ["a1"]


def test_a_session_is_closed_at_once_with_all_that_waits_for_it() -> None:
    worker = FakeWorker(num_stages=3)
    engine = engine_of(worker)
    for name in ("a", "b"):
        engine.submit(request(name))
    engine.step(0.0)
    engine.is_paused = True
    close = CloseTraining(model="m", session="a")
    events = engine.submit(
        TrainingRequest(request_id="close", model="m", session="a", ops=(close,))
    )
    assert [event.request_id for event in events] == ["a0", "close"]
    assert isinstance(events[0], ErrorEvent)
    assert worker.executed == [close]
    engine.is_paused = False
    assert [event.request_id for event in run(engine)] == ["b0"]


def test_a_model_whose_sessions_were_forgotten_begins_its_ops_anew() -> None:
    worker = FakeWorker(num_stages=3)
    engine = engine_of(worker)
    engine.submit(request("a", 2))
    for _ in range(4):
        engine.step(0.0)
    assert len(worker.stages) == 4
    engine.forget("other")
    engine.forget("m")
    engine.forget("m")
    assert worker.executed == [ForgetTraining(model="m")]
    run(engine)
    assert len(worker.stages) == 4 + 6


def test_nothing_runs_during_a_pause() -> None:
    engine = engine_of(FakeWorker())
    engine.submit(request("a"))
    engine.is_paused = True
    assert not engine.has_work()
    engine.is_paused = False
    assert engine.has_work()
