"""An engine over a runner whose steps wait, for tests of ``OfflineEngine``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlx_parallm.offline.engine import OfflineEngine
from tests.scripted_engine import engine_of
from tests.scripted_process import builder
from tests.unit.offline.gated_engine import Gate


@pytest.fixture
def runner() -> Gate:
    return Gate()


@pytest.fixture
def engine(runner: Gate) -> Iterator[OfflineEngine]:
    engine = OfflineEngine(engine_of(builder(runner)))
    yield engine
    runner.open.set()
    engine.close()
