"""Jobs whose sessions train a tiny model: what becomes of it meanwhile, and what they leave."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.api.fine_tuning.answer import job_object
from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import JobSettings, JobStatus, Method
from mlx_parallm.training.jobs.service import JobService
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.training.service import ASLEEP, TrainingService
from mlx_parallm.training.session_store import SessionLimits
from mlx_parallm.training.settings import GradientSettings
from mlx_parallm.types.errors import ConflictError, ParallmError, RequestLostError, StorageError
from mlx_parallm.types.gradients import LossKind, LossSpec, OptimiserKind
from mlx_parallm.worker.training_ops import ApplyGradient, Materialise
from tests.encoder_folders import golden_arrays, read_golden, write_encoder
from tests.unit.training.jobs.fake_training import FakeServed
from tests.unit.training.worker_sessions import CONFIG, EXAMPLES, MODEL, WorkerTrain, config_of

SETTINGS = JobSettings(
    owner="o",
    model=MODEL,
    method=Method.SUPERVISED,
    hyperparameters={"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 1.0},
    training_file="file-1",
    seed=0,
    num_steps=4,
    eval_every=2,
)
CONFIG_OF = config_of(
    estimator=GradientSettings(optimizer=OptimiserKind.ADAMW, learning_rate=0.01),
    loss=LossSpec(kind=LossKind.CROSS_ENTROPY),
    trainable=replace(CONFIG.trainable, trains_first=True),
    eval_every=2,
)


class Jobs:
    """Jobs over the sessions of a model that a worker of this process trains.

    Attributes:
        before: is called with each request of the engine before it runs.
    """

    def __init__(self, folder: Path, limits: SessionLimits) -> None:
        self.folder = folder
        self.train = WorkerTrain(folder / "model")
        self.before: Callable[[TrainingRequest], None] = lambda request: None
        self.training = TrainingService(folder / "sessions", self._run, limits)
        self.served = FakeServed()
        self.service = JobService(folder / "jobs", self.training, self.served, self._write_result)

    async def _run(self, request: TrainingRequest) -> tuple[Any, ...]:
        self.before(request)
        return await self.train(request)

    async def _write_result(self, owner: str, filename: str, content: bytes) -> str:
        return "file-result"

    async def begin(self) -> JobFiles:
        return await self.service.begin(SETTINGS, CONFIG_OF, EXAMPLES, EXAMPLES[:2])

    async def resting(self, files: JobFiles) -> JobStatus:
        """Return the status of a job that neither waits nor runs."""
        while files.record.status in (JobStatus.QUEUED, JobStatus.RUNNING):  # noqa: ASYNC110
            await asyncio.sleep(0)
        return files.record.status


@asynccontextmanager
async def running(folder: Path, limits: SessionLimits | None = None) -> AsyncIterator[Jobs]:
    jobs = Jobs(folder, limits or SessionLimits())
    jobs.training.start()
    jobs.service.start()
    yield jobs
    await jobs.service.stop()
    await jobs.training.stop()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("training.service", "training.jobs.service"):
        monkeypatch.setattr(f"mlx_parallm.{service}.RETRY_S", 0)


def once(kind: type, act: Callable[[], None]) -> Callable[[TrainingRequest], None]:
    """Return what acts before the first request with an op of a kind."""
    left = [act]

    def before(request: TrainingRequest) -> None:
        if left and any(isinstance(op, kind) for op in request.ops):
            left.pop()()

    return before


def other_weights(folder: Path) -> Path:
    """Write the model with other weights."""
    golden = read_golden("bert_masked_lm")
    weights = {name: 0.5 * array for name, array in golden_arrays(golden).items()}
    return write_encoder(folder, golden["config"], weights)


@pytest.mark.parametrize("kind", [ApplyGradient, Materialise], ids=["step", "checkpoint"])
async def test_a_killed_engine_does_not_end_a_job(tmp_path: Path, kind: type) -> None:
    async with running(tmp_path) as jobs:

        def die() -> None:
            jobs.train.load(jobs.train.folder)
            raise RequestLostError("It died.")

        jobs.before = once(kind, die)
        first, second = await jobs.begin(), await jobs.begin()
        assert await jobs.resting(first) is JobStatus.SUCCEEDED
        assert await jobs.resting(second) is JobStatus.SUCCEEDED
        # Both have equal batches and models: a loss has left no trace.
        metrics = [
            [(each.step, each.metrics["valid_loss"]) for each in files.checkpoints]
            for files in (first, second)
        ]
        assert metrics[0] == metrics[1]
        assert len(metrics[0]) == 2


async def test_an_evicted_model_does_not_end_a_job(tmp_path: Path) -> None:
    async with running(tmp_path) as jobs:
        jobs.before = once(ApplyGradient, lambda: jobs.train.load(jobs.train.folder))
        files = await jobs.begin()
        assert await jobs.resting(files) is JobStatus.SUCCEEDED


async def test_other_weights_pause_a_job_until_the_old_ones_are_back(tmp_path: Path) -> None:
    async with running(tmp_path) as jobs:
        other = other_weights(tmp_path / "other")
        jobs.before = once(ApplyGradient, lambda: jobs.train.load(other))
        files = await jobs.begin()
        assert await jobs.resting(files) is JobStatus.PAUSED
        assert "other weights" in (files.record.reason or "")
        jobs.train.load(jobs.train.folder)
        jobs.service.resume(files.record.id)
        assert await jobs.resting(files) is JobStatus.SUCCEEDED


async def test_an_unloaded_model_pauses_a_job(tmp_path: Path) -> None:
    async with running(tmp_path) as jobs:
        jobs.before = once(ApplyGradient, lambda: jobs.training.on_unload(MODEL))
        files = await jobs.begin()
        assert await jobs.resting(files) is JobStatus.PAUSED
        assert files.record.reason == f"{MODEL} was unloaded."
        jobs.service.resume(files.record.id)
        assert await jobs.resting(files) is JobStatus.SUCCEEDED


async def test_adapters_count_among_the_bytes_of_sessions(tmp_path: Path) -> None:
    async with running(tmp_path / "free") as jobs:
        files = await jobs.begin()
        await jobs.resting(files)
        session = jobs.training.get(files.record.session).files
        own, all_bytes = files.num_bytes, session.num_bytes + files.num_bytes
        assert own > 0
        assert f"stored_bytes {float(all_bytes)}" in jobs.training.metrics().decode()
    # There is room for the session, and not for all adapters.
    limits = SessionLimits(max_bytes=all_bytes - own // 2)
    async with running(tmp_path / "full", limits) as jobs:
        files = await jobs.begin()
        assert await jobs.resting(files) is JobStatus.PAUSED
        assert "--max-data-bytes" in (files.record.reason or "")


@pytest.mark.slow
async def test_100_jobs_leave_nothing(tmp_path: Path) -> None:
    """Make and delete jobs; files, sessions, served adapters and memory stay as they were."""
    async with running(tmp_path) as jobs:
        await make_and_delete(jobs, 10)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        await make_and_delete(jobs, 90)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert jobs.service.all() == []
        assert jobs.training.all() == []
        assert jobs.served.folders == {}
        assert not list((tmp_path / "jobs").iterdir())
        assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["lock"]
        # A session with its data and its optimiser has more.
        assert after - before < 64 * 1024


async def make_and_delete(jobs: Jobs, count: int) -> None:
    for _ in range(count):
        files = await jobs.begin()
        assert await jobs.resting(files) is JobStatus.SUCCEEDED
        await jobs.service.delete(files.record.id)
    # The worker of the tests remembers what it was asked.
    jobs.train.requests.clear()


@pytest.mark.parametrize("acts", [("pause",), ("pause", "resume"), ("cancel",), ("delete",)])
async def test_a_request_during_a_sleep_lets_the_queue_go_on(
    tmp_path: Path, acts: tuple[str, ...]
) -> None:
    async with running(tmp_path) as jobs:
        jobs.before = once(ApplyGradient, jobs.training.on_sleep)
        files, other = await jobs.begin(), await jobs.begin()
        session = jobs.training.get(files.record.session)
        while files.last_step == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert session.state.reason == ASLEEP
        asleep = job_object(files, jobs.training)
        assert (asleep["status"], asleep["reason"]) == ("running", ASLEEP)
        for act in acts:
            done = getattr(jobs.service, act)(files.record.id)
            if act != "resume":
                await done
        jobs.training.on_wake()
        assert await jobs.resting(other) is JobStatus.SUCCEEDED
        if acts == ("pause",):
            assert files.record.status is JobStatus.PAUSED
            jobs.service.resume(files.record.id)
        if acts[0] == "pause":
            assert await jobs.resting(files) is JobStatus.SUCCEEDED


@pytest.mark.parametrize("fault", [ConflictError, StorageError])
async def test_a_job_that_cannot_be_kept_leaves_no_session(
    tmp_path: Path, fault: type[ParallmError]
) -> None:
    async with running(tmp_path) as jobs:
        if fault is ConflictError:
            await jobs.service.stop()
        else:
            shutil.rmtree(tmp_path / "jobs")
            (tmp_path / "jobs").write_text("This is no folder.")
        with pytest.raises(fault):
            await jobs.begin()
        assert (jobs.service.all(), jobs.training.all()) == ([], [])
        assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["lock"]
