"""The disk of sessions: full, damaged, another server's, and used by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.training.records import Status
from mlx_parallm.training.service import ASLEEP
from mlx_parallm.training.session_files import SessionFiles, encoded
from mlx_parallm.types.errors import ConflictError, StorageError, StorageInUseError
from mlx_parallm.types.training import FirstFactors
from tests.unit.training.worker_sessions import CONFIG, Open, begin, digest, mezo


async def test_factors_that_were_not_saved_leave_no_session(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("full")

    monkeypatch.setattr(SessionFiles, "save_start", full)
    service = opened()
    with pytest.raises(StorageError):
        await begin(service, trainable=replace(CONFIG.trainable, init=FirstFactors.ACTIVATIONS))
    assert service.all() == []
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["lock"]


async def test_a_full_disk_makes_no_step(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    service = opened()
    session, again = await begin(service), await begin(service)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for number in range(4):
        if number == 2:
            with monkeypatch.context() as patch:
                patch.setattr("mlx_parallm.storage.disk.write_all", full)
                with pytest.raises(StorageError):
                    await session.step()
        await session.step()
        await again.step()
    assert session.files.log() == again.files.log()
    losses = [
        [
            (record.step, record.loss_plus, record.mean_square)
            for record in map(mezo, each.files.records())
        ]
        for each in (session, again)
    ]
    assert losses[0] == losses[1]


async def test_a_full_disk_pauses_a_session_and_nothing_else(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    session, other = await begin(service), await begin(service)
    await service.step(session.config.id, 2, None)
    before = await digest(session)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_parallm.storage.disk.write_all", full)
        with pytest.raises(StorageError, match="No space left"):
            await service.step(session.config.id, 1, None)
        with pytest.raises(StorageError):
            await begin(service)
    assert (session.num_steps, await digest(session)) == (2, before)
    with pytest.raises(ConflictError, match="No space left"):
        await service.step(session.config.id, 1, None)
    assert len(await service.step(other.config.id, 2, None)) == 2
    service.resume(session.config.id)
    await service.step(session.config.id, 1, None)
    assert len(service.all()) == 2


async def test_a_run_that_meets_a_full_disk_is_paused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 50)
    await session.wait_for_steps(3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_parallm.storage.disk.write_all", full)
        steps = [record.step async for record in service.follow(session.config.id, 0)]
    assert session.state.status is Status.PAUSED
    assert "No space left" in (session.state.reason or "")
    assert len(steps) == session.num_steps < 50
    service.resume(session.config.id)
    more = [record.step async for record in service.follow(session.config.id, len(steps))]
    assert steps + more == list(range(1, 51))


async def test_a_folder_has_one_server(opened: Open) -> None:
    await begin(opened())
    other = opened()
    with pytest.raises(StorageInUseError):
        await begin(other)


@pytest.mark.parametrize("name", ["config.json", "state.json", "examples.jsonl"])
async def test_a_damaged_session_stops_no_other(opened: Open, tmp_path: Path, name: str) -> None:
    service = opened()
    damaged, session = await begin(service), await begin(service)
    await session.step()
    await service.stop()
    (tmp_path / "sessions" / damaged.config.id / name).write_bytes(b'{"x": 1}\n')
    again = opened()
    assert [each.config.id for each in again.all()] == [session.config.id]
    assert again.get(session.config.id).num_steps == 1
    assert (tmp_path / "sessions" / damaged.config.id / name).exists()


async def test_a_run_ends_although_the_disk_refuses_its_state(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 3)

    def full(*_: Any) -> None:
        raise StorageError("full")

    monkeypatch.setattr(SessionFiles, "save_state", full)
    steps = [record.step async for record in service.follow(session.config.id, 0)]
    assert (steps, session.state.status) == ([1, 2, 3], Status.READY)


async def test_a_server_wakes_up_although_the_disk_refuses_states(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    sessions = [await begin(service) for _ in range(2)]
    service.on_sleep()
    save = SessionFiles.save_state

    def refuse_one(files: SessionFiles, state: Any) -> None:
        if files.config.id == sessions[0].config.id:
            raise StorageError("full")
        save(files, state)

    monkeypatch.setattr(SessionFiles, "save_state", refuse_one)
    service.on_wake()
    assert [each.state.status for each in sessions] == [Status.PAUSED, Status.READY]
    assert sessions[0].state.reason == ASLEEP


async def test_data_are_written_and_read_by_threads(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large data must not block the event loop, which sends the tokens of all streams."""
    threads: list[threading.Thread] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return original(*args)

        return call

    monkeypatch.setattr("mlx_parallm.training.session_store.encoded", noting(encoded))
    monkeypatch.setattr(SessionFiles, "examples", noting(SessionFiles.examples))
    await begin(opened())
    assert len(threads) == 2
    assert threading.main_thread() not in threads
