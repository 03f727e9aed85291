"""Beside streams a gradient goes on by a stage in each round, and stops within one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.turns import TurnClass, Turns, TurnTaker
from mlx_parallm.training.engine import TrainingEngine
from mlx_parallm.training.metrics import TrainingMetrics
from mlx_parallm.training.requests import TrainingEvent, TrainingOp, TrainingRequest
from mlx_parallm.types.errors import RequestAbortedError, SessionLostError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.gradients import GradientForm, GradientResult, LossKind, LossSpec, LossTarget
from mlx_parallm.types.training import Distribution, TrainableSpec
from mlx_parallm.types.work import Event
from mlx_parallm.worker.ops import Op, Pending
from mlx_parallm.worker.training_ops import (
    CloseTraining,
    DropGradient,
    GradientForward,
    OpenTraining,
    ReadTraining,
)
from mlx_parallm.worker.worker import Worker
from tests.unit.training.worker_sessions import EXAMPLES, MODEL, WorkerTrain

SESSION = "a"
# NUM_FORWARDS: of a request.
NUM_FORWARDS = 2
INPUTS = [example.input for example in EXAMPLES]
OPENING = OpenTraining(
    model=MODEL,
    session=SESSION,
    spec=TrainableSpec(targets=("query", "value"), rank=2),
    distribution=Distribution.RADEMACHER,
    samples=INPUTS[:2],
    takes_gradients=True,
)
FORWARD = GradientForward(
    model=MODEL,
    session=SESSION,
    inputs=INPUTS,
    loss=LossSpec(kind=LossKind.CROSS_ENTROPY),
    targets=[LossTarget(label=example.label) for example in EXAMPLES],
    divisor=1.0,
)


class Stream(TurnTaker):
    """A model that always decodes, in no time."""

    turn_class = TurnClass.STREAMS

    def __init__(self) -> None:
        self.num_steps = 0

    @property
    def waiting_since_s(self) -> float:
        return 0.0

    def has_work(self) -> bool:
        return True

    def step(self, within_s: float | None = None) -> Sequence[Event]:
        self.num_steps += 1
        return ()


class CountedOp:
    """An op whose stages are counted. Implements ``Pending``."""

    def __init__(self, pending: Pending[Any], note: Callable[[], None]) -> None:
        self._pending, self._note = pending, note

    @property
    def num_stages(self) -> int:
        return self._pending.num_stages

    def advance(self) -> None:
        self._note()
        self._pending.advance()

    def wait(self) -> Any:
        for _ in range(self.num_stages):
            self._note()
        return self._pending.wait()


class CountingWorker:
    """Counts the stages that a worker computes.

    Attributes:
        num_stages: of all ops.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.num_stages = 0
        self.execute = worker.execute

    def begin(self, op: Op[Any]) -> CountedOp:
        return CountedOp(self._worker.begin(op), self._note)

    def _note(self) -> None:
        self.num_stages += 1


class Trial:
    """Training beside a stream.

    Attributes:
        training: the turns of a session with gradients.
        stream: the turns of the stream.
        events: all that were delivered.
    """

    def __init__(self, folder: Path) -> None:
        self._worker = CountingWorker(WorkerTrain(folder).worker)
        seconds = count()
        worker: Any = self._worker
        metrics = TrainingMetrics(MetricFamilies())
        self.training = TrainingEngine(worker, metrics, clock=lambda: next(seconds))
        self.stream, self.events = Stream(), list[Event]()
        self._turns = Turns(self.events.extend)
        self.open()

    def open(self) -> None:
        assert self._worker.execute(OPENING).gradients is GradientForm.STAGED

    def submit(self, name: str, *ops: TrainingOp) -> None:
        self.training.submit(
            TrainingRequest(request_id=name, model=MODEL, session=SESSION, ops=ops)
        )

    def round(self) -> int:
        """Run a round; return how many stages it had."""
        before = self._worker.num_stages
        self._turns.take([self.stream, self.training])
        return self._worker.num_stages - before

    def rounds(self) -> list[int]:
        """Run rounds until nothing is left to train; return the stages of each."""
        stages: list[int] = []
        while self.training.has_work():
            stages.append(self.round())
        return stages

    def losses(self, event: Event) -> np.ndarray:
        """Return the losses of a request that has ended."""
        assert isinstance(event, TrainingEvent), event
        results = [each for each in event.results if isinstance(each, GradientResult)]
        return np.concatenate([each.losses for each in results])


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def submit_gradient(trial: Trial, name: str) -> None:
    ops = [DropGradient(model=MODEL, session=SESSION), *[FORWARD] * NUM_FORWARDS]
    trial.submit(name, *ops)


def test_each_decode_step_is_followed_by_a_stage(trial: Trial) -> None:
    submit_gradient(trial, "a")
    stages = trial.rounds()
    assert stages == [1] * len(stages)
    assert trial.stream.num_steps == len(stages)
    # Two layers forwards, the head, and both layers backwards; and the op before all.
    assert len(stages) == 1 + NUM_FORWARDS * (2 + 1 + 2)


#: ``MOMENTS``: rounds after which the work is to stop, in the middle of the first forward, at
#: its last stage, and in the second.
MOMENTS = (1, 2, 4, 5, 6, 8)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_pause_computes_nothing_more_and_loses_nothing(trial: Trial, moment: int) -> None:
    submit_gradient(trial, "whole")
    trial.rounds()
    submit_gradient(trial, "paused")
    for _ in range(moment):
        trial.round()
    trial.training.is_paused = True
    assert [trial.round() for _ in range(3)] == [0] * 3
    trial.training.is_paused = False
    trial.rounds()
    whole, paused = map(trial.losses, trial.events)
    np.testing.assert_array_equal(paused, whole)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("is_closed", [False, True])
def test_what_is_cancelled_computes_nothing_more_and_leaves_nothing(
    trial: Trial, moment: int, is_closed: bool
) -> None:
    submit_gradient(trial, "whole")
    trial.rounds()
    submit_gradient(trial, "cancelled")
    for _ in range(moment):
        trial.round()
    if is_closed:
        close = CloseTraining(model=MODEL, session=SESSION)
        closing = TrainingRequest(request_id="close", model=MODEL, session=SESSION, ops=(close,))
        (event, _) = trial.training.submit(closing)
        trial.open()
    else:
        (event,) = trial.training.cancel("cancelled")
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, RequestAbortedError)
    assert [trial.round() for _ in range(3)] == [0] * 3
    submit_gradient(trial, "again")
    trial.rounds()
    whole, again = map(trial.losses, trial.events)
    np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sleep_drops_what_is_computed(trial: Trial, moment: int) -> None:
    submit_gradient(trial, "a")
    for _ in range(moment):
        trial.round()
    # A server that sleeps has paused before.
    trial.training.is_paused = True
    trial.training.forget(MODEL)
    assert [trial.round() for _ in range(3)] == [0] * 3
    trial.training.is_paused = False
    trial.submit("b", ReadTraining(model=MODEL, session=SESSION))
    assert trial.rounds() == [0, 0]
    for event in trial.events:
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, SessionLostError)
