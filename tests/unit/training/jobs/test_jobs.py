"""Fine-tuning jobs: their order, what they serve, and what a pause, a fault or a restart leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.numpy import load_file

from mlx_parallm.api.fine_tuning.answer import event_page
from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import JobSettings, JobStatus, Method
from mlx_parallm.training.jobs.runs import KEPT, model_name
from mlx_parallm.training.jobs.service import JobService
from mlx_parallm.training.service import ASLEEP
from mlx_parallm.types.errors import ConflictError, NotFoundError
from tests.unit.training.jobs.fake_training import FakeServed, FakeTraining

SETTINGS = JobSettings(
    owner="o",
    model="m",
    method=Method.SUPERVISED,
    hyperparameters={"n_epochs": 2, "batch_size": 1},
    training_file="file-1",
    seed=0,
    num_steps=6,
    eval_every=2,
    suffix="mine",
)


class Jobs:
    """A service, and what is around it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.training, self.served = folder, FakeTraining(), FakeServed()
        self.results: list[tuple[str, str, bytes]] = []
        self.result_failures: list[Exception] = []
        self.service = self._service()

    def _service(self) -> JobService:
        return JobService(self.folder, cast("Any", self.training), self.served, self._write_result)

    async def _write_result(self, owner: str, filename: str, content: bytes) -> str:
        if self.result_failures:
            raise self.result_failures.pop(0)
        self.results.append((owner, filename, content))
        return f"file-result-{len(self.results)}"

    async def restart(self) -> None:
        """End the service, and begin another one on the same folder."""
        await self.service.stop()
        self.served.folders.clear()
        self.service = self._service()
        self.service.start()

    def begin(self, session: str = "s", **changes: Any) -> JobFiles:
        """Create a job with a session of its own."""
        self.training.add(session)
        return self.service.create(replace(SETTINGS, **changes), session)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Jobs]:
    jobs = Jobs(folder / "jobs")
    jobs.service.start()
    try:
        yield jobs
    finally:
        await jobs.service.stop()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


def with_jobs(check: Callable[[Jobs], Awaitable[None]]) -> Callable[[Path], None]:
    """Return a test that runs a check with a service."""

    def run(tmp_path: Path) -> None:
        async def checked() -> None:
            async with running(tmp_path) as jobs:
                await check(jobs)

        asyncio.run(checked())

    run.__name__ = check.__name__
    run.__doc__ = check.__doc__
    return run


async def ended(jobs: Jobs, files: JobFiles) -> None:
    await until(lambda: jobs.service.get(files.record.id).record.status.has_ended)


@with_jobs
async def test_a_job_runs_to_its_end(jobs: Jobs) -> None:
    files = jobs.begin()
    await ended(jobs, files)
    record = files.record
    assert record.status is JobStatus.SUCCEEDED
    assert record.error is None
    assert record.fine_tuned_model == f"ft:m:mine:{record.id}"
    assert record.trained_tokens == 6 * 8
    assert [each.step for each in files.checkpoints] == [2, 4, 6]
    assert jobs.served.folders[model_name(files)] == files.folder_of(files.checkpoints[-1])
    steps = [event.data["step"] for event in files.events() if event.data]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert record.result_files == ("file-result-1",)
    ((owner, filename, content),) = jobs.results
    assert (owner, filename) == ("o", f"{record.id}.csv")
    lines = content.decode().splitlines()
    assert lines[0].startswith("step,train_loss,train_accuracy,train_margin,valid_loss")
    assert len(lines) == 7
    assert lines[0].split(",")[-2:] == ["tokens", "tokens_per_s"]
    assert lines[1].split(",")[-2] == "8"


@with_jobs
async def test_the_best_checkpoint_is_the_result(jobs: Jobs) -> None:
    jobs.training.gate.clear()
    files = jobs.begin(num_steps=12)
    jobs.training.get("s").valid_losses = {2: 0.9, 4: 0.1, 6: 0.5, 8: 0.6, 10: 0.7, 12: 0.8}
    jobs.training.gate.set()
    await ended(jobs, files)
    assert files.record.trained_tokens == 12 * 8
    # The best one stays among the latest.
    assert [each.step for each in files.checkpoints] == [4, 8, 10, 12]
    assert len(files.checkpoints) == KEPT + 1
    folder = jobs.served.folders[model_name(files)]
    factors = load_file(folder / "adapters.safetensors")
    assert {float(each.max()) for each in factors.values()} == {4.0}
    names = {each.name for each in files.checkpoints}
    assert set(jobs.served.folders) == names | {model_name(files)}


@with_jobs
async def test_jobs_run_one_after_the_other(jobs: Jobs) -> None:
    jobs.training.gate.clear()
    first, second = jobs.begin("a"), jobs.begin("b")
    await until(lambda: first.record.status is JobStatus.RUNNING)
    assert second.record.status is JobStatus.QUEUED
    jobs.training.gate.set()
    await ended(jobs, second)
    assert first.record.status is JobStatus.SUCCEEDED
    assert first.record.finished_at is not None


@with_jobs
async def test_a_paused_job_lets_others_run_and_goes_on(jobs: Jobs) -> None:
    jobs.training.gate.clear()
    files = jobs.begin()
    await until(lambda: files.record.status is JobStatus.RUNNING)
    await jobs.service.pause(files.record.id)
    jobs.training.gate.set()
    await ended(jobs, jobs.begin("other"))
    assert files.record.status is JobStatus.PAUSED
    jobs.service.resume(files.record.id)
    await ended(jobs, files)
    assert files.record.status is JobStatus.SUCCEEDED
    assert jobs.training.get("s").num_steps == 6


@with_jobs
async def test_a_job_whose_session_is_paused_says_why(jobs: Jobs) -> None:
    jobs.training.stops[3] = "the disk is full"
    files = jobs.begin()
    await until(lambda: files.record.status is JobStatus.PAUSED)
    assert files.record.reason == "the disk is full"
    jobs.service.resume(files.record.id)
    await ended(jobs, files)
    assert files.record.status is JobStatus.SUCCEEDED
    steps = [event.data["step"] for event in files.events() if event.data]
    assert steps == [1, 2, 3, 4, 5, 6]


@with_jobs
async def test_a_sleeping_server_makes_no_job_end(jobs: Jobs) -> None:
    jobs.training.stops[3] = ASLEEP
    files = jobs.begin()
    await until(lambda: jobs.training.get("s").state.reason == ASLEEP)
    await asyncio.sleep(0)
    assert files.record.status is JobStatus.RUNNING
    jobs.training.resume("s")
    await ended(jobs, files)
    assert files.record.status is JobStatus.SUCCEEDED


@with_jobs
async def test_a_cancelled_job_keeps_its_checkpoints(jobs: Jobs) -> None:
    jobs.training.stops[3] = "to be cancelled"
    files = jobs.begin()
    await until(lambda: files.record.status is JobStatus.PAUSED)
    await jobs.service.cancel(files.record.id)
    assert files.record.status is JobStatus.CANCELLED
    assert [each.step for each in files.checkpoints] == [2]
    for again in (jobs.service.cancel, jobs.service.pause):
        with pytest.raises(ConflictError, match="cancelled"):
            await again(files.record.id)
    with pytest.raises(ConflictError, match="not paused"):
        jobs.service.resume(files.record.id)


@with_jobs
async def test_a_job_goes_on_after_a_restart(jobs: Jobs) -> None:
    done = jobs.begin("done")
    await ended(jobs, done)
    jobs.training.stops[3] = "wait"
    files = jobs.begin()
    await until(lambda: files.record.status is JobStatus.PAUSED)
    files.save(status=JobStatus.RUNNING)
    await jobs.restart()
    again = jobs.service.get(files.record.id)
    assert again is not files
    await ended(jobs, again)
    assert again.record.status is JobStatus.SUCCEEDED
    served = {model_name(each) for each in (done, again)}
    assert served <= set(jobs.served.folders)
    assert [event.number for event in again.events()] == list(range(again.num_events))


@with_jobs
async def test_a_line_that_a_crash_cut_off_is_dropped(jobs: Jobs) -> None:
    files = jobs.begin()
    await ended(jobs, files)
    count = files.num_events
    with (jobs.folder / files.record.id / "events.jsonl").open("ab") as events:
        events.write(b'{"number": 99, "mess')
    await jobs.restart()
    assert jobs.service.get(files.record.id).num_events == count


@with_jobs
async def test_a_job_without_its_session_fails_by_name(jobs: Jobs) -> None:
    jobs.training.stops[3] = "wait"
    files = jobs.begin()
    await until(lambda: files.record.status is JobStatus.PAUSED)
    await jobs.training.delete("s")
    jobs.service.resume(files.record.id)
    await ended(jobs, files)
    assert files.record.status is JobStatus.FAILED
    assert files.record.error is not None
    assert "no session" in files.record.error.message


@with_jobs
async def test_a_deleted_job_leaves_nothing(jobs: Jobs) -> None:
    files = jobs.begin()
    await ended(jobs, files)
    await jobs.service.delete(files.record.id)
    assert not jobs.served.folders
    assert not jobs.training.sessions
    assert not list(jobs.folder.iterdir())
    with pytest.raises(NotFoundError):
        jobs.service.get(files.record.id)


@with_jobs
async def test_a_deleted_model_is_served_no_more(jobs: Jobs) -> None:
    files = jobs.begin()
    await ended(jobs, files)
    name = model_name(files)
    assert await jobs.service.delete_model(name)
    assert name not in jobs.served.folders
    assert files.record.fine_tuned_model is None
    await jobs.service.delete_model(files.checkpoints[0].name)
    assert [each.step for each in files.checkpoints] == [4, 6]
    assert not await jobs.service.delete_model(name)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("deletes", ["checkpoint first", "result first", "while it is written"])
def test_result_and_checkpoint_of_one_step_do_without_each_other(
    tmp_path: Path, deletes: str, *, restarts: bool
) -> None:
    @with_jobs
    async def check(jobs: Jobs) -> None:
        files = jobs.begin()
        # The result is not what the checkpoints that are left would make it.
        jobs.training.get("s").valid_losses = {2: 0.9, 4: 0.1, 6: 0.5}
        result = model_name(files)
        checkpoint = f"{result}:ckpt-step-4"
        names = [result, checkpoint] if deletes == "result first" else [checkpoint, result]
        if deletes == "while it is written":
            jobs.served.gate = asyncio.Event()
            await until(lambda: jobs.served.waiting == [f"{result}:ckpt-step-2"])
            while jobs.served.waiting != [result]:
                jobs.served.gate.set()
                jobs.served.gate.clear()
                await asyncio.sleep(0)
            await jobs.service.delete_model(names.pop(0))
            jobs.served.gate.set()
            await ended(jobs, files)
        else:
            await ended(jobs, files)
            await jobs.service.delete_model(names.pop(0))
        if restarts:
            await jobs.restart()
            files = jobs.service.get(files.record.id)
            await until(lambda: names[0] in jobs.served.folders)
        (name,) = names
        assert {result, checkpoint} & set(jobs.served.folders) == {name}
        folder = jobs.served.folders[name]
        factors = load_file(folder / "adapters.safetensors")
        assert {float(each.max()) for each in factors.values()} == {4.0}
        await jobs.service.delete_model(name)
        assert not folder.exists()
        assert [each.step for each in files.checkpoints] == [2, 6]

    check(tmp_path)


@with_jobs
async def test_pages_of_events_read_no_others(jobs: Jobs) -> None:
    files = jobs.begin()
    await ended(jobs, files)
    page = event_page(files, after=None, limit=4)
    events = list(page["data"])
    while page["has_more"]:
        page = event_page(files, after=page["last_id"], limit=4)
        events += page["data"]
    after = page["last_id"]
    numbers = [int(each["id"].rpartition("-")[2]) for each in events]
    assert numbers == list(reversed(range(files.num_events)))
    path = jobs.folder / files.record.id / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(b"x" * (len(line) - 1) + b"\n" for line in lines[:-4]) + b"".join(lines[-4:])
    )
    assert len(event_page(files, after=None, limit=4)["data"]) == 4
    for unknown in (
        "",
        f"{page['first_id']}{'9' * 5000}",
        "ftevent-other-1",
        f"{page['first_id']}0",
        "ftevent-",
        "²",
    ):
        assert event_page(files, after=unknown, limit=1)["data"][0]["message"].startswith("The job")
    empty = event_page(files, after=after, limit=4)
    assert (empty["data"], empty["has_more"], empty["last_id"]) == ([], False, None)
