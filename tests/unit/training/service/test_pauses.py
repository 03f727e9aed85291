"""Sessions run in the background, and are paused and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_parallm.training.records import Status
from mlx_parallm.training.service import ASLEEP
from mlx_parallm.types.errors import ConflictError, EngineDeadError, ModelNotFoundError
from tests.unit.training.worker_sessions import Open, WorkerTrain, begin, other_weights


async def test_weights_of_other_content_are_refused(
    opened: Open, train: WorkerTrain, tmp_path: Path
) -> None:
    service = opened()
    session = await begin(service)
    await session.step()
    train.load(other_weights(tmp_path / "other"))
    with pytest.raises(ConflictError, match="other weights"):
        await service.step(session.config.id, 1, None)
    assert session.state.status is Status.PAUSED
    assert session.state.base is not None
    assert session.state.base[:16] in (session.state.reason or "")
    train.load(train.folder)
    service.resume(session.config.id)
    assert (await session.step()).record.step == 2


async def test_a_run_goes_on_in_the_background_and_in_the_next_process(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 40)
    with pytest.raises(ConflictError, match="running"):
        service.run(session.config.id, 1)
    with pytest.raises(ConflictError, match="running"):
        await service.step(session.config.id, 1, None)
    train.fail = EngineDeadError("dead")
    await session.wait_for_steps(3)
    await service.stop()
    assert 3 < session.files.num_steps < 40
    later = opened()
    records = [record async for record in later.follow(session.config.id, 2)]
    assert [record.step for record in records] == list(range(3, 41))
    assert later.get(session.config.id).state.status is Status.READY


async def test_a_pause_ends_a_run_until_it_is_resumed(opened: Open) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 30)
    await session.wait_for_steps(2)
    await service.pause(session.config.id)
    num_steps = session.num_steps
    followed = [record.step async for record in service.follow(session.config.id, 0)]
    with pytest.raises(ConflictError, match="paused"):
        await service.step(session.config.id, 1, None)
    assert session.num_steps == num_steps == len(followed), "no step is in flight after a pause"
    service.resume(session.config.id)
    records = [record.step async for record in service.follow(session.config.id, len(followed))]
    assert followed + records == list(range(1, 31))


async def test_a_sleep_pauses_sessions_until_the_server_is_awake(opened: Open) -> None:
    service = opened()
    running, ready, paused = [await begin(service) for _ in range(3)]
    await service.pause(paused.config.id)
    service.run(running.config.id, 30)
    await running.wait_for_steps(2)
    service.on_sleep()
    await running.settle()
    num_steps = running.num_steps
    for session in (running, ready):
        assert (session.state.status, session.state.reason) == (Status.PAUSED, ASLEEP)
    with pytest.raises(ConflictError, match="asleep"):
        await service.step(ready.config.id, 1, None)
    assert running.num_steps == num_steps < 30
    service.on_wake()
    [_ async for _ in service.follow(running.config.id, 0)]
    assert running.num_steps == 30
    statuses = [session.state.status for session in (running, ready, paused)]
    assert statuses == [Status.READY, Status.READY, Status.PAUSED]


async def test_a_sleep_ends_with_its_process(opened: Open) -> None:
    service = opened()
    session = await begin(service)
    service.on_sleep()
    await service.stop()
    assert opened().get(session.config.id).state.status is Status.READY


@pytest.mark.parametrize("is_running", [False, True])
async def test_new_weights_pause_sessions_with_both_digests(
    opened: Open, train: WorkerTrain, tmp_path: Path, is_running: bool
) -> None:
    service = opened()
    session = await begin(service)
    before = session.state.base
    if is_running:
        service.run(session.config.id, 10_000)
        await session.wait_for_steps(2)
    train.load(other_weights(tmp_path / "other"))
    service.on_weights("unknown")
    service.on_weights(session.config.model)
    while session.state.status is not Status.PAUSED:
        await session.wait_for_steps(session.num_steps)
    digests = re.findall(r"\b[0-9a-f]{16}\b", session.state.reason or "")
    assert len(set(digests)) == 2
    assert (before or "")[:16] in digests
    assert session.num_steps < 10_000


async def test_a_model_that_is_unloaded_pauses_its_sessions(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session, other = await begin(service), await begin(service)
    service.on_unload(session.config.model)
    assert session.state.reason == "model was unloaded."
    service.resume(other.config.id)
    train.fail = ModelNotFoundError("model")
    with pytest.raises(ModelNotFoundError):
        await service.step(other.config.id, 1, None)
    assert "does not exist" in (other.state.reason or "")
