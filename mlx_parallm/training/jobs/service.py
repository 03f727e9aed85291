"""The fine-tuning jobs of a server: kept on disk, and run one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import (
    PREFIX,
    JobError,
    JobRecord,
    JobSettings,
    JobStatus,
)
from mlx_parallm.training.jobs.runs import JobRun, ServedFolders, WriteResult
from mlx_parallm.training.records import Example, SessionConfig
from mlx_parallm.training.service import ENDING, RETRY_S, TEMPORARY, TrainingService
from mlx_parallm.types.errors import (
    ConflictError,
    NotFoundError,
    ParallmError,
    RequestAbortedError,
    RequestLostError,
    RequestTooLargeError,
    SessionLostError,
    ShuttingDownError,
)

logger = logging.getLogger(__name__)
# MAX_LOST: how often a job is tried whose engine is lost between its steps.
MAX_LOST = 20
# COUNTED: the errors after which it was lost; after others it was not there.
COUNTED = (RequestAbortedError, RequestLostError, SessionLostError)


class JobService:
    """The jobs of a folder. Its methods belong to one event loop.

    Methods that take an id raise NotFoundError if no job has it.
    """

    def __init__(
        self,
        folder: Path,
        training: TrainingService,
        served: ServedFolders,
        write_result: WriteResult,
    ) -> None:
        """Prepare; nothing is read before ``start``.

        Args:
            folder: keeps the jobs.
            training: has their sessions.
            served: serves what they make.
            write_result: keeps the figures of their steps.
        """
        self._folder = folder
        self._training = training
        self._served = served
        self._write_result = write_result
        self._ids = IdMaker()
        self._jobs: dict[str, JobFiles] = {}
        # Set when a job may run that could not before.
        self._changed = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        # The id of the job that runs, and set once it does not.
        self._running: str | None = None
        self._rests = asyncio.Event()

    def start(self) -> None:
        """Open the folder, serve what earlier processes have made, and go on with their jobs."""
        try:
            opened = JobFiles.open_all(self._folder)
        except ParallmError as problem:
            logger.warning("fine-tuning jobs cannot be kept: %s", problem)
            return
        self._jobs = {files.record.id: files for files in opened}
        self._training.count_bytes(lambda: sum(each.num_bytes for each in self._jobs.values()))
        self._work = asyncio.ensure_future(self._run_all())

    async def stop(self) -> None:
        """End all work; a later process goes on with it."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            self._work = None

    async def begin(
        self,
        settings: JobSettings,
        make: Callable[[str, int], SessionConfig],
        examples: Sequence[Example],
        validation: Sequence[Example],
    ) -> JobFiles:
        """Add a job with a new session; see ``TrainingService.create`` and ``create``."""
        session = await self._training.create(make, examples, validation=validation)
        try:
            return self.create(settings, session.config.id)
        except BaseException:
            # No job would ever delete it.
            with contextlib.suppress(ParallmError):
                await self._training.delete(session.config.id)
            raise

    def create(self, settings: JobSettings, session: str) -> JobFiles:
        """Add a job to the queue; its session was created.

        Raises:
            ConflictError: the folder could not be opened when the server started.
            StorageError: the disk refused it.
        """
        if self._work is None:
            raise ConflictError("Fine-tuning jobs cannot be kept in this data folder; see the log.")
        record = JobRecord(
            id=self._ids.make(PREFIX),
            settings=settings,
            session=session,
            created_at=int(time.time()),
        )
        files = JobFiles.create(self._folder / record.id, record)
        self._jobs[record.id] = files
        self._run_of(files).tell("The job was created.")
        self._changed.set()
        return files

    def all(self) -> Sequence[JobFiles]:
        """Return all jobs, oldest first."""
        return [self._jobs[name] for name in sorted(self._jobs)]

    def get(self, job_id: str) -> JobFiles:
        """Return a job."""
        if job_id not in self._jobs:
            raise NotFoundError(f"There is no fine-tuning job {job_id[:100]!r}.", param="id")
        return self._jobs[job_id]

    async def cancel(self, job_id: str) -> JobFiles:
        """End a job; its checkpoints stay. Raise ConflictError if it has ended."""
        files = self._unfinished(job_id)
        files.save(status=JobStatus.CANCELLED, finished_at=int(time.time()))
        self._run_of(files).tell("The job was cancelled.")
        await self._pause_session(files)
        return files

    async def pause(self, job_id: str) -> JobFiles:
        """Let a job make no more steps; raise ConflictError if it has ended."""
        files = self._unfinished(job_id)
        if files.record.status is not JobStatus.PAUSED:
            files.save(status=JobStatus.PAUSED, reason=None)
            self._run_of(files).tell("The job was paused.")
            await self._pause_session(files)
        return files

    def resume(self, job_id: str) -> JobFiles:
        """Put a paused job into the queue again; raise ConflictError if it is not paused."""
        files = self.get(job_id)
        if files.record.status is not JobStatus.PAUSED:
            raise ConflictError(f"The job is {files.record.status}, not paused.")
        files.save(status=JobStatus.QUEUED, reason=None)
        self._run_of(files).tell("The job was resumed.")
        self._changed.set()
        return files

    async def delete(self, job_id: str) -> None:
        """Delete a job with its session and all that it serves."""
        files = self.get(job_id)
        if not files.record.status.has_ended:
            await self.cancel(job_id)
        with contextlib.suppress(NotFoundError):
            await self._training.delete(files.record.session)
        if self._running == job_id:
            # It may be about to serve another checkpoint.
            await self._rests.wait()
        if self._jobs.pop(job_id, None) is None:
            return
        for name in self._names(files):
            await self._served.forget_kept(name)
        files.delete()

    async def delete_model(self, name: str) -> bool:
        """Serve a job's result or checkpoint no more, and delete its files; False if it is none."""
        for files in self._jobs.values():
            if name in self._names(files):
                await self._served.forget_kept(name)
                self._drop(files, name)
                return True
        return False

    def _drop(self, files: JobFiles, name: str) -> None:
        if files.record.fine_tuned_model == name:
            files.set_result(None, fine_tuned_model=None)
        for checkpoint in files.checkpoints:
            if checkpoint.name == name:
                files.drop_checkpoint(checkpoint)

    def _names(self, files: JobFiles) -> list[str]:
        result = files.record.fine_tuned_model
        return [each.name for each in files.checkpoints] + ([result] if result else [])

    def _unfinished(self, job_id: str) -> JobFiles:
        files = self.get(job_id)
        if files.record.status.has_ended:
            raise ConflictError(f"The job is {files.record.status} already.")
        return files

    async def _pause_session(self, files: JobFiles) -> None:
        # A session that is gone makes no steps either.
        with contextlib.suppress(NotFoundError):
            await self._training.pause(files.record.session)

    async def _run_all(self) -> None:
        for files in self.all():
            await self._serve(files)
        while True:
            self._changed.clear()
            files = self._next()
            if files is None:
                await self._changed.wait()
            else:
                self._running = files.record.id
                self._rests.clear()
                await self._run(files)
                self._running = None
                self._rests.set()

    async def _serve(self, files: JobFiles) -> None:
        """Serve what a job has made in an earlier process."""
        served = [(each.name, files.folder_of(each)) for each in files.checkpoints]
        result, folder = files.record.fine_tuned_model, files.result_folder
        if result is not None and folder is not None:
            served.append((result, folder))
        for name, folder in served:
            await self._served.keep(name, files.record.settings.model, folder, loads=False)

    def _next(self) -> JobFiles | None:
        """Return the job that runs next: one that an earlier process ran, or the oldest."""
        for status in (JobStatus.RUNNING, JobStatus.QUEUED):
            for files in self.all():
                if files.record.status is status:
                    return files
        return None

    async def _run(self, files: JobFiles) -> None:
        """Run a job until it has ended or is paused."""
        run = self._run_of(files)
        num_lost = 0
        try:
            while (problem := await self._trouble(run)) is not None:
                num_lost += isinstance(problem, COUNTED)
                if num_lost == MAX_LOST:
                    run.pause(f"It was tried {num_lost} times: {problem}")
                await asyncio.sleep(RETRY_S)
                if files.record.status is not JobStatus.RUNNING:
                    return
        except ShuttingDownError:
            # The next process goes on with it.
            await asyncio.Event().wait()
        except (*ENDING, RequestTooLargeError) as problem:
            # Such as for weights that were replaced, or for no room for the file of figures.
            if self._is_unfinished(files):
                run.pause(str(problem))
        except ParallmError as problem:
            self._fail(files, getattr(problem, "code", None) or "job_failed", str(problem))
        except Exception as problem:
            logger.exception("the job %s failed", files.record.id)
            self._fail(files, "internal_error", f"{type(problem).__name__}: {problem}")

    async def _trouble(self, run: JobRun) -> ParallmError | None:
        """Run a job; return the error after which it is tried again, or None."""
        try:
            await run.run()
        except TEMPORARY as problem:
            return problem
        return None

    def _is_unfinished(self, files: JobFiles) -> bool:
        return files.record.id in self._jobs and not files.record.status.has_ended

    def _fail(self, files: JobFiles, code: str, message: str) -> None:
        if self._is_unfinished(files):
            self._run_of(files).end(
                f"The job has failed: {message}",
                "error",
                status=JobStatus.FAILED,
                finished_at=int(time.time()),
                error=JobError(code=code, message=message),
            )

    def _run_of(self, files: JobFiles) -> JobRun:
        return JobRun(files, self._training, self._served, self._write_result)
