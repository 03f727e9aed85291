"""Training sessions of a model that generates, while an operator changes or frees its weights."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.config import AdapterConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.training.records import Example, SessionConfig, Status
from mlx_parallm.training.service import ASLEEP, TrainingService
from mlx_parallm.training.session import Session
from mlx_parallm.types.errors import ConflictError
from mlx_parallm.types.training import ChoiceInput, TrainableSpec
from tests.integration.test_live_adapters import generate
from tests.integration.test_live_weights import NAME, save
from tests.unit.training.worker_sessions import CONFIG

pytestmark = pytest.mark.slow

EXAMPLES = [
    Example(ChoiceInput((10 + number, 20, 30 + number), ((40,), (50,))), number % 2)
    for number in range(8)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {scale: save(root / str(scale), scale) for scale in (1.0, 0.5)}


@pytest.fixture
def started(folders: dict[float, Path]) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(
        EngineConfig(
            models=(ModelConfig(path=str(folders[1.0]), served_names=(NAME,)),),
            scheduler=SchedulerConfig(max_num_seqs=8),
            adapters=AdapterConfig(allowed_roots=(str(folders[1.0].parent),)),
        )
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
async def service(started: AsyncEngine, tmp_path: Path) -> AsyncIterator[TrainingService]:
    service = TrainingService(tmp_path / "sessions", started.train)
    started.control.watchers.append(service)
    service.start()
    yield service
    started.control.watchers.remove(service)
    await service.stop()


async def begin(service: TrainingService) -> Session:
    spec = TrainableSpec(targets=("self_attn.o_proj",), top=1, rank=2, alpha=4.0)

    def make(name: str, time: int) -> SessionConfig:
        return replace(CONFIG, id=name, model=NAME, trainable=spec, created_at=time)

    return await service.create(make, EXAMPLES)


async def wait_for(session: Session, status: Status) -> None:
    while session.state.status is not status:
        await session.wait_for_steps(session.num_steps)


@pytest.mark.parametrize("is_running", [False, True])
async def test_new_weights_pause_a_session_until_its_own_are_back(
    started: AsyncEngine, service: TrainingService, folders: dict[float, Path], is_running: bool
) -> None:
    session = await begin(service)
    await service.step(session.config.id, 2, None)
    base = session.state.base or ""
    if is_running:
        service.run(session.config.id, 100_000)
        await session.wait_for_steps(5)
    await started.control.update_weights_from_folder(str(folders[0.5]))
    await wait_for(session, Status.PAUSED)
    digests = re.findall(r"\b[0-9a-f]{16}\b", session.state.reason or "")
    assert len(set(digests)) == 2
    assert base[:16] in digests
    num_steps = session.num_steps
    service.resume(session.config.id)
    if session.state.status is Status.READY:
        with pytest.raises(ConflictError, match="other weights"):
            await service.step(session.config.id, 1, None)
    await wait_for(session, Status.PAUSED)
    assert session.num_steps == num_steps
    await started.control.update_weights_from_folder(str(folders[1.0]))
    service.resume(session.config.id)
    if session.state.status is Status.READY:
        await service.step(session.config.id, 1, None)
    await session.wait_for_steps(num_steps)
    await service.delete(session.config.id)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_session_goes_on_after_a_sleep_as_without_it(
    started: AsyncEngine, service: TrainingService, level: int, mode: PauseMode
) -> None:
    session, again = await begin(service), await begin(service)
    service.run(session.config.id, 40)
    await session.wait_for_steps(3)
    await started.control.sleep(level, mode)
    assert (session.state.status, session.state.reason) == (Status.PAUSED, ASLEEP)
    num_steps = session.num_steps
    await asyncio.sleep(0.1)
    assert session.num_steps == num_steps < 40
    await started.control.wake_up()
    await wait_for(session, Status.READY)
    await wait_for(again, Status.READY)
    await service.step(again.config.id, 40, None)
    assert session.files.log() == again.files.log()
    assert session.num_steps == 40


async def test_a_session_can_be_deleted_while_the_server_sleeps(
    started: AsyncEngine, service: TrainingService
) -> None:
    session = await begin(service)
    service.run(session.config.id, 10_000)
    await session.wait_for_steps(3)
    await started.control.sleep(1, PauseMode.KEEP)
    await service.delete(session.config.id)
    await started.control.wake_up()
    assert service.all() == []


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_delays_steps_and_loses_none(
    started: AsyncEngine, service: TrainingService, mode: PauseMode
) -> None:
    session, again = await begin(service), await begin(service)
    service.run(session.config.id, 30)
    for after in (3, 8):
        await session.wait_for_steps(after)
        await started.control.pause(mode)
        num_steps = session.num_steps
        await asyncio.sleep(0.1)
        assert session.num_steps <= num_steps + 1
        await started.control.resume()
    await wait_for(session, Status.READY)
    await service.step(again.config.id, 30, None)
    assert session.files.log() == again.files.log()


async def test_what_a_session_publishes_changes_no_other_session(
    started: AsyncEngine, service: TrainingService
) -> None:
    # A layer that both a served adapter and a session change must be wrapped once.
    logs: list[bytes] = []
    for _ in range(2):
        session = await begin(service)
        await service.step(session.config.id, 5, None)
        upload = AdapterUpload(name="film", weights=await session.weights(), replaces=True)
        await started.control.load_adapter(upload, model=NAME)
        await generate(started, "film", str(len(logs)))
        await service.step(session.config.id, 5, None)
        logs.append(session.files.log())
        await service.delete(session.config.id)
    assert logs[0] == logs[1]
    await started.control.unload_adapter("film")
