"""Answers about fine-tuning jobs, in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mlx_parallm.training.jobs.files import JobFiles
from mlx_parallm.training.jobs.records import Checkpoint, JobEvent, JobStatus
from mlx_parallm.training.service import TrainingService
from mlx_parallm.types.errors import NotFoundError

# OPENAI_HYPERPARAMETERS: those that the SDK's objects have.
OPENAI_HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")


def job_object(files: JobFiles, training: TrainingService) -> dict[str, Any]:
    """Return a job."""
    record, settings = files.record, files.record.settings
    hyperparameters = dict(settings.hyperparameters)
    return {
        "object": "fine_tuning.job",
        "id": record.id,
        "model": settings.model,
        "created_at": record.created_at,
        "finished_at": record.finished_at,
        "estimated_finish": _estimated_finish(files, training),
        "status": record.status.value,
        "reason": _reason(files, training),
        "error": None if record.error is None else asdict(record.error),
        "fine_tuned_model": record.fine_tuned_model,
        "organization_id": "",
        "result_files": list(record.result_files),
        "training_file": settings.training_file,
        "validation_file": settings.validation_file,
        "hyperparameters": {name: hyperparameters[name] for name in OPENAI_HYPERPARAMETERS},
        "method": {
            "type": settings.method.value,
            settings.method.value: {"hyperparameters": hyperparameters},
        },
        "seed": settings.seed,
        "trained_tokens": record.trained_tokens,
        "integrations": [],
        "metadata": settings.metadata,
        "session_id": record.session,
        "step": files.last_step,
        "num_steps": settings.num_steps,
    }


def _reason(files: JobFiles, training: TrainingService) -> str | None:
    """Return why a job makes no steps; None if it makes some, or a request has paused it."""
    record = files.record
    is_running = record.status is JobStatus.RUNNING
    if is_running and training.has(record.session):
        # Such as the sleep of the server, which pauses sessions and no jobs.
        return training.get(record.session).state.reason
    return record.reason


def _estimated_finish(files: JobFiles, training: TrainingService) -> int | None:
    """Return when a running job will end, if its steps go on as they did; None if not known."""
    record = files.record
    if record.status is not JobStatus.RUNNING:
        return None
    try:
        session = training.get(record.session)
    except NotFoundError:
        return None
    if not session.num_steps:
        return None
    left = record.settings.num_steps - session.num_steps
    return int(time.time() + left * session.costs.seconds / session.num_steps)


def event_object(job_id: str, event: JobEvent) -> dict[str, Any]:
    """Return an event of a job."""
    return {
        "object": "fine_tuning.job.event",
        "id": event_id(job_id, event.number),
        "created_at": event.created_at,
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.data else "message",
        "data": dict(event.data) or None,
    }


def event_id(job_id: str, number: int | str) -> str:
    """Return the id of a job's event."""
    return f"ftevent-{job_id.removeprefix('ftjob-')}-{number}"


def event_page(files: JobFiles, *, after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of a job's events, newest first; see ``page``."""
    job_id = files.record.id
    number = (after or "").removeprefix(event_id(job_id, ""))
    is_known = len(number) < 20 and number.isdecimal() and after == event_id(job_id, int(number))
    end = min(int(number), files.num_events) if is_known else files.num_events
    events = files.events(max(0, end - limit), end)
    objects = [event_object(job_id, event) for event in reversed(events)]
    return _listed(objects, has_more=end > limit)


def checkpoint_object(job_id: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint of a job."""
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": checkpoint_id(job_id, checkpoint.step),
        "created_at": checkpoint.created_at,
        "fine_tuning_job_id": job_id,
        "fine_tuned_model_checkpoint": checkpoint.name,
        "step_number": checkpoint.step,
        "metrics": _checkpoint_metrics(checkpoint.metrics),
    }


def checkpoint_id(job_id: str, step: int) -> str:
    """Return the id of a job's checkpoint."""
    return f"ftckpt-{job_id.removeprefix('ftjob-')}-{step}"


def _checkpoint_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    # The whole validation file is read each time.
    loss = metrics.get("valid_loss")
    return dict(metrics) | ({} if loss is None else {"full_valid_loss": loss})


def page(items: Sequence[dict[str, Any]], *, after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of objects after the one with this id; all follow an id that none has."""
    ids = [item["id"] for item in items]
    begin = ids.index(after) + 1 if after in ids else 0
    return _listed(items[begin : begin + limit], has_more=begin + limit < len(items))


def _listed(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of these objects."""
    return {
        "object": "list",
        "data": list(data),
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
