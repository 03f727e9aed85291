"""Validation data of sessions: when steps are judged by them, and which checkpoint is the best."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.training.gradients import steps
from mlx_parallm.training.records import GradientRecord, SessionConfig, Status
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.session import Session
from mlx_parallm.training.settings import GradientSettings
from mlx_parallm.types.errors import ConflictError, SessionLostError
from mlx_parallm.types.gradients import LossKind, LossSpec, OptimiserKind
from mlx_parallm.worker.training_ops import ForgetTraining, PairForward
from tests.unit.training.worker_sessions import CONFIG, EXAMPLES, MODEL, WorkerTrain, config_of

#: WRONG: the more a session learns, the worse it does on these.
WRONG = [replace(example, label=1 - example.label) for example in EXAMPLES]


def settings_of(eval_every: int | None = 2) -> Callable[[str, int], SessionConfig]:
    return config_of(
        estimator=GradientSettings(optimizer=OptimiserKind.ADAMW, learning_rate=0.05),
        loss=LossSpec(kind=LossKind.CROSS_ENTROPY),
        trainable=replace(CONFIG.trainable, trains_first=True),
        eval_every=eval_every,
    )


@pytest.fixture
def train(tmp_path: Path) -> WorkerTrain:
    return WorkerTrain(tmp_path / "model")


@asynccontextmanager
async def opened(train: WorkerTrain, run: Any = None) -> AsyncIterator[TrainingService]:
    """Open the sessions of one folder, as a new process does."""
    service = TrainingService(train.folder.parent / "sessions", run or train)
    service.start()
    yield service
    await service.stop()


def judged(session: Session) -> dict[int, float]:
    """Return the validation losses of the steps that have one."""
    losses: dict[int, float] = {}
    for record in session.files.records():
        assert isinstance(record, GradientRecord)
        if record.validation_loss is not None:
            losses[record.step] = record.validation_loss
    return losses


async def run(service: TrainingService, session: Session, num_steps: int) -> None:
    service.run(session.config.id, num_steps)
    async for _ in service.follow(session.config.id, session.num_steps):
        pass


async def test_the_best_checkpoint_stays_beside_the_latest(train: WorkerTrain) -> None:
    async with opened(train) as service:
        session = await service.create(settings_of(), EXAMPLES, validation=WRONG)
        await run(service, session, 11)
        losses = judged(session)
        # The end of a run is evaluated, too.
        assert list(losses) == [2, 4, 6, 8, 10, 11]
        best = min(losses, key=lambda step: losses[step])
        assert best < 8
        assert session.best == best
        assert session.kept == [best, 8, 10, 11]
        scores = await session.evaluate(WRONG)
        assert losses[11] == scores.loss
        assert isinstance(session.last, GradientRecord)
        assert session.last.validation_accuracy == scores.accuracy
    train.load(train.folder)
    async with opened(train) as service:
        again = service.get(session.config.id)
        assert (again.best, again.kept, judged(again)) == (best, [best, 8, 10, 11], losses)
        assert len(again.validation) == len(WRONG)
        await again.step()
        assert again.kept == [best, 10, 11, 12]


async def test_an_epoch_is_evaluated_by_default(train: WorkerTrain) -> None:
    async with opened(train) as service:
        session = await service.create(settings_of(eval_every=None), EXAMPLES, validation=WRONG)
        for _ in range(5):
            await session.step()
        epoch = len(EXAMPLES) // CONFIG.batch_size
        assert list(judged(session)) == list(range(epoch, 6, epoch))
        other = await service.create(settings_of(), EXAMPLES)
        await other.step()
        await other.step()
        assert (judged(other), other.best) == ({}, None)


class Losing:
    """Loses sessions where they are evaluated, now and then."""

    def __init__(self, train: WorkerTrain) -> None:
        self._train, self.num_losses = train, 0

    async def __call__(self, request: TrainingRequest) -> tuple[Any, ...]:
        if isinstance(request.ops[0], PairForward) and self.num_losses % 2 == 0:
            self.num_losses += 1
            self._train.execute(ForgetTraining(model=MODEL))
            raise SessionLostError
        self.num_losses += isinstance(request.ops[0], PairForward)
        return await self._train(request)


async def test_a_step_whose_evaluation_was_lost_is_made_again(
    train: WorkerTrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.training.service.RETRY_S", 0)
    async with opened(train) as service:
        session = await service.create(settings_of(), EXAMPLES, validation=WRONG)
        await run(service, session, 6)
        undisturbed, digest = judged(session), (await session.weights()).digest
    losing = Losing(train)
    async with opened(train, losing) as service:
        session = await service.create(settings_of(), EXAMPLES, validation=WRONG)
        await run(service, session, 6)
        assert losing.num_losses > 2
        assert judged(session) == undisturbed
        assert (await session.weights()).digest == digest
        assert session.num_steps == 6


async def test_a_validation_loss_that_is_not_finite_pauses(
    train: WorkerTrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing_finite(*args: Any) -> Any:
        return replace(await scores_now(*args), loss=float("nan"))

    scores_now = steps.scores_now
    async with opened(train) as service:
        session = await service.create(settings_of(eval_every=1), EXAMPLES, validation=WRONG)
        monkeypatch.setattr(steps, "scores_now", nothing_finite)
        with pytest.raises(ConflictError, match="validation loss of step 1 is nan"):
            await service.step(session.config.id, 1, None)
        assert (session.num_steps, session.state.status) == (0, Status.PAUSED)
