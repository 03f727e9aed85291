"""Sessions of one folder, on a worker of the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.session_store import SessionLimits
from tests.unit.training.worker_sessions import Open, WorkerTrain


@pytest.fixture
def train(tmp_path: Path) -> WorkerTrain:
    return WorkerTrain(tmp_path / "model")


@pytest.fixture
async def opened(tmp_path: Path, train: WorkerTrain) -> AsyncIterator[Open]:
    """Open the sessions of one folder, as a new process does."""
    services: list[TrainingService] = []

    def open_service(limits: SessionLimits | None = None) -> TrainingService:
        services.append(TrainingService(tmp_path / "sessions", train, limits))
        services[-1].start()
        return services[-1]

    yield open_service
    for service in services:
        await service.stop()
