"""A service of batches in a folder of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.batch_jobs.service.batch_world import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "data")
    yield world
    await world.service.stop()
