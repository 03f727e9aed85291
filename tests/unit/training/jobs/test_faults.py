"""Faults during jobs: they are paused with the reason or go on, and the others are unhurt."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from mlx_parallm.storage import disk
from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import JobStatus
from mlx_parallm.training.jobs.runs import model_name
from mlx_parallm.training.jobs.service import MAX_LOST
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    ModelNotFoundError,
    OverloadedError,
    ParallmError,
    RequestAbortedError,
    RequestLostError,
    RequestTooLargeError,
    SessionLostError,
    StorageError,
)
from tests.unit.training.jobs.test_jobs import Jobs, ended, until, with_jobs


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.training.jobs.service.RETRY_S", 0)


async def paused(files: JobFiles) -> str:
    """Return why the server has paused a job."""
    await until(lambda: files.record.status is JobStatus.PAUSED)
    assert files.record.reason is not None
    return files.record.reason


def steps_of(files: JobFiles) -> list[int]:
    return [event.data["step"] for event in files.events() if event.data]


class Disk:
    """Refuses to write while it is full, perhaps after half of what it is to write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._write_all = disk.write_all
        monkeypatch.setattr(disk, "write_all", self.write_all)

    def write_all(self, descriptor: int, data: bytes) -> None:
        if self.is_full:
            self._write_all(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write_all(descriptor, data)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_a_full_disk_pauses_jobs(
    tmp_path_factory: pytest.TempPathFactory, storage: Disk, step: int
) -> None:
    @with_jobs
    async def check(jobs: Jobs) -> None:
        jobs.training.fill_at = (step, storage)
        files, waiting = jobs.begin(), jobs.begin("other")
        for each in (files, waiting):
            assert "No space left" in await paused(each)
        storage.is_full = False
        for each in (files, waiting):
            jobs.service.resume(each.record.id)
            await ended(jobs, each)
            assert each.record.status is JobStatus.SUCCEEDED
            assert steps_of(each) == [1, 2, 3, 4, 5, 6]
            assert [event.number for event in each.events()] == list(range(each.num_events))
        await jobs.restart()
        again = jobs.service.get(files.record.id)
        assert again.record == files.record
        assert again.num_bytes == files.num_bytes

    check(tmp_path_factory.mktemp("jobs"))


@with_jobs
async def test_adapters_of_jobs_have_a_limit(jobs: Jobs) -> None:
    done = jobs.begin("done")
    await ended(jobs, done)
    jobs.training.room = used = jobs.training.used
    assert used == sum(files.num_bytes for files in jobs.service.all())
    files = jobs.begin()
    assert await paused(files) == "There is no room."
    await jobs.service.delete(done.record.id)
    assert jobs.training.used < used
    jobs.training.room = 10 * used
    jobs.service.resume(files.record.id)
    await ended(jobs, files)
    assert files.record.status is JobStatus.SUCCEEDED


@pytest.mark.parametrize(
    "problem",
    [ConflictError("m has other weights."), ModelNotFoundError("m"), StorageError("It is full.")],
    ids=lambda problem: type(problem).__name__,
)
def test_what_lasts_pauses_a_job(
    tmp_path_factory: pytest.TempPathFactory, problem: ParallmError
) -> None:
    @with_jobs
    async def check(jobs: Jobs) -> None:
        jobs.training.failures = [problem]
        files, other = jobs.begin(), jobs.begin("other")
        assert str(problem) in await paused(files)
        await ended(jobs, other)
        assert other.record.status is JobStatus.SUCCEEDED
        jobs.service.resume(files.record.id)
        await ended(jobs, files)
        assert files.record.status is JobStatus.SUCCEEDED
        assert [each.step for each in files.checkpoints] == [2, 4, 6]

    check(tmp_path_factory.mktemp("jobs"))


@with_jobs
async def test_a_lost_engine_does_not_end_a_job(jobs: Jobs) -> None:
    jobs.training.failures = [
        EngineDeadError("It died."),
        RequestLostError("It died."),
        RequestAbortedError("It was aborted."),
        SessionLostError(),
        OverloadedError("There is no room."),
        *(EngineDeadError("It is not there yet.") for _ in range(2 * MAX_LOST)),
    ]
    files = jobs.begin()
    await ended(jobs, files)
    assert files.record.status is JobStatus.SUCCEEDED
    messages = [event.message for event in files.events()]
    assert messages.count("The job runs.") == 1


@with_jobs
async def test_a_job_that_kills_engines_is_paused(jobs: Jobs) -> None:
    jobs.training.failures = [RequestLostError("It died.") for _ in range(MAX_LOST)]
    files = jobs.begin()
    assert f"tried {MAX_LOST} times: It died." in await paused(files)
    assert jobs.training.failures == []


@with_jobs
async def test_an_unknown_fault_ends_a_job_by_name(jobs: Jobs) -> None:
    jobs.training.failures = [RuntimeError("never seen")]
    files, other = jobs.begin(), jobs.begin("other")
    await ended(jobs, other)
    assert other.record.status is JobStatus.SUCCEEDED
    assert files.record.status is JobStatus.FAILED
    assert files.record.error is not None
    assert "never seen" in files.record.error.message


@with_jobs
async def test_one_suffix_makes_two_models(jobs: Jobs) -> None:
    first, second = jobs.begin("a", suffix="same"), jobs.begin("b", suffix="same")
    await ended(jobs, second)
    names = {model_name(files) for files in (first, second)}
    assert len(names) == 2
    assert names <= set(jobs.served.folders)


@with_jobs
async def test_a_pause_before_a_checkpoint_does_not_lose_it(jobs: Jobs) -> None:
    for step in (3, 5):
        jobs.training.stops[step] = "wait"
    files = jobs.begin()
    for _ in range(2):
        await paused(files)
        # The step that was in flight is the last one before a checkpoint.
        jobs.training.get("s").make_step()
        jobs.service.resume(files.record.id)
    await ended(jobs, files)
    assert [each.step for each in files.checkpoints] == [2, 4, 6]


@with_jobs
async def test_a_full_store_of_files_pauses_a_job_at_its_end(jobs: Jobs) -> None:
    jobs.result_failures = [RequestTooLargeError("All files together may have 1 byte.")]
    files = jobs.begin()
    assert "All files" in await paused(files)
    jobs.service.resume(files.record.id)
    await ended(jobs, files)
    assert files.record.status is JobStatus.SUCCEEDED
    assert files.record.result_files == ("file-result-1",)


@pytest.mark.parametrize("step", [2, 6])
@pytest.mark.parametrize("act", ["cancel", "pause", "delete"])
def test_a_request_amid_a_checkpoint_counts(
    tmp_path_factory: pytest.TempPathFactory, act: str, step: int
) -> None:
    @with_jobs
    async def check(jobs: Jobs) -> None:
        jobs.served.gate = asyncio.Event()
        files, other = jobs.begin(), jobs.begin("other")
        name = model_name(files)
        await until(lambda: f"{name}:ckpt-step-2" in jobs.served.waiting)
        if step == 6:
            jobs.served.gate.set()
            await until(lambda: jobs.training.get("s").num_steps == 5)
            jobs.served.gate.clear()
            await until(lambda: f"{name}:ckpt-step-6" in jobs.served.waiting)
        acting = asyncio.ensure_future(getattr(jobs.service, act)(files.record.id))
        await asyncio.sleep(0)
        jobs.served.gate.set()
        await acting
        await ended(jobs, other)
        assert name not in jobs.served.folders
        if act == "delete":
            assert not [served for served in jobs.served.folders if served.startswith(name)]
            assert len(list(jobs.folder.iterdir())) == 1
            return
        expected = JobStatus.CANCELLED if act == "cancel" else JobStatus.PAUSED
        assert files.record.status is expected
        assert files.record.fine_tuned_model is None
        assert jobs.training.get("s").num_steps == step
        if act == "pause":
            jobs.service.resume(files.record.id)
            await ended(jobs, files)
            assert name in jobs.served.folders

    check(tmp_path_factory.mktemp("jobs"))
