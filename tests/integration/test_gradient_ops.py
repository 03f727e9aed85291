"""Ops of gradients on a worker with a tiny masked LM."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.types.errors import ConflictError, SessionLostError
from mlx_parallm.types.gradients import (
    GradientForm,
    GradientResult,
    LossKind,
    LossSpec,
    LossTarget,
    OptimiserSettings,
    TrainingArrays,
)
from mlx_parallm.types.training import Distribution, TrainableSpec
from mlx_parallm.worker.training.session import GRADIENT_COST
from mlx_parallm.worker.training_ops import (
    ApplyGradient,
    CloseTraining,
    DropGradient,
    GradientForward,
    Materialise,
    OpenTraining,
    ReadTraining,
)
from tests.unit.training.worker_sessions import EXAMPLES, MODEL, WorkerTrain

SPEC = TrainableSpec(targets=("query", "value"), layers=(1,), rank=2, alpha=4.0)
INPUTS = [example.input for example in EXAMPLES]
TARGETS = [LossTarget(label=example.label) for example in EXAMPLES]


class Session:
    """A session on a worker, whose ops are pickled as those for other processes are."""

    def __init__(self, train: WorkerTrain, name: str, **options: Any) -> None:
        """Open the session."""
        self._train = train
        self._name = name
        self.info = self.execute(
            OpenTraining,
            **{
                "spec": SPEC,
                "distribution": Distribution.RADEMACHER,
                "samples": INPUTS[:2],
                "takes_gradients": True,
            }
            | options,
        )

    def execute(self, kind: type, **fields: Any) -> Any:
        op = kind(model=MODEL, session=self._name, **fields)
        return self._train.execute(pickle.loads(pickle.dumps(op)))

    def forward(self, rows: slice = slice(None)) -> GradientResult:
        return self.execute(
            GradientForward,
            inputs=INPUTS[rows],
            loss=LossSpec(kind=LossKind.CROSS_ENTROPY),
            targets=TARGETS[rows],
            divisor=float(len(INPUTS)),
        )

    def step(self, number: int) -> float:
        """Make a step of two micro-batches; return the gradient's norm."""
        self.forward(slice(4))
        self.forward(slice(4, None))
        return self.execute(
            ApplyGradient,
            number=number,
            learning_rate=1e-2,
            settings=OptimiserSettings(weight_decay=0.01),
        )

    def state(self) -> TrainingArrays:
        return self.execute(ReadTraining)


@pytest.fixture(name="train")
def made_train(tmp_path: Path) -> WorkerTrain:
    return WorkerTrain(tmp_path)


def assert_same(state: TrainingArrays, other: TrainingArrays) -> None:
    for field in ("theta", "first_moment", "second_moment"):
        np.testing.assert_array_equal(getattr(state, field), getattr(other, field))


def test_steps_after_a_state_have_the_bits_of_those_that_went_on(train: WorkerTrain) -> None:
    session = Session(train, "a")
    assert session.info.gradients is GradientForm.STAGED
    assert session.info.keeps_prefix
    norms = [session.step(number) for number in (1, 2)]
    state = session.state()
    norms += [session.step(number) for number in (3, 4)]
    resumed = Session(train, "b", state=state)
    assert_same(resumed.state(), state)
    assert [resumed.step(number) for number in (3, 4)] == norms[2:]
    assert_same(resumed.state(), session.state())
    again = Session(train, "c")
    assert [again.step(number) for number in range(1, 5)] == norms
    assert_same(again.state(), session.state())


def test_a_step_lowers_the_loss_of_what_is_served(train: WorkerTrain) -> None:
    session = Session(train, "a")
    before = session.forward()
    session.execute(DropGradient)
    for number in range(1, 6):
        session.step(number)
    after = session.forward()
    assert after.losses.sum() < before.losses.sum()
    # What enters the trained layer was kept by the first forward.
    assert (before.lookups, before.hits) == (len(INPUTS), 0)
    assert (after.lookups, after.hits, after.frozen_tokens) == (len(INPUTS), len(INPUTS), 0)
    adapter = session.execute(Materialise)
    theta, rank = session.state().theta, SPEC.rank
    second = [to_mlx(adapter.modules[path].b) for path in session.info.paths]
    served = np.concatenate([np.array(each).T.reshape(-1) for each in second])
    assert served.size == rank * sum(each.shape[0] for each in second)
    np.testing.assert_array_equal(served, theta)


def test_a_dropped_gradient_is_not_applied(train: WorkerTrain) -> None:
    session = Session(train, "a")
    session.forward()
    session.execute(DropGradient)
    with pytest.raises(ConflictError, match="there is no gradient"):
        session.execute(ApplyGradient, number=1, learning_rate=1e-2, settings=OptimiserSettings())


def test_sessions_without_gradients_take_none(train: WorkerTrain) -> None:
    session = Session(train, "a", takes_gradients=False)
    assert session.info.gradients is None
    most = Session(train, "b").info.forwards.max_tokens
    assert session.info.forwards.max_tokens == GRADIENT_COST * most
    with pytest.raises(ConflictError, match="without gradients"):
        session.forward()


def test_a_state_of_other_layers_is_refused(train: WorkerTrain) -> None:
    state = TrainingArrays(*(np.zeros(3, np.float32) for _ in range(3)))
    with pytest.raises(ConflictError, match="other layers"):
        Session(train, "a", state=state)


def test_a_closed_session_is_lost(train: WorkerTrain) -> None:
    session = Session(train, "a")
    session.execute(CloseTraining)
    with pytest.raises(SessionLostError):
        session.forward()
