"""The perturbed copies of a session are served, and their losses reported or judged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Status
from mlx_parallm.training.service import MAX_ABORTED, MAX_LOST, TrainingService
from mlx_parallm.training.settings import MezoSettings
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    NotFoundError,
    PausedError,
    RequestAbortedError,
    RequestLostError,
)
from tests.unit.training.worker_sessions import Open, WorkerTrain, begin, mezo, other_weights


async def test_reported_losses_without_a_finite_step_can_be_reported_anew(
    tmp_path: Path, train: WorkerTrain
) -> None:
    service = TrainingService(tmp_path / "sessions", train, adapters=FakeAdapters())
    service.start()
    session = await begin(service, measure=None, estimator=MezoSettings(normalises=False))
    await service.ask(session.config.id)
    with pytest.raises(ConflictError, match="not finite"):
        await service.tell(session.config.id, lambda copies: [1e300] + [0.0] * (len(copies) - 1))
    assert session.state.status is Status.READY
    await service.tell(session.config.id, lambda copies: [1.0] * len(copies))
    assert session.num_steps == 1
    await service.stop()


async def test_copies_of_a_lost_engine_are_the_same(
    tmp_path: Path, train: WorkerTrain, opened: Open
) -> None:
    session = await begin(opened(), measure=None)
    before = [copy.weights.digest for copy in await session.perturbed()]
    train.load(tmp_path / "model")
    assert [copy.weights.digest for copy in await session.perturbed()] == before
    record = mezo(await session.learn([1.0, 0.5]))
    assert (record.step, record.loss_plus, record.loss_minus) == (1, 1.0, 0.5)
    after = [copy.weights.digest for copy in await session.perturbed()]
    assert not set(after) & set(before)


async def test_copies_of_other_weights_are_refused(
    tmp_path: Path, train: WorkerTrain, opened: Open
) -> None:
    session = await begin(opened(), measure=None)
    await session.perturbed()
    train.load(other_weights(tmp_path / "other"))
    with pytest.raises(ConflictError, match="other weights"):
        await session.perturbed()
    with pytest.raises(ConflictError, match="other weights"):
        await session.learn([1.0, 0.5])
    assert session.num_steps == 0


class FakeAdapters:
    """Serves adapters by name, slowly.

    Attributes:
        served: the names.
        has_begun: set once one is served.
    """

    def __init__(self) -> None:
        self.served: set[str] = set()
        self.has_begun = asyncio.Event()

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> Any:
        assert model is not None
        await asyncio.sleep(0.01)
        assert not upload.is_cached
        self.served.add(upload.name)
        self.has_begun.set()

    async def unload_adapter(self, name: str) -> Any:
        if name not in self.served:
            raise NotFoundError("It is not loaded.")
        self.served.remove(name)


async def test_a_judged_run_that_is_deleted_leaves_no_adapter(
    tmp_path: Path, train: WorkerTrain
) -> None:
    adapters, is_dropping = FakeAdapters(), asyncio.Event()
    unload = adapters.unload_adapter

    async def unload_slowly(name: str) -> Any:
        is_dropping.set()
        await asyncio.sleep(0.01)
        return await unload(name)

    async def judged(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        return [float(name.endswith("+"))] * len(examples)

    adapters.unload_adapter = unload_slowly
    service = TrainingService(tmp_path / "sessions", train, adapters=adapters, rewards=judged)
    service.start()
    session = await begin(service, measure=Measure.REWARD)
    service.run(session.config.id, 1000)
    await is_dropping.wait()
    assert len(adapters.served) == 2
    # The run is cancelled while it drops the copies of a step.
    await service.delete(session.config.id)
    assert adapters.served == set()
    await service.stop()


async def test_a_session_that_is_deleted_while_it_asks_leaves_no_adapter(
    tmp_path: Path, train: WorkerTrain
) -> None:
    adapters = FakeAdapters()
    service = TrainingService(tmp_path / "sessions", train, adapters=adapters)
    service.start()
    session = await begin(service, measure=None)
    asking = asyncio.ensure_future(service.ask(session.config.id))
    await adapters.has_begun.wait()
    await service.delete(session.config.id)
    await asyncio.gather(asking, return_exceptions=True)
    assert adapters.served == set()
    with pytest.raises(NotFoundError):
        await service.tell(session.config.id, lambda _: [1.0, 0.5])
    await service.stop()


Judged = Callable[..., TrainingService]


@pytest.fixture
async def judged(tmp_path: Path, train: WorkerTrain) -> AsyncIterator[Judged]:
    """Open sessions whose copies are served by ``FakeAdapters``, and judged by a function."""
    services: list[TrainingService] = []

    def open_service(rewards: Any) -> TrainingService:
        service = TrainingService(
            tmp_path / "sessions", train, adapters=FakeAdapters(), rewards=rewards
        )
        services.append(service)
        service.start()
        return service

    yield open_service
    for service in services:
        await service.stop()


@pytest.mark.parametrize(
    ("failure", "num_tries"),
    [(RequestAbortedError("gone"), MAX_ABORTED), (RequestLostError("gone"), MAX_LOST)],
)
async def test_a_run_whose_samples_are_always_aborted_or_lost_is_paused(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, failure: Exception, num_tries: int
) -> None:
    monkeypatch.setattr("mlx_parallm.training.service.RETRY_S", 0.0)
    waits = [PausedError(), EngineDeadError("starting")] * 30
    outcomes = iter([*waits, None, *[failure] * 30])

    async def abort(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        outcome = None if name.endswith("-") else next(outcomes)
        if outcome is not None:
            raise outcome
        return [1.0] * len(examples)

    service = judged(abort)
    session = await begin(service, measure=Measure.REWARD)
    service.run(session.config.id, 10)
    async for _ in service.follow(session.config.id, 0):
        pass
    assert session.state.status is Status.PAUSED
    assert session.state.reason == f"The step was tried {num_tries} times: gone"
    assert session.num_steps == 1, "a pause of the server may take long"


async def test_a_pause_returns_once_a_judged_step_was_made(judged: Judged) -> None:
    asked_for, judge = asyncio.Event(), asyncio.Event()

    async def wait(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        asked_for.set()
        await judge.wait()
        return [float(name.endswith("+"))] * len(examples)

    service = judged(wait)
    session = await begin(service, measure=Measure.REWARD)
    service.run(session.config.id, 10)
    await asked_for.wait()
    pause = asyncio.ensure_future(service.pause(session.config.id))
    await asyncio.sleep(0)
    assert not pause.done()
    judge.set()
    await pause
    assert (session.num_steps, session.state.status) == (1, Status.PAUSED)


async def test_a_rollout_that_fails_ends_those_of_the_other_copies(judged: Judged) -> None:
    ended: list[str] = []

    async def fail_one(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        if name.endswith("-"):
            raise ConflictError("no reward")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
        return []

    service = judged(fail_one)
    session = await begin(service, measure=Measure.REWARD)
    with pytest.raises(ConflictError, match="no reward"):
        await service.step(session.config.id, 1, None)
    assert [name[-1] for name in ended] == ["+"]
    assert session.state.reason == "no reward"
