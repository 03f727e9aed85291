"""Sessions that are deleted, or refused at their creation, leave nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.training.records import Status
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.session_files import SessionFiles
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ModelLoadingError,
    NotFoundError,
    SessionLostError,
    StorageError,
)
from mlx_parallm.worker.training_ops import CloseTraining, Materialise, OpenTraining
from tests.unit.training.worker_sessions import CONFIG, Open, WorkerTrain, begin, config_of


async def test_a_deleted_session_leaves_nothing(
    opened: Open, tmp_path: Path, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 1000)
    await session.wait_for_steps(1)
    await service.delete(session.config.id)
    with pytest.raises(NotFoundError):
        service.get(session.config.id)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []
    assert service.all() == []


async def test_deleted_sessions_leave_no_files_open(opened: Open) -> None:
    service = opened()
    counts: list[int] = []
    for _ in range(30):
        session = await begin(service)
        await service.step(session.config.id, 1, None)
        counts.append(len(os.listdir("/dev/fd")))
        await service.delete(session.config.id)
    assert max(counts) == min(counts)


async def test_who_waits_for_steps_of_a_deleted_session_is_told(opened: Open) -> None:
    service = opened()
    session = await begin(service)
    # The session says that it runs, so that its follower waits for a step which never comes.
    session.save(status=Status.RUNNING, until=10)
    follower = service.follow(session.config.id, 0)
    step = asyncio.ensure_future(anext(follower, None))
    await asyncio.sleep(0)
    assert not step.done()
    await service.delete(session.config.id)
    assert await step is None


async def test_what_cannot_be_trained_leaves_nothing(opened: Open, tmp_path: Path) -> None:
    service = opened()
    spec = config_of()("", 0).trainable
    with pytest.raises(InvalidRequestError):
        await begin(service, trainable=replace(spec, targets=("nothing",)))
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_a_session_that_is_deleted_amid_a_step_is_gone(
    opened: Open, tmp_path: Path, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service)
    steps = [asyncio.ensure_future(service.step(session.config.id, 5, None)) for _ in range(3)]
    await asyncio.sleep(0)
    await service.delete(session.config.id)
    for result in await asyncio.gather(*steps, return_exceptions=True):
        assert isinstance(result, NotFoundError)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []
    assert not isinstance(train.requests[-1].ops[0], OpenTraining)


class LoadingTrain(WorkerTrain):
    """Its model can be loading: sessions that are opened wait, and none can be closed.

    Attributes:
        loaded: unset while the model is loaded.
        is_waiting: set once a session waits.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loaded = asyncio.Event()
        self.is_waiting = asyncio.Event()

    async def __call__(self, request: TrainingRequest) -> tuple[Any, ...]:
        if not self.loaded.is_set():
            if isinstance(request.ops[0], CloseTraining):
                raise ModelLoadingError(request.model)
            if isinstance(request.ops[0], OpenTraining):
                self.is_waiting.set()
                await self.loaded.wait()
        return await super().__call__(request)

    def has(self, session_id: str) -> bool:
        """True if the engine has a part of the session."""
        try:
            self.execute(Materialise(model=CONFIG.model, session=session_id))
        except SessionLostError:
            return False
        return True


@pytest.fixture
async def loading(tmp_path: Path) -> AsyncIterator[tuple[TrainingService, LoadingTrain]]:
    train = LoadingTrain(tmp_path / "model")
    service = TrainingService(tmp_path / "sessions", train)
    service.start()
    yield service, train
    await service.stop()


async def test_a_session_that_is_deleted_while_its_model_is_loaded_leaves_nothing(
    loading: tuple[TrainingService, LoadingTrain], tmp_path: Path
) -> None:
    service, train = loading
    train.loaded.set()
    session = await begin(service)
    assert train.has(session.config.id)
    train.load(train.folder)
    train.loaded.clear()
    step = asyncio.ensure_future(session.step())
    await train.is_waiting.wait()
    deletion = asyncio.ensure_future(service.delete(session.config.id))
    await asyncio.sleep(0)
    train.loaded.set()
    await deletion
    with pytest.raises(NotFoundError):
        await step
    assert not train.has(session.config.id)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_a_session_can_be_deleted_before_it_has_begun(
    loading: tuple[TrainingService, LoadingTrain], tmp_path: Path
) -> None:
    service, train = loading
    creation = asyncio.ensure_future(begin(service))
    await train.is_waiting.wait()
    (session,) = service.all()
    deletion = asyncio.ensure_future(service.delete(session.config.id))
    await asyncio.sleep(0)
    train.loaded.set()
    await deletion
    with pytest.raises(NotFoundError):
        await creation
    assert not train.has(session.config.id)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_a_session_that_the_disk_refuses_leaves_nothing(
    loading: tuple[TrainingService, LoadingTrain], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, train = loading
    train.loaded.set()

    def refuse(*_: Any) -> None:
        raise StorageError("full")

    monkeypatch.setattr(SessionFiles, "save_state", refuse)
    with pytest.raises(StorageError):
        await begin(service)
    (opening, *_) = train.requests
    assert not train.has(opening.session)
