"""The run of one job: its session's steps, validations, checkpoints, and the result."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.adapters.writing import adapter_files
from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import Checkpoint, JobEvent, JobStatus, Level, Method
from mlx_parallm.training.records import GradientRecord, Status, StepRecord
from mlx_parallm.training.service import ASLEEP, TrainingService
from mlx_parallm.training.session import Session
from mlx_parallm.types.errors import ConflictError, StorageError

#: ``KEPT``: how many of the latest checkpoints are kept, beside the best one.
KEPT = 3
#: ``BEST_BY``: the metric of which the checkpoint with the least is the best.
BEST_BY = "valid_loss"
#: ``OPENAI_NAMES``: of facts about a step.
OPENAI_NAMES = {"accuracies": "accuracy", "margins": "margin"}
# CHUNK: events that are read at a time where all are read.
CHUNK = 1000
RESULT_FIELDS: Sequence[str] = (
    "step",
    "train_loss",
    "train_accuracy",
    "train_margin",
    "valid_loss",
    "valid_accuracy",
    "learning_rate",
    "tokens",
    "tokens_per_s",
)


class ServedFolders(Protocol):
    """Serves adapters of folders that the server itself has written."""

    async def keep(self, name: str, base: str, folder: Path, *, loads: bool = True) -> None:
        """Serve a folder's adapter of a model under a name, in place of another folder's.

        ``loads`` is False to load it once a request names it.
        """
        ...

    async def forget_kept(self, name: str) -> None:
        """Serve it no more; nothing happens if it was not kept."""
        ...


#: ``WriteResult``: keeps a file for an owner, by its name and content; returns its id.
WriteResult = Callable[[str, str, bytes], Awaitable[str]]


class JobRun:
    """Drives the session of a job to its end. Belongs to one event loop."""

    def __init__(
        self,
        files: JobFiles,
        training: TrainingService,
        served: ServedFolders,
        write_result: WriteResult,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._training = training
        self._served = served
        self._write_result = write_result
        self._now = now

    async def run(self) -> None:
        """Make the steps that are left, unless the job is paused or cancelled meanwhile.

        Raises:
            NotFoundError: the session is gone.
            ConflictError: it cannot go on, such as with other weights; or there is no room.
            StorageError: the disk refused something.
        """
        files = self._files
        if files.record.status is not JobStatus.RUNNING:
            files.save(status=JobStatus.RUNNING, reason=None)
            self.tell("The job runs.")
        session = self._session
        while True:
            # A fault may have come between a step, its event and its checkpoint.
            await self._follow(session)
            await self._put_checkpoint(session)
            if not self._is_running:
                return
            if session.num_steps >= files.record.settings.num_steps:
                break
            if not await self._advance(session):
                return
        await self._finish()

    @property
    def _is_running(self) -> bool:
        """True unless a request has paused or ended the job meanwhile."""
        return self._files.record.status is JobStatus.RUNNING

    @property
    def _session(self) -> Session:
        return self._training.get(self._files.record.session)

    async def _advance(self, session: Session) -> bool:
        """Make steps up to the next validation; False if the job does not run any more."""
        settings = self._files.record.settings
        begun = session.num_steps - session.num_steps % settings.eval_every
        until = min(begun + settings.eval_every, settings.num_steps)
        while session.num_steps < until:
            if session.state.status is Status.PAUSED and session.state.reason != ASLEEP:
                self._training.resume(session.config.id)
            if session.state.status is Status.READY:
                self._training.run(session.config.id, until - session.num_steps)
            await self._follow(session)
            if not self._is_running:
                return False
            state = session.state
            if state.status is Status.PAUSED:
                if state.reason != ASLEEP:
                    self.pause(state.reason or "Its session was paused.")
                    return False
                await session.wait_for_steps(session.num_steps)
                self._training.get(session.config.id)
                # A request may have paused or ended the job, whose session then stays paused.
                if not self._is_running:
                    return False
        return True

    async def _follow(self, session: Session) -> None:
        """Add an event for each step of the session, until none comes any more."""
        files = self._files
        after = min(files.last_step, session.num_steps)
        async for record in self._training.follow(session.config.id, after):
            if record.step > files.last_step:
                metrics = step_metrics(record)
                validation = (
                    f", validation loss {metrics[BEST_BY]:.4g}" if BEST_BY in metrics else ""
                )
                message = f"Step {record.step}: training loss {metrics['train_loss']:.4g}"
                self.tell(f"{message}{validation}", metrics)

    async def _put_checkpoint(self, session: Session) -> None:
        """Write and serve the state after the latest step, if it is to be one and is not yet."""
        files, record = self._files, self._files.record
        step, settings = session.num_steps, record.settings
        is_due = step % settings.eval_every == 0 or step >= settings.num_steps
        if session.last is None or not is_due or files.has_checkpoint(step):
            return
        checkpoint = Checkpoint(
            step=step,
            created_at=int(self._now()),
            name=f"{model_name(files)}:ckpt-step-{step}",
            metrics=step_metrics(session.last),
        )
        # mlx-lm's format takes all layers; PEFT's lacks some, and has a place for a head.
        form = "peft" if settings.method is Method.REWARD else "mlx"
        weights = await self._training.weights(record.session, None, of_checkpoint=form == "peft")
        adapter = adapter_files(weights, form)
        self._training.check_bytes(sum(map(len, adapter.values())))
        folder = files.put_checkpoint(checkpoint, adapter)
        await self._served.keep(checkpoint.name, record.settings.model, folder)
        for old in self._superfluous():
            await self._served.forget_kept(old.name)
            files.drop_checkpoint(old)

    def _superfluous(self) -> list[Checkpoint]:
        old = self._files.checkpoints[:-KEPT]
        best = best_checkpoint(self._files)
        return [checkpoint for checkpoint in old if checkpoint is not best]

    async def _finish(self) -> None:
        """Serve the best state, or the last one, and keep the figures of all steps in a file."""
        files, record = self._files, self._files.record
        best = best_checkpoint(files)
        if best is None:
            raise ConflictError("The job has made no step.")
        name = model_name(files)
        files.set_result(best.step)
        await self._served.keep(name, record.settings.model, files.folder_of(best))
        figures = await self._figures()
        result = await self._write_result(
            record.settings.owner, f"{record.id}.csv", _table(figures)
        )
        if not self._is_running:
            await self._served.forget_kept(name)
            files.set_result(None)
            return
        files.save(
            status=JobStatus.SUCCEEDED,
            finished_at=int(self._now()),
            fine_tuned_model=name,
            trained_tokens=int(sum(step["tokens"] for step in figures)),
            result_files=(result,),
        )
        self.tell(f"The job has succeeded: {name} is the state after step {best.step}.")

    async def _figures(self) -> list[Mapping[str, Any]]:
        """Return the figures of each step; other work goes on meanwhile."""
        figures: list[Mapping[str, Any]] = []
        for begin in range(0, self._files.num_events, CHUNK):
            events = self._files.events(begin, begin + CHUNK)
            figures += [event.data for event in events if event.data]
            await asyncio.sleep(0)
        return figures

    def pause(self, reason: str) -> None:
        """Note that the server has paused the job."""
        self.end(f"The job is paused: {reason}", "warn", status=JobStatus.PAUSED, reason=reason)

    def end(self, message: str, level: Level, **changes: Any) -> None:
        """Change the record and add an event, even if the disk refuses it."""
        self._files.set_status(**changes)
        with contextlib.suppress(StorageError):
            self.tell(message, level=level)

    def tell(
        self, message: str, data: Mapping[str, float] | None = None, *, level: Level = "info"
    ) -> None:
        """Add an event."""
        event = JobEvent(
            number=self._files.num_events,
            created_at=int(self._now()),
            message=message,
            level=level,
            data=data or {},
        )
        self._files.append(event)


def model_name(files: JobFiles) -> str:
    """Return the name of a job's fine-tuned model, as OpenAI forms it."""
    settings = files.record.settings
    return f"ft:{settings.model}:{settings.suffix or ''}:{files.record.id}"


def best_checkpoint(files: JobFiles) -> Checkpoint | None:
    """Return the checkpoint with the least validation loss, the last one without validation."""
    checkpoints = files.checkpoints
    validated = [checkpoint for checkpoint in checkpoints if BEST_BY in checkpoint.metrics]
    if validated:
        return min(validated, key=lambda checkpoint: checkpoint.metrics[BEST_BY])
    return checkpoints[-1] if checkpoints else None


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a step by OpenAI's names where it has any."""
    assert isinstance(record, GradientRecord), "jobs take gradients"
    facts = {f"train_{OPENAI_NAMES.get(name, name)}": value for name, value in record.facts.items()}
    validation = {BEST_BY: record.validation_loss, "valid_accuracy": record.validation_accuracy}
    facts |= {name: value for name, value in validation.items() if value is not None}
    return facts | {
        "step": record.step,
        "train_loss": record.loss,
        "learning_rate": record.learning_rate,
        "tokens": record.tokens,
        "tokens_per_s": record.tokens / record.seconds if record.seconds else 0.0,
    }


def _table(figures: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the figures of the steps as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, RESULT_FIELDS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(figures)
    return text.getvalue().encode()
