"""Hugging Face's task form: ``POST /``, ``/models/{name}`` and ``/pipeline/{task}/{name}``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.sse import STREAMED
from mlx_parallm.api.pooling.answer import PoolingDep, PoolingPrelude
from mlx_parallm.api.pooling.hf.generation import (
    GENERATES,
    encoder_decoder,
    is_generating,
    run_generation,
)
from mlx_parallm.api.pooling.hf.schema import Job, TaskParameters, TaskRequest
from mlx_parallm.api.pooling.hf.tasks import TASKS, choose
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.api.turns.prelude import Prelude, PreludeDep

routes = Routes(POOLING, body_limit=INPUT, in_any_process=True)

WARNINGS = "x-warnings"
MAX_WARNING_CHARS = 1000


@routes.post("/", responses=STREAMED)
async def run_task(body: TaskRequest, pooling: PoolingDep, prelude: PreludeDep) -> Response:
    """Do the task that the body implies, with the first model that can do it."""
    return await _run(body, pooling, prelude)


@routes.post("/models/{name:path}", responses=STREAMED)
async def run_task_of_model(
    name: str, body: TaskRequest, pooling: PoolingDep, prelude: PreludeDep
) -> Response:
    """Do a task of this model; its name may end with ``/pipeline/{task}``."""
    before, marker, task = name.rpartition("/pipeline/")
    if marker and (task in TASKS or is_generating(task)):
        return await _run(body, pooling, prelude, before, task)
    return await _run(body, pooling, prelude, name)


@routes.post("/pipeline/{task}", responses=STREAMED)
async def run_named_task(
    task: str, body: TaskRequest, pooling: PoolingDep, prelude: PreludeDep
) -> Response:
    """Do this task, with the first model that can do it."""
    return await _run(body, pooling, prelude, None, task)


@routes.post("/pipeline/{task}/{name:path}", responses=STREAMED)
async def run_named_task_of_model(
    task: str, name: str, body: TaskRequest, pooling: PoolingDep, prelude: PreludeDep
) -> Response:
    """Do this task, with this model."""
    return await _run(body, pooling, prelude, name, task)


async def _run(
    body: TaskRequest,
    pooling: PoolingPrelude,
    prelude: Prelude,
    name: str | None = None,
    task: str | None = None,
) -> Response:
    parameters = body.all_parameters()
    if _generates(body, parameters, pooling, prelude, name, task):
        return await run_generation(body, prelude, name, task)
    model, run = choose(pooling.client, body.inputs, parameters, name=name, task=task)
    job = Job(body.inputs, parameters, pooling.call(model, name, "task"))

    async def work() -> Response:
        answer = await run(job)
        # Thousands of vectors take long to write.
        response = await asyncio.to_thread(JSONResponse, answer)
        if job.warnings:
            response.headers[WARNINGS] = _plain(job.warnings)
        return response

    return await unless_disconnected(pooling.request, work())


def _generates(
    body: TaskRequest,
    parameters: TaskParameters,
    pooling: PoolingPrelude,
    prelude: Prelude,
    name: str | None,
    task: str | None,
) -> bool:
    """True if a request is one of encoder-decoders, which come after pooling models."""
    if task is not None:
        return is_generating(task)
    if encoder_decoder(prelude.engine, name) is None:
        return False
    if name is not None or body.stream or parameters.model_fields_set & GENERATES:
        return True
    return not pooling.client.models()


def _plain(warnings: Iterable[str]) -> str:
    """Return the warnings as one line of ASCII, which a header can hold."""
    text = " ".join(warnings).encode("ascii", "backslashreplace").decode()
    return "".join(char for char in text if char.isprintable())[:MAX_WARNING_CHARS]
