"""Later processes and engines go on with sessions as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.training.session_files import LOG, STEPS
from mlx_parallm.types.errors import EngineDeadError, PausedError
from mlx_parallm.types.training import FirstFactors
from mlx_parallm.worker.training.input_directions import InputDirections
from mlx_parallm.worker.training_ops import MeasureInputs
from tests.unit.training.worker_sessions import CONFIG, Open, WorkerTrain, begin, digest, mezo


async def test_a_later_process_goes_on_as_if_nothing_had_happened(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session, other = await begin(service), await begin(service)
    for _ in range(7):
        await session.step()
        await other.step()
    expected = [await digest(session, step) for step in range(8)]
    await service.stop()
    train.load(train.folder)
    again = opened().get(session.config.id)
    assert [await digest(again, step) for step in range(8)] == expected
    more = [(await again.step()).record for _ in range(3)]
    # The other session was never interrupted, but for its process.
    assert len({mezo(record).seed for record in more}) == 3
    assert again.num_steps == 10


async def test_a_rerun_has_the_same_log_whatever_was_lost_meanwhile(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session, again = await begin(service), await begin(service)
    for number in range(12):
        await session.step()
        if number % 3 == 0:
            train.load(train.folder)
    for _ in range(12):
        await again.step()
    assert session.files.log() == again.files.log()
    assert len(session.files.log()) == 12 * (8 + 4)
    assert await digest(session) == await digest(again)


@pytest.mark.parametrize("lost", [PausedError(), EngineDeadError("dead")])
async def test_a_step_that_was_not_run_changes_nothing(
    opened: Open, train: WorkerTrain, lost: Exception
) -> None:
    service = opened()
    session, again = await begin(service), await begin(service)
    for number in range(6):
        if number in (2, 4):
            train.fail = lost
            with pytest.raises(type(lost)):
                await session.step()
        await session.step()
        await again.step()
    assert session.files.log() == again.files.log()
    assert await digest(session) == await digest(again)


@pytest.mark.parametrize(("name", "cut"), [(LOG, 5), (STEPS, 20)])
async def test_a_log_that_was_cut_ends_at_its_last_whole_record(
    opened: Open, tmp_path: Path, name: str, cut: int
) -> None:
    service = opened()
    session = await begin(service)
    for _ in range(4):
        await session.step()
    expected = await digest(session, 3)
    await service.stop()
    path = tmp_path / "sessions" / session.config.id / name
    path.write_bytes(path.read_bytes()[:-cut])
    again = opened().get(session.config.id)
    assert again.num_steps == 3
    assert await digest(again) == expected
    assert (await again.step()).record.step == 4


async def test_measured_factors_are_kept_for_later_processes(
    opened: Open, train: WorkerTrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    spec = replace(CONFIG.trainable, init=FirstFactors.ACTIVATIONS)
    session, drawn = await begin(service, trainable=spec), await begin(service)
    for _ in range(5):
        await session.step()
    assert await digest(session, 0) != await digest(drawn, 0)
    assert session.files.num_bytes > drawn.files.num_bytes
    expected = [await digest(session, step) for step in range(6)]
    await service.stop()
    train.load(train.folder)
    train.requests.clear()
    # Another device has other bits, and perhaps other signs.
    measured = InputDirections.wait
    monkeypatch.setattr(
        InputDirections, "wait", lambda self: {k: -v for k, v in measured(self).items()}
    )
    again = opened().get(session.config.id)
    assert [await digest(again, step) for step in range(6)] == expected
    assert not any(isinstance(op, MeasureInputs) for each in train.requests for op in each.ops)
