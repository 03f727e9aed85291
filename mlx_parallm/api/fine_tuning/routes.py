"""``/v1/fine_tuning/jobs``: training sessions that run to their end."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query, Request

from mlx_parallm.api.fine_tuning.answer import (
    checkpoint_object,
    event_page,
    job_object,
    page,
)
from mlx_parallm.api.fine_tuning.request import metadata_filter, new_job
from mlx_parallm.api.fine_tuning.schema import CreateJob
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.mezo.routes import TrainingDep
from mlx_parallm.training.jobs.service import JobService

routes = Routes(SERVER, access=Access.ADMIN)
After = Annotated[str | None, Query(description="The last id of the page before.")]
MetadataFilter = Annotated[
    str | None,
    Query(description="null: jobs without; `metadata[key]=value`: jobs with all of these."),
]
Limit = Annotated[int, Query(ge=1, le=100)]


async def get_jobs(request: Request, training: TrainingDep) -> JobService:
    """Return the jobs of this application; there are some wherever there are sessions."""
    del training
    return request.app.state.jobs


JobsDep = Annotated[JobService, Depends(get_jobs)]


@routes.post("/v1/fine_tuning/jobs")
async def create_job(
    body: CreateJob, request: Request, engine: EngineDep, training: TrainingDep, jobs: JobsDep
) -> dict[str, Any]:
    """Check the files, and put a job into the queue."""
    return job_object(await new_job(body, request, engine, jobs), training)


@routes.get("/v1/fine_tuning/jobs")
async def list_jobs(
    request: Request,
    training: TrainingDep,
    jobs: JobsDep,
    after: After = None,
    limit: Limit = 20,
    metadata: MetadataFilter = None,
) -> dict[str, Any]:
    """List all jobs, newest first, or those with some metadata."""
    wanted = metadata_filter(metadata, request.query_params.multi_items())
    listed = [files for files in reversed(jobs.all()) if wanted(files.record.settings.metadata)]
    objects = [job_object(files, training) for files in listed]
    return page(objects, after=after, limit=limit)


@routes.get("/v1/fine_tuning/jobs/{job_id}")
async def retrieve_job(job_id: str, training: TrainingDep, jobs: JobsDep) -> dict[str, Any]:
    """Return a job."""
    return job_object(jobs.get(job_id), training)


@routes.delete("/v1/fine_tuning/jobs/{job_id}")
async def delete_job(job_id: str, jobs: JobsDep) -> dict[str, Any]:
    """Delete a job with its session, its checkpoints and its result."""
    await jobs.delete(job_id)
    return {"object": "fine_tuning.job", "id": job_id, "deleted": True}


@routes.post("/v1/fine_tuning/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, training: TrainingDep, jobs: JobsDep) -> dict[str, Any]:
    """End a job; its checkpoints stay."""
    return job_object(await jobs.cancel(job_id), training)


@routes.post("/v1/fine_tuning/jobs/{job_id}/pause")
async def pause_job(job_id: str, training: TrainingDep, jobs: JobsDep) -> dict[str, Any]:
    """Let a job make no more steps until it is resumed."""
    return job_object(await jobs.pause(job_id), training)


@routes.post("/v1/fine_tuning/jobs/{job_id}/resume")
async def resume_job(job_id: str, training: TrainingDep, jobs: JobsDep) -> dict[str, Any]:
    """Put a paused job into the queue again."""
    return job_object(jobs.resume(job_id), training)


@routes.get("/v1/fine_tuning/jobs/{job_id}/events")
async def list_events(
    job_id: str, jobs: JobsDep, after: After = None, limit: Limit = 20
) -> dict[str, Any]:
    """List what happened to a job, newest first."""
    return event_page(jobs.get(job_id), after=after, limit=limit)


@routes.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
async def list_checkpoints(
    job_id: str, jobs: JobsDep, after: After = None, limit: Limit = 10
) -> dict[str, Any]:
    """List the checkpoints of a job, newest first."""
    checkpoints = jobs.get(job_id).checkpoints
    objects = [checkpoint_object(job_id, checkpoint) for checkpoint in reversed(checkpoints)]
    return page(objects, after=after, limit=limit)
